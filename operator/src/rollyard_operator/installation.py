"""The operator: its caches, a loop for each object, the poll of the control plane, and the sandbox loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
from rollyard_client import DriverClient
from rollyard_crds import RolloutJob
from rollyard_drivers.reconcile.plan import Profile
from rollyard_drivers.reconcile.reconcile_pass import is_active

from rollyard_operator.controllers.context import DRIVER, Admissions, OperatorContext
from rollyard_operator.controllers.control_plane_view import POLL_SECONDS, ControlPlaneView
from rollyard_operator.controllers.job import JobLoop
from rollyard_operator.controllers.pool import PoolLoop
from rollyard_operator.controllers.ready_pool import ReadyPool
from rollyard_operator.controllers.resource import Reader, fingerprint
from rollyard_operator.controllers.rest_sync import RestSync
from rollyard_operator.controllers.worker_token import WorkerToken
from rollyard_operator.kube import labels
from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.events import EventRecorder
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import Key, ObjectCache, PodCache, key_of, uid_of
from rollyard_operator.kube.reflector import Lister, Reflector
from rollyard_operator.kube.resources import OWN_KINDS
from rollyard_operator.settings import OperatorSettings

PASSES_AT_ONCE = 64
"""The number of passes that run at once.

A pass mostly waits for the API server, so a lower limit would delay other passes while the server is slow.
"""
WORKERS_SECONDS = 0.2
"""The delay of a pass over a job after a change of its workers, in seconds.

Changes come in groups and share a pass.
"""
SWEEP_SECONDS = 120.0
"""The time between two comparisons of all jobs of the control plane, finished ones too, with the cluster."""
TOKEN_SECONDS = 10.0
"""The time between two looks at the file with the token of all workers, in seconds."""
_log = logging.getLogger(__name__)


class Operator:
    """All parts of one installation that run in one event loop.

    A reflector keeps its cache of pods, and kopf's watches with a list every minute those of jobs and pools.
    Two operators at once do no harm, because names are deterministic, deletions name the uid, and
    registration is idempotent.

    """

    def __init__(
        self,
        settings: OperatorSettings,
        profile: Profile,
        kube: KubeClient,
        client: DriverClient,
        http: httpx.AsyncClient,
    ) -> None:
        self._gate = asyncio.Semaphore(PASSES_AT_ONCE)
        self._loops: dict[tuple[str, Key], JobLoop | PoolLoop] = {}
        self._prints: dict[tuple[str, Key], tuple[object, ...]] = {}
        self._group: asyncio.TaskGroup | None = None
        pods, token = PodCache(self._pod_changed), WorkerToken(kube, settings)
        self.context = OperatorContext(
            settings=settings,
            profile=profile,
            kube=kube,
            recorder=EventRecorder(kube),
            plane=ControlPlaneView(client, self._wake_job, self._wake_pool),
            http=http,
            pods=pods,
            jobs=ObjectCache(self._object_changed),
            pools=ObjectCache(self._object_changed),
            admissions=Admissions(profile.max_active_jobs, self._wake_job),
            token=token,
            ready=ReadyPool(kube, pods, client, token, settings, profile.made_of, self._served),
            pool_changed=self._wake_jobs_of,
        )
        self._sync = RestSync(self.context)
        self.job_changed: Callable[[], None] = lambda: None
        """Called when a RolloutJob appeared, changed or disappeared."""
        self._polled_at = 0.0
        namespaces, access = settings.namespaces or (None,), self.context.access
        self._listers = {
            namespace: [Lister(kube, kind, namespace, self._cache(kind), access) for kind in OWN_KINDS]
            for namespace in namespaces
        }
        selector = labels.selector(settings.instance)
        self._reflectors: list[Reflector] = [
            Reflector(kube, "Pod", namespace, selector, pods, access) for namespace in namespaces
        ]
        for listers in self._listers.values():
            self._reflectors += listers

    def _cache(self, kind: str) -> ObjectCache:
        return {"Pod": self.context.pods, "RolloutJob": self.context.jobs, "BackendPool": self.context.pools}[
            kind
        ]

    # What kopf watches

    def watchable(self) -> frozenset[str | None]:
        """Return the namespaces, or None for all, whose RolloutJobs and BackendPools may be read."""
        readable = (all(one.readable for one in listers) for listers in self._listers.values())
        return frozenset(namespace for namespace, ok in zip(self._listers, readable, strict=True) if ok)

    def seen(self, type: str | None, obj: Object) -> None:
        """Take an event about a RolloutJob or a BackendPool. `type` is as in the API, or None in a list."""
        cache = self._cache(obj["kind"])
        if type == "DELETED":
            cache.remove(key_of(obj), uid_of(obj))
        else:
            cache.put(obj)

    def watches_broke(self) -> None:
        """List the RolloutJobs and BackendPools at once, because events about them may have been lost."""
        for listers in self._listers.values():
            for lister in listers:
                lister.look()

    # Which change wakes which loop

    def _pod_changed(self, pod: Object) -> None:
        namespace = key_of(pod)[0]
        if labels.label_of(pod, labels.COMPONENT) == "stage-worker":
            key = (namespace, labels.label_of(pod, labels.JOB))
            self._wake(("RolloutJob", key), within=WORKERS_SECONDS)
        elif labels.label_of(pod, labels.COMPONENT) == "backend":
            self._wake_pool((namespace, labels.label_of(pod, labels.POOL)))

    def _object_changed(self, obj: Object) -> None:
        kind, key = obj["kind"], key_of(obj)
        newest = self._cache(kind).get(key)
        before, after = self._prints.get((kind, key)), None if newest is None else fingerprint(newest)
        if before == after:
            return  # Only the status has changed.
        if after is None:
            self._prints.pop((kind, key), None)
        else:
            self._prints[kind, key] = after
        self._wake((kind, key), start=newest is not None)
        if kind == "RolloutJob":
            self.job_changed()
        elif before is None or after is None:
            self._wake_jobs_of(key)

    def _wake_job(self, key: Key) -> None:
        self._wake(("RolloutJob", key))

    def _wake_pool(self, key: Key) -> None:
        self._wake(("BackendPool", key))

    def _wake_jobs_of(self, pool: Key) -> None:
        for loop in list(self._loops.values()):
            if isinstance(loop, JobLoop) and loop.pool == pool:
                loop.wake()

    def _wake(self, where: tuple[str, Key], start: bool = False, within: float = 0.0) -> None:
        if where in self._loops:
            self._loops[where].wake(within)
        elif start and self._group is not None:
            kind = JobLoop if where[0] == "RolloutJob" else PoolLoop
            self._loops[where] = loop = kind(where[1], self._gate, self.context)
            self._group.create_task(self._keep(where, loop), name=f"{where[0]} {'/'.join(where[1])}")

    async def _keep(self, where: tuple[str, Key], loop: JobLoop | PoolLoop) -> None:
        try:
            await loop.run()
        finally:
            del self._loops[where]
        if self._cache(where[0]).get(where[1]) is not None:
            self._wake(where, start=True)  # It was made again at the last moment.

    # Running

    async def run(self, *beside: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """List the existing objects, then keep all of them reconciled until cancelled.

        Args:
            beside: Functions that run at the same time once the caches are full, such as the sandbox loop.

        Raises:
            KubeError: The cluster has refused a watch for too long. A new process may have new rights.
        """
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run(), name="reflector")
            for reflector in self._reflectors:
                await reflector.settled.wait()
            self._restore_admissions()
            self._polled_at = asyncio.get_running_loop().time()
            self._group = group
            for cache in (self.context.pools, self.context.jobs):
                for obj in cache:
                    self._wake((obj["kind"], key_of(obj)), start=True)
            group.create_task(self.context.recorder.run(), name="events")
            group.create_task(self._poll(), name="poll of the control plane")
            group.create_task(self._sweep(), name="sweep")
            group.create_task(self.context.ready.run(), name="ready workers")
            group.create_task(self._watch_token(), name="token of all workers")
            for one in beside:
                group.create_task(one(), name=one.__qualname__)

    def alive(self) -> bool:
        """Return whether the control plane is still polled, or True before the cluster has been listed."""
        return self._group is None or asyncio.get_running_loop().time() - self._polled_at < 120.0

    def _restore_admissions(self) -> None:
        """Admit the jobs again that ran before the operator started."""
        reader = Reader(RolloutJob)
        for obj in self.context.jobs:
            placed = obj["spec"].get("placement", DRIVER)
            if placed == DRIVER and is_active(reader.status(obj)):
                self.context.admissions.restore(key_of(obj))

    async def _poll(self) -> None:
        while True:
            if await self.context.plane.look():
                await self._sync.after_poll()
            self._polled_at = asyncio.get_running_loop().time()
            await self.context.plane.watch_ends(POLL_SECONDS)

    async def _sweep(self) -> None:
        await self.context.plane.seen.wait()
        while True:
            try:
                await self._sync.sweep()
            except KubeError as error:
                _log.warning("sweep: %s", error)
            await asyncio.sleep(SWEEP_SECONDS)

    def _served(self) -> set[str]:
        """Return the namespaces that the settings list, or all that have a job or a pool."""
        used = {key_of(obj)[0] for cache in (self.context.jobs, self.context.pools) for obj in cache}
        return {*(self.context.settings.namespaces or used)} - self.context.access.denied

    async def _watch_token(self) -> None:
        """Wake all jobs when the token of all workers changes, because their tokens are derived from it."""
        known = ""
        while True:
            try:
                state = self.context.token.state()
            except KubeError as error:
                _log.warning("%s", error)
            else:
                if known and state != known:
                    _log.info("the workers' token has changed: jobs get new ones")
                    for loop in list(self._loops.values()):
                        if isinstance(loop, JobLoop):
                            loop.wake()
                known = state
            await asyncio.sleep(TOKEN_SECONDS)
