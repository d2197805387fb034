"""Tables of jobs, pools, backends, rollouts and trajectories, and those that end a quickstart."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rollyard_crds import BackendPool, BackendStatus, Condition, RolloutJob, StageCounts
from rollyard_crds.fields.reward import rounded
from rollyard_crds.trajectory import Trajectory
from rollyard_process.log_text import one_line

from rollyard import terminal
from rollyard.render.trajectory import why

if TYPE_CHECKING:
    from rollyard_client import RolloutRow

    from rollyard.trajectories.summary import PolicySummary, Summary, UpdateSummary

WRAPPED: Final = frozenset({"why", "message", "trains"})
PIPE_WIDTH: Final = 8192
GAPS: Final = (3, 2, 1)
"""The possible gaps between columns. The widest with which a table fits the terminal is used."""
ROLLOUT_COLUMNS: Final = (
    "rollout",
    "task",
    "sample",
    "status",
    "reward",
    "seconds",
    "tokens",
    "attempts",
    "age",
    "why",
)


def age(since: datetime | None, now: datetime) -> str:
    """Return an age as kubectl writes it, such as `12s`, `5m`, `3h` or `2d`."""
    if since is None:
        return ""
    seconds = max(0, int((now - since).total_seconds()))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def plain_table(columns: Sequence[str]) -> Table:
    """Return an empty table like those of kubectl, without rules and with upper-case headings.

    Columns with free text (`why`, `message`) may wrap on a terminal.
    """
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="", padding=(0, GAPS[0], 0, 0))
    for column in columns:
        table.add_column(column.upper(), no_wrap=column not in WRAPPED, min_width=len(column))
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table that fits the terminal, if that is possible without cutting a word.

    Columns move closer together for that. If the table still does not fit, and in a pipe, rows have their
    full length. The terminal wraps them, because a name or id that is cut cannot be copied.
    """
    if console.is_terminal:
        for gap in GAPS:
            table.padding = (0, gap, 0, 0)
            if fits(console, table):
                console.print(table)
                return
    table.padding = (0, GAPS[0], 0, 0)
    buffer = io.StringIO()
    terminal.console(file=buffer, width=PIPE_WIDTH).print(table)
    for line in buffer.getvalue().splitlines():
        console.file.write(f"{line.rstrip()}\n")


def fits(console: Console, table: Table) -> bool:
    """Return whether the table can be printed without cutting a word."""
    uncut = console.measure(table, options=console.options.update(width=PIPE_WIDTH)).minimum
    return uncut <= console.width


def _reason(conditions: Iterable[Condition], kind: str) -> tuple[str, str]:
    for condition in conditions:
        if condition.type == kind:
            return condition.status, condition.reason
    return "Unknown", ""


def _stage(counts: StageCounts) -> str:
    return f"{counts.active}+{counts.queued}"


NAMESPACE: Final = ("namespace",)
"""The first column of a table with objects of all namespaces."""


def jobs_table(jobs: Iterable[RolloutJob], wide: bool = False, namespaces: bool = False) -> Table:
    """Return a table with one row for each job."""
    columns = [
        "name",
        "finished",
        "phase",
        "reason",
        "succeeded",
        "failed",
        "total",
        "reward",
    ]
    if wide:
        columns += ["handler", "pool", "init", "run", "eval", "message"]
    table = plain_table([*NAMESPACE * namespaces, *columns, "age"])
    now = datetime.now(UTC)
    for job in jobs:
        counts, status = job.status.counts, job.status
        row = [
            job.metadata.name,
            _reason(status.conditions, "Finished")[0],
            status.phase,
            _reason(status.conditions, "Running")[1],
            str(counts.succeeded),
            str(counts.failed),
            str(counts.total),
            "" if status.reward_mean is None else rounded(status.reward_mean),
        ]
        if wide:
            pool = job.spec.backend_ref.name if job.spec.backend_ref else ""
            stages = [_stage(counts.init), _stage(counts.run), _stage(counts.eval)]
            row += [job.spec.handler, pool, *stages, status.message]
        where = [job.metadata.namespace] * namespaces
        table.add_row(*where, *row, age(job.metadata.creation_timestamp, now))
    return table


def pools_table(pools: Iterable[BackendPool], namespaces: bool = False) -> Table:
    """Return a table with one row for each pool. A model's folder is shortened to its last part."""
    columns = [
        "name",
        "ready",
        "model",
        "engine",
        "version",
        "active",
        "waiting",
        "hit rate",
        "state",
    ]
    table = plain_table([*NAMESPACE * namespaces, *columns, "age", "trains"])
    now = datetime.now(UTC)
    for pool in pools:
        backends, external = pool.status.backends, pool.spec.engine.external
        total = len(external.urls) if external else pool.spec.replicas
        table.add_row(
            *([pool.metadata.namespace] * namespaces),
            pool.metadata.name,
            f"{pool.status.ready_replicas}/{total}",
            _short(pool.spec.model),
            pool.spec.engine.type,
            version_of(pool),
            _active(backends),
            _sum(backend.waiting_requests for backend in backends),
            _share(mean(backend.prefix_cache_hit_rate for backend in backends)),
            "Paused" if pool.status.paused else _reason(pool.status.conditions, "Ready")[1],
            age(pool.metadata.creation_timestamp, now),
            trains_of(pool),
        )
    return table


BACKEND_COLUMNS: Final = (
    *("backend", "health", "circuit", "weights", "version", "active", "running", "waiting"),
    *("hit rate", "tokens/s"),
)


def backend_row(backend: BackendStatus) -> list[str]:
    """Return the row of one backend, with a text for each column of `BACKEND_COLUMNS`.

    The values are those that the driver, the router and the server report.
    """
    return [
        backend.url,
        health_of(backend),
        backend.circuit,
        backend.weights,
        backend.policy_version or "-",
        _active([backend]),
        _sum([backend.running_requests]),
        _sum([backend.waiting_requests]),
        _share(backend.prefix_cache_hit_rate),
        "-" if backend.tokens_per_second is None else f"{backend.tokens_per_second:.0f}",
    ]


def backends_table(pools: Iterable[BackendPool], namespaces: bool = False) -> Table:
    """Return a table with one row for each backend of each pool.

    A pool without a backend has one row that says why.
    """
    rows: list[tuple[str, list[str], str]] = []
    for pool in pools:
        name = f"{pool.metadata.namespace}/{pool.metadata.name}" if namespaces else pool.metadata.name
        rows += [(name, backend_row(backend), backend.message) for backend in pool.status.backends]
        if not pool.status.backends:
            rows.append((name, ["-"] * len(BACKEND_COLUMNS), _why_not_ready(pool)))
    # If there is no message at all, the column is left out because it would only make lines longer.
    message_column = ["message"] if any(message for _, _, message in rows) else []
    table = plain_table(["pool", *BACKEND_COLUMNS, *message_column])
    for name, cells, message in rows:
        table.add_row(name, *cells, *([message] if message_column else []))
    return table


def _why_not_ready(pool: BackendPool) -> str:
    for condition in pool.status.conditions:
        if condition.type == "Ready":
            return one_line(condition.message or condition.reason)
    return ""


def trains_of(pool: BackendPool) -> str:
    """Return whether the pool's backends have what training needs, or `-` if none has been asked yet.

    Where one lacks something, it is the first of those lines, with the number of backends that it is true of.
    """
    lines = [backend.trains for backend in pool.status.backends if backend.trains]
    wrong = [line for line in lines if line != "yes"]
    if not wrong:
        return "yes" if lines else "-"
    first = min(wrong)  # `no` comes before `unknown`.
    share = f"{lines.count(first)} of {len(lines)}: " if set(lines) != {first} else ""
    return one_line(share + first)


def health_of(backend: BackendStatus) -> str:
    """Return the health of a backend: `Ready`, `Draining`, `Restarting` or `NotReady`."""
    if backend.draining:
        return "Draining"
    if backend.restart_requested:
        return "Restarting"
    return "Ready" if backend.ready else "NotReady"


def version_of(pool: BackendPool) -> str:
    """Return the policy version of the pool's weights.

    Before the first update, it is the version that the backends report, `mixed` if they differ, or `-` if
    they report none.
    """
    if pool.status.policy_version:
        return pool.status.policy_version
    versions = {backend.policy_version for backend in pool.status.backends if backend.policy_version}
    return versions.pop() if len(versions) == 1 else "mixed" if versions else "-"


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values, or None if no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _short(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model


def _sum(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    return str(sum(known)) if known else "-"


def _active(backends: Sequence[BackendStatus]) -> str:
    """Return the active rollouts of some backends and, if all of them say it, how many they take at most."""
    active = sum(backend.active_rollouts for backend in backends)
    places = places_of(backends)
    return str(active) if places is None else f"{active}/{places}"


def places_of(backends: Sequence[BackendStatus]) -> int | None:
    """Return how many rollouts some backends take at once, or None if one of them does not say it."""
    limits = [backend.max_active_rollouts for backend in backends]
    known = [limit for limit in limits if limit is not None]
    return sum(known) if known and len(known) == len(limits) else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def trajectories_table(trajectories: Iterable[Trajectory]) -> Table:
    """Return a table with one row for each trajectory, and with the reason of a failure."""
    table = plain_table(["rollout", "task", "status", "reward", "turns", "tokens", "why"])
    for trajectory in trajectories:
        table.add_row(
            trajectory.id,
            trajectory.task_id,
            trajectory.status,
            "" if trajectory.reward is None else f"{trajectory.reward:g}",
            str(sum(1 for _ in trajectory.every_turn)),
            str(trajectory.sampled_tokens),
            why(trajectory),
        )
    return table


def rows_table(rows: Iterable[RolloutRow]) -> Table:
    """Return a table of rollouts. Texts that workers and policies wrote are escaped."""
    table = plain_table(ROLLOUT_COLUMNS)
    now = datetime.now(UTC)
    for row in rows:
        table.add_row(
            row.id,
            one_line(row.task_id),
            str(row.sample),
            row.status if row.stage is None else f"{row.status} {row.stage}",
            "-" if row.reward is None else f"{row.reward:.4g}",
            f"{row.seconds:.1f}",
            str(row.tokens),
            str(row.attempts),
            age(datetime.fromtimestamp(row.since, UTC), now),
            one_line(row.reason),
        )
    return table


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
    reward = "none" if summary.reward_mean is None else rounded(summary.reward_mean)
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
    for backend in policies.backends:
        rate = backend.prefix_cache_hit_rate
        hits = "-" if rate is None else f"{rate:.0%}"
        backends.add_row(
            backend.url,
            str(backend.rollouts),
            f"{backend.tokens_sampled:,}",
            hits,
            backend.policy_version or "-",
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
