"""Waiting for the ends of rollouts: many calls wait, and one look at the database serves all of a job."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core.problems import ApiError
from rollyard_api.core.wakeups import job_topic
from rollyard_api.service import ControlPlane
from rollyard_api.storage.schema import jobs, rollouts

log = logging.getLogger("rollyard.api.prorl")

LOOK_SECONDS: Final = 20.0
"""The longest time between two looks at a job for which calls wait, in seconds."""
RETRY_SECONDS: Final = 1.0

End = Literal["ended", "late", "left", "closing"]


@dataclass(slots=True)
class _Follower:
    """The calls that wait for rollouts of one job."""

    waiting: defaultdict[str, set[asyncio.Future[End]]] = field(default_factory=lambda: defaultdict(set))
    task: asyncio.Task[None] | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self, rollouts: Iterable[str], end: End) -> None:
        for rollout in rollouts:
            for future in self.waiting.get(rollout, ()):
                if not future.done():
                    future.set_result(end)


def _look(conn: Connection, job_id: int, after: int | None) -> tuple[list[str], int | None]:
    """Return the rollouts that ended after a place, and the place of the last one; None for a lost job."""
    place = conn.scalar(sa.select(jobs.c.ended).where(jobs.c.id == job_id))
    if place is None or after is None:
        return [], place
    of_job = sa.select(rollouts.c.id).where(rollouts.c.job_id == job_id)
    return list(conn.scalars(of_job.where(rollouts.c.end_seq > after, rollouts.c.end_seq <= place))), place


def _has_ended(conn: Connection, rollout: str) -> bool:
    """Return whether a rollout has ended, or is gone."""
    found = conn.execute(sa.select(rollouts.c.end_seq).where(rollouts.c.id == rollout)).one_or_none()
    return found is None or found.end_seq is not None


class Ends:
    """The calls of this process that wait for rollouts."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._followers: dict[int, _Follower] = {}

    async def wait(self, job_id: int, rollout: str, seconds: float, left: asyncio.Future[End]) -> End:
        """Return once a rollout has ended, the time is over, the client has left, or the process ends.

        Args:
            job_id: The job of the rollout.
            rollout: The id of the rollout.
            seconds: The longest wait.
            left: A future that is done once nobody waits for the answer any more.
        """
        follower = self._followers.get(job_id)
        if follower is None:
            follower = self._followers[job_id] = _Follower()
            follower.task = asyncio.create_task(self._follow(job_id, follower))
        future: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        follower.waiting[rollout].add(future)
        try:
            # Every end after the follower's first look is noticed by it, and every earlier one by this look.
            await follower.begun.wait()
            if await self._plane.database.read(partial(_has_ended, rollout=rollout)):
                return "ended"
            await asyncio.wait({future, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return next((one.result() for one in (future, left) if one.done()), "late")
        finally:
            follower.waiting[rollout].discard(future)
            if not follower.waiting[rollout]:
                del follower.waiting[rollout]
            future.cancel()

    async def _follow(self, job_id: int, follower: _Follower) -> None:
        database, bus = self._plane.database, self._plane.bus
        after: int | None = None
        try:
            while follower.waiting and not bus.closing:
                look = partial(database.read, partial(_look, job_id=job_id, after=after))
                wait = 0.0 if after is None else LOOK_SECONDS
                try:
                    ended, after = await bus.until(job_topic(job_id), look, lambda seen: bool(seen[0]), wait)
                except ApiError as error:
                    log.warning("waiting for rollouts: %s: %s", error.reason, error.detail)
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                follower.begun.set()
                follower.wake(list(follower.waiting) if after is None else ended, "ended")
        finally:
            # No await stands between the last check of `waiting` and this line, so that no call is missed.
            del self._followers[job_id]
            follower.begun.set()
            follower.wake(list(follower.waiting), "closing")

    async def close(self) -> None:
        """Answer the calls that still wait, and end what looks for them."""
        tasks = [one.task for one in self._followers.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
