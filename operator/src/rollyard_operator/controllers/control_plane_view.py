"""The jobs and pools that the control plane knows. They are polled once per second for all loops.

The end of a job is noticed at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Sequence
from typing import Generic, TypeVar

from rollyard_client import DriverClient, NotFound, RollyardError
from rollyard_crds import (
    BackendPool,
    RolloutJob,
)
from rollyard_crds.fields.annotations import OBJECT_UID

from rollyard_operator.kube.object_cache import Key

POLL_SECONDS = 1.0
ThingT = TypeVar("ThingT", RolloutJob, BackendPool)
_log = logging.getLogger(__name__)


def thing_key(thing: RolloutJob | BackendPool) -> Key:
    """Return the namespace and the name."""
    return thing.metadata.namespace, thing.metadata.name


def object_uid(thing: RolloutJob | BackendPool) -> str:
    """Return the uid of the Kubernetes object that this is registered for, or empty if there is none."""
    return thing.metadata.annotations.get(OBJECT_UID, "")


class ResourceViews(Generic[ThingT]):
    """The newest view of each job or each pool.

    The result of a poll is ignored for a key that has been learnt since the poll began.

    Args:
        changed: Called with the key of a view that changed, appeared or disappeared.
        others: Returns the fields of a view that are not set by the operator.
    """

    def __init__(self, changed: Callable[[Key], None], others: Callable[[ThingT], object]) -> None:
        self._changed = changed
        self._others: Callable[[ThingT], object] = others
        self._views: dict[Key, ThingT] = {}
        self._learnt: dict[Key, float] = {}

    def all(self) -> list[ThingT]:
        """Return all views, as they were seen last."""
        return list(self._views.values())

    def get(self, key: Key, uid: str) -> ThingT | None:
        """Return the view that is registered for the object with this uid, or None."""
        view = self._views.get(key)
        return view if view is not None and object_uid(view) == uid else None

    def learn(self, view: ThingT) -> None:
        """Store the answer to one of the operator's own calls. Report a change if others made one."""
        key = thing_key(view)
        before = self._views.get(key)
        self._views[key] = view
        self._learnt[key] = asyncio.get_running_loop().time()
        if before is not None and self._others(before) != self._others(view):
            # The next poll would find no difference and would not report the change.
            self._changed(key)

    def forget(self, key: Key) -> None:
        """Remove a view because the control plane has just answered that it does not exist."""
        self._views.pop(key, None)
        self._learnt[key] = asyncio.get_running_loop().time()

    def replace(self, seen: Sequence[ThingT], begun: float) -> None:
        """Store the complete result of a poll that began at `begun`, and report the keys that changed."""
        fresh = {thing_key(view): view for view in seen}
        for key in fresh.keys() | self._views.keys():
            if self._learnt.get(key, begun) > begun:
                continue
            before, after = self._views.get(key), fresh.get(key)
            if before == after:
                continue
            if after is None:
                del self._views[key]
            else:
                self._views[key] = after
            self._changed(key)
        self._learnt = {key: at for key, at in self._learnt.items() if at > begun}

    def keep(self, there: Container[Key]) -> None:
        """Remove all views except those with these keys, and report the removed ones.

        A view that was learnt while the list was on its way is removed too and comes back with the next poll.
        A loop that needs it before that asks the control plane for it by name.
        """
        for key in [key for key in self._views if key not in there]:
            del self._views[key]
            self._changed(key)


def _others_of_job(job: RolloutJob) -> object:
    return job.metadata.generation, job.metadata.annotations, job.status.counts


def _others_of_pool(pool: BackendPool) -> object:
    return pool.metadata.generation, pool.metadata.annotations, pool.status.backends


class ControlPlaneView:
    """The view of the control plane, which is polled.

    Args:
        job_changed: Called with the key of a job whose view changed, appeared or disappeared.
        pool_changed: Called with the key of a pool in the same cases.
    """

    def __init__(
        self,
        client: DriverClient,
        job_changed: Callable[[Key], None],
        pool_changed: Callable[[Key], None],
    ) -> None:
        self.client = client
        self.unfinished: ResourceViews[RolloutJob] = ResourceViews(job_changed, _others_of_job)
        """The jobs that have not ended."""
        self.pools: ResourceViews[BackendPool] = ResourceViews(pool_changed, _others_of_pool)
        """All pools."""
        self.seen = asyncio.Event()
        """An event that is set once the control plane has answered."""
        self._trouble = ""
        self._revision: int | None = None

    async def look(self) -> bool:
        """Poll once and return whether the control plane answered."""
        begun = asyncio.get_running_loop().time()
        try:
            jobs, pools = await asyncio.gather(self.client.unfinished_jobs(), self.client.pools())
        except RollyardError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.warning("the control plane does not answer: %s", error)
            return False
        if self._trouble:
            self._trouble = ""
            _log.info("the control plane answers again")
        self.unfinished.replace(jobs, begun)
        self.pools.replace(pools, begun)
        self.seen.set()
        return True

    async def watch_ends(self, seconds: float) -> None:
        """Wait for this many seconds. Jobs that end during that time are noticed at once.

        New and changed jobs are seen by the next poll, because it would cost too much to list all jobs for
        each.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            try:
                unfinished = await self.client.unfinished(self._revision, left)
            except RollyardError:
                await asyncio.sleep(left)  # The poll that follows reports the error.
                return
            self._revision = unfinished.revision
            self.unfinished.keep({(job.namespace, job.name) for job in unfinished.jobs})

    async def find_job(self, key: Key, uid: str) -> RolloutJob | None:
        """Return the job that is registered for this object, finished or not, or None if there is none.

        Raises:
            RollyardError: The control plane does not answer.
        """
        try:
            view = await self.client.job(*key)
        except NotFound:
            self.unfinished.forget(key)
            return None
        return view if object_uid(view) == uid else None
