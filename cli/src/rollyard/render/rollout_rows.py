"""The table of a job's rollouts as the control plane lists them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from rich.table import Table
from rollyard_client import RolloutRow
from rollyard_process.log_text import one_line

from rollyard.render.tables import age, plain_table

COLUMNS = ("rollout", "task", "sample", "status", "reward", "seconds", "tokens", "attempts", "age", "why")


def rows_table(rows: Iterable[RolloutRow]) -> Table:
    """Return a table of rollouts. Texts that workers and policies wrote are escaped."""
    table = plain_table(COLUMNS)
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
