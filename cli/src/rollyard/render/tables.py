"""Tables of jobs, pools, rollouts and summaries."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rollyard_crds import BackendPool, Condition, RolloutJob, StageCounts
from rollyard_crds.trajectory import Trajectory

from rollyard.render.trajectory import why

WRAPPED = frozenset({"why", "message"})
PIPE_WIDTH = 8192


def age(since: datetime | None, now: datetime) -> str:
    """As kubectl writes ages: `12s`, `5m`, `3h`, `2d`."""
    if since is None:
        return ""
    seconds = max(0, int((now - since).total_seconds()))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def plain_table(columns: Sequence[str]) -> Table:
    """As kubectl's: no lines, upper-case heads. Free text (`why`, `message`) may wrap on a terminal."""
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="", padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column.upper(), no_wrap=column not in WRAPPED)
    return table


def print_table(console: Console, table: Table) -> None:
    """Fits a terminal if it can be without cutting a word; else, and in a pipe, rows are as long as they are.

    A name or id that is cut cannot be copied; a terminal wraps what is too long.
    """
    uncut = console.measure(table, options=console.options.update(width=PIPE_WIDTH)).minimum
    if console.is_terminal and uncut <= console.width:
        console.print(table)
        return
    buffer = io.StringIO()
    Console(file=buffer, width=PIPE_WIDTH, highlight=False).print(table)
    for line in buffer.getvalue().splitlines():
        console.file.write(f"{line.rstrip()}\n")


def _reason(conditions: Iterable[Condition], kind: str) -> tuple[str, str]:
    for condition in conditions:
        if condition.type == kind:
            return condition.status, condition.reason
    return "Unknown", ""


def _stage(counts: StageCounts) -> str:
    return f"{counts.active}+{counts.queued}"


def jobs_table(jobs: Iterable[RolloutJob], wide: bool = False) -> Table:
    """One row for each job."""
    columns = ["name", "finished", "phase", "reason", "succeeded", "failed", "total", "reward"]
    if wide:
        columns += ["handler", "pool", "init", "run", "eval", "message"]
    table = plain_table([*columns, "age"])
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
            "" if status.reward_mean is None else f"{status.reward_mean:.3f}",
        ]
        if wide:
            pool = job.spec.backend_ref.name if job.spec.backend_ref else ""
            stages = [_stage(counts.init), _stage(counts.run), _stage(counts.eval)]
            row += [job.spec.handler, pool, *stages, status.message]
        table.add_row(*row, age(job.metadata.creation_timestamp, now))
    return table


def pools_table(pools: Iterable[BackendPool], wide: bool = False) -> Table:
    """One row for each pool."""
    columns = ["name", "ready", "reason", "backends", "wanted"]
    if wide:
        columns += ["engine", "model", "active"]
    table = plain_table([*columns, "age"])
    now = datetime.now(UTC)
    for pool in pools:
        external = pool.spec.engine.external
        ready, reason = _reason(pool.status.conditions, "Ready")
        row = [
            pool.metadata.name,
            ready,
            reason,
            str(pool.status.ready_replicas),
            str(len(external.urls) if external else pool.spec.replicas),
        ]
        if wide:
            active = sum(backend.active_rollouts for backend in pool.status.backends)
            row += [pool.spec.engine.type, pool.spec.model, str(active)]
        table.add_row(*row, age(pool.metadata.creation_timestamp, now))
    return table


def trajectories_table(trajectories: Iterable[Trajectory]) -> Table:
    """One row for each trajectory, with why it failed where it did."""
    table = plain_table(["rollout", "task", "status", "reward", "turns", "tokens", "why"])
    for trajectory in trajectories:
        table.add_row(
            trajectory.id,
            trajectory.task_id,
            trajectory.status,
            "" if trajectory.reward is None else f"{trajectory.reward:g}",
            str(len(trajectory.turns)),
            str(trajectory.sampled_tokens),
            why(trajectory),
        )
    return table
