"""The table at the end of a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rollyard.summary import Summary


def print_summary(console: Console, summary: Summary) -> None:
    """Stages in one table, the outcome in another."""
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
