"""How many results of a stream nobody has read, so that a trainer that never reads is found out.

A cursor that is sent with a request, or acknowledged, shows that all results before it were read.
"""

from __future__ import annotations

from typing import Final

from rollyard_api.core.cursors import Kind
from rollyard_api.core.problems import Conflict
from rollyard_api.storage.rows import JobRow

_PARTS: Final = 16
"""A cursor is noted when it is this part of the bound ahead, so that few pages are followed by a write."""


def is_ahead(job: JobRow, kind: Kind, position: int, bound: int) -> bool:
    """Return whether a cursor is so far ahead of what is noted that it should be noted.

    Args:
        job: The job, as it was last read.
        kind: The kind of the cursor.
        position: The number of results before it.
        bound: The bound on unread results.
    """
    return position - _noted(job, kind) >= max(1, bound // _PARTS)


def _noted(job: JobRow, kind: Kind) -> int:
    return job.read_groups if kind == "groups" else job.read_trajectories


def check(job: JobRow, bound: int) -> None:
    """Refuse further rollouts of a stream while too many of its results are unread.

    Args:
        job: The job.
        bound: The bound on unread rollouts.

    Raises:
        Conflict: The bound is reached.
    """
    # A trainer reads trajectories or groups, and seldom both.
    unread = min(job.ended - job.read_trajectories, (job.groups_ended - job.read_groups) * job.limits.samples)
    if unread >= bound:
        raise Conflict(
            f"RolloutJob {job.name!r} has about {unread} ended rollouts that nobody has read, and {bound} is "
            "the most: they are in the trajectory store; read them with a cursor, or acknowledge one, and "
            "then repeat this call",
            reason="ResultsUnread",
        )
