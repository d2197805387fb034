"""Carry out plans with pods: the stage workers of one job, or the backends of one pool."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rollyard_drivers.reconcile.plan import Launch, ObservedWorkload, Plan, Stop, Workload
from rollyard_drivers.reconcile.replacements import Replacements

from rollyard_operator.controllers.resource import is_leaving
from rollyard_operator.kube import labels
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.interface import Kube
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import Key, PodCache, key_of, uid_of
from rollyard_operator.pods.parts import PodTemplateError
from rollyard_operator.pods.status import observed_workload

LEFTOVER_SECONDS = 2.0
REMEMBERED = 4096
"""The number of deleted pods that are remembered until the watch reports their end."""


class Children:
    """The pods of one owner.

    Pod names are deterministic, and the spec of a pod never changes. If a step is done twice, or by two
    operators at once, the second one finds the name taken and uses the existing pod.
    """

    def __init__(self, kube: Kube, cache: PodCache, instance: str, wake: Callable[[], None]) -> None:
        self._kube = kube
        self._wake = wake
        self._cache = cache
        self._instance = instance
        self._refused: dict[str, ObservedWorkload] = {}
        self._deleting: dict[str, None] = {}
        self._replaced = Replacements()

    def pods(self, uid: str, component: str) -> list[Object]:
        """Return the owner's pods of a component."""
        return self._cache.owned(uid, component)

    async def leave(self, uid: str, component: str, grace_seconds: float) -> float | None:
        """Delete the pods that a deleted owner has left behind.

        Garbage collection deletes them too, except after a deletion that orphans its dependents.

        Returns:
            The number of seconds until the next look, or None if nothing is left to delete.
        """
        pods = self.pods(uid, component)
        leftovers = [pod for pod in pods if not is_leaving(pod) and uid_of(pod) not in self._deleting]
        for pod in leftovers:
            with suppress(KubeError):
                await self._delete(pod, int(grace_seconds))
        return LEFTOVER_SECONDS if leftovers else None

    def observed(self, pods: Iterable[Object]) -> list[ObservedWorkload]:
        """Return the state of these pods and of the pods that the API server refused to make."""
        seen: dict[str, ObservedWorkload] = {}
        for pod in pods:
            found = observed_workload(pod)
            if uid_of(pod) in self._deleting and found.state != "exited":
                found = replace(found, state="stopping")
            seen[found.name] = found
        refused = [one for name, one in self._refused.items() if name not in seen]
        return [*seen.values(), *refused]

    async def carry_out(
        self, namespace: str, plan: Plan[Any], build: Callable[[Workload], Object], pods: Iterable[Object]
    ) -> None:
        """Stop, launch and mark pods as a plan says.

        Args:
            build: Makes the pod of a workload.
            pods: The owner's pods from which the plan was made. The plan does not cover a pod that appeared
                since then, which another operator may have made. Such a pod is left to the next pass.

        Raises:
            KubeError: The API server does not answer, and the next pass tries again. A pod that it refuses is
                not an error; it is observed as blocked.
        """
        seen = {key_of(pod)[1]: pod for pod in pods}
        steps = [self._stop(stop, seen.get(stop.name)) for stop in plan.stop]
        steps += [
            self._launch(namespace, launch, build, seen.get(launch.workload.name)) for launch in plan.launch
        ]
        steps += [self._mark(pod, name in plan.drain) for name, pod in seen.items()]
        failed = [one for one in await asyncio.gather(*steps, return_exceptions=True) if one is not None]
        for one in failed:
            raise one

    async def _stop(self, stop: Stop, seen: Object | None) -> None:
        self._refused.pop(stop.name, None)
        self._replaced.note(stop)
        if seen is not None and self._newest(seen) is not None:
            await self._delete(seen, math.ceil(stop.grace_seconds))

    def _newest(self, seen: Object) -> Object | None:
        """Return the newest version of a pod, or None if it is gone and perhaps replaced by another one."""
        pod = self._cache.get(key_of(seen))
        return pod if pod is not None and uid_of(pod) == uid_of(seen) else None

    async def _delete(self, pod: Object, grace: int) -> None:
        (namespace, name), uid = key_of(pod), uid_of(pod)
        await self._kube.delete("Pod", namespace, name, grace=grace, uid=uid)
        self._deleting[uid] = None
        while len(self._deleting) > REMEMBERED:
            self._deleting.pop(next(iter(self._deleting)))

    async def _launch(
        self, namespace: str, launch: Launch, build: Callable[[Workload], Object], seen: Object | None
    ) -> None:
        launch = self._replaced.counted(launch)
        workload = launch.workload
        self._refused.pop(workload.name, None)
        try:
            pod = build(workload)
        except PodTemplateError as error:
            self._refuse(launch, str(error))
            return
        there = self._cache.get((namespace, workload.name))
        if there is not None:
            known = seen is not None and uid_of(seen) == uid_of(there)
            if not known and there in self.pods(workload.owner.uid, workload.kind):
                return  # The pod appeared after the plan and may run already. It caused the next pass.
            await self._delete(there, 0)
        notes = pod["metadata"].setdefault("annotations", {})
        notes[labels.RESTARTS] = str(launch.restarts)
        if launch.last_end:
            notes[labels.LAST_END] = launch.last_end
        try:
            self._cache.put(await self._kube.create(pod))
            self._replaced.launched(workload.name)
        except KubeConflict:
            await self._adopt((namespace, workload.name), launch)
        except KubeError as error:
            if error.status == 0 or error.status >= 500 or error.status == 429:
                raise
            self._refuse(launch, error.message)

    async def _adopt(self, key: Key, launch: Launch) -> None:
        """Use the pod that has the name already: one of an earlier pass, or one that is being deleted."""
        there = await self._kube.get("Pod", *key)
        if there is None:
            return
        instance = labels.label_of(there, labels.INSTANCE)
        if instance == self._instance:
            self._cache.put(there)
        else:
            whose = f"the Rollyard installation {instance!r}" if instance else "another owner"
            self._refuse(launch, f"the pod {key[1]!r} exists already and belongs to {whose}")

    def _refuse(self, launch: Launch, message: str) -> None:
        now = datetime.now(UTC)
        self._refused[launch.workload.name] = ObservedWorkload(
            name=launch.workload.name,
            spec_hash=launch.workload.spec_hash,
            state="exited",
            started_at=now,
            restarts=launch.restarts,
            last_end=launch.last_end,
            exited_at=now,
            ready=False,
            message=message[:512],
            blocked=True,
        )
        self._wake()  # No watch reports a pod that was not made.

    async def _mark(self, seen: Object, draining: bool) -> None:
        pod = self._newest(seen)
        if pod is None or bool(labels.annotation_of(pod, labels.DRAINING_SINCE)) == draining:
            return
        since = datetime.now(UTC).isoformat().replace("+00:00", "Z") if draining else None
        body = {"metadata": {"annotations": {labels.DRAINING_SINCE: since}}}
        marked = await self._kube.patch("Pod", *key_of(pod), body, uid=uid_of(pod))
        if marked is not None:
            self._cache.put(marked)
