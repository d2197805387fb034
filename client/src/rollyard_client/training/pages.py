"""The pages of a job's results, and where a reader of them begins; both clients iterate over these."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rollyard_client.call import Call
from rollyard_client.errors import Invalid
from rollyard_client.paging import Cursor
from rollyard_client.requests import cursors, results
from rollyard_client.requests.cursors import Acknowledged
from rollyard_client.requests.results import Group

if TYPE_CHECKING:
    from rollyard_crds.trajectory import Trajectory


def trajectory_pages(
    name: str, namespace: str, *, follow: bool, cursor: str, status: str | None
) -> Cursor[Trajectory]:
    """Return the pages of a job's ended rollouts."""
    build = partial(results.trajectories, name, namespace, limit=100, status=status)
    return Cursor(lambda at, wait: build(cursor=at, wait=wait), results.trajectory, follow, cursor)


def group_pages(
    name: str, namespace: str, *, follow: bool, cursor: str, informative: bool, dropped: bool
) -> Cursor[Group]:
    """Return the pages of a job's ended groups."""
    build = partial(results.groups, name, namespace, limit=16, informative=informative, dropped=dropped)
    return Cursor(lambda at, wait: build(cursor=at, wait=wait), results.group, follow, cursor)


def resume_call(name: str, namespace: str, cursor: str, consumer: str | None) -> Call[Acknowledged] | None:
    """Return the call that reads where a consumer left off, if one is given.

    Raises:
        Invalid: Both a cursor and a consumer are given.
    """
    if consumer is None:
        return None
    if cursor:
        raise Invalid("give 'cursor' or 'consumer', not both")
    return cursors.acknowledged(name, namespace, consumer)
