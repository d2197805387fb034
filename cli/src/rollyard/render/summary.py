"""The tables at the end of a quickstart."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rollyard.trajectories.summary import Summary
from rollyard.trajectories.versions import PolicySummary, UpdateSummary


def print_summary(console: Console, summary: Summary) -> None:
    """Print a table of the stages and a table of the outcome."""
    stages = Table(title="Stages", title_justify="left", title_style="bold")
    for column in ("stage", "rollouts", "mean work", "mean wait", "work in all"):
        stages.add_column(column, justify="left" if column == "stage" else "right")
    for name, stage in summary.stages.items():
        stages.add_row(
            name.capitalize(),
            str(stage.rollouts),
            f"{stage.mean_worked:.3f} s",
            f"{stage.mean_queued:.3f} s",
            f"{stage.worked_seconds:.1f} s",
        )
    console.print(stages)
    outcome = Table(title="Outcome", title_justify="left", title_style="bold", show_header=False)
    outcome.add_column()
    outcome.add_column(justify="right")
    reward = "none" if summary.reward_mean is None else f"{summary.reward_mean:.3f}"
    for name, value in (
        ("rollouts", str(summary.rollouts)),
        ("with a reward", str(summary.succeeded)),
        ("failed (infrastructure)", str(summary.failed)),
        ("truncated", str(summary.truncated)),
        ("reward mean", reward),
        ("groups, informative", f"{summary.groups}, {summary.groups_informative}"),
        ("turns, mean", f"{summary.turns_mean:.1f}"),
        ("tokens sampled", f"{summary.tokens_sampled:,}"),
        ("tokens/s", f"{summary.tokens_per_second:,.0f}"),
        ("wall time", f"{summary.wall_seconds:.1f} s"),
    ):
        outcome.add_row(name, value)
    console.print(outcome)


def print_policies(console: Console, policies: PolicySummary) -> None:
    """Print a table of the backends, a table of the policy versions, and a line for each weight update."""
    backends = Table(title="Backends", title_justify="left", title_style="bold")
    backends.add_column("backend", no_wrap=True)
    for column in ("rollouts", "tokens", "cache hits"):
        backends.add_column(column, justify="right")
    backends.add_column("version")
    for one in policies.backends:
        rate = one.prefix_cache_hit_rate
        hits = "-" if rate is None else f"{rate:.0%}"
        backends.add_row(
            one.url, str(one.rollouts), f"{one.tokens_sampled:,}", hits, one.policy_version or "-"
        )
    console.print(backends)
    versions = Table(title="Policy versions", title_justify="left", title_style="bold")
    for column in ("version", "rollouts", "tokens", "behind"):
        versions.add_column(column, justify="left" if column == "version" else "right")
    for version in policies.policy_versions:
        versions.add_row(version.version, str(version.rollouts), f"{version.tokens:,}", str(version.lag))
    console.print(versions)
    if policies.weight_updates:
        several = policies.rollouts_of_several_versions
        console.print(f"{several} rollouts continued with the new weights and hold tokens of both versions")
    for update in policies.weight_updates:
        console.print(f"Weights {update.policy_version}: {_update_words(update)}", soft_wrap=True)


def _update_words(update: UpdateSummary) -> str:
    how = {"reference": "against the reference given", "transformers": "by the control plane's transformers"}
    verified = f"verified {how.get(update.verified_by, '')}" if update.verified else "not verified"
    words = [update.state.lower(), verified]
    if update.max_difference is not None:
        words.append(f"log-probabilities differ by at most {update.max_difference:.2g}")
    if update.paused_seconds is not None:
        words.append(f"servers paused for at most {update.paused_seconds:.2f} s")
    return ", ".join(words)
