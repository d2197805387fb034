"""Carry out plans with pods: the stage workers of one job, or the backends of one pool."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rollyard_drivers.reconcile.plan import Launch, ObservedWorkload, Plan, Stop, Workload
from rollyard_drivers.reconcile.workloads import Replacements

from rollyard_operator.controllers.resource import is_leaving
from rollyard_operator.kube import labels
from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import Key, PodCache, key_of, uid_of
from rollyard_operator.pods.parts import PodTemplateError
from rollyard_operator.pods.status import observed_workload, workload_of

LEFTOVER_SECONDS = 2.0
SURPLUS_SECONDS = 30
"""The time in seconds that a pod has to end if its workload has another pod."""
REMEMBERED = 4096
"""The number of deleted pods that are remembered until the watch reports their end."""


Take = Callable[[Launch], Awaitable[Object | None]]
"""Turns a ready pod into the pod of a workload and returns it. Returns None if none fits."""


class Children:
    """The pods of one owner.

    Pod names are deterministic, and the spec of a pod never changes. If a step is done twice, or by two
    operators at once, the second one finds the name taken and uses the existing pod. A pod that stood ready
    has a name of its own and names its workload in an annotation. If two operators have made two pods for one
    workload, one of the pods is stopped.
    """

    def __init__(self, kube: KubeClient, cache: PodCache, instance: str, wake: Callable[[], None]) -> None:
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
        for pod in self._by_workload(pods)[0].values():
            workload = observed_workload(pod)
            if uid_of(pod) in self._deleting and workload.state != "exited":
                workload = replace(workload, state="stopping")
            seen[workload.name] = workload
        refused = [one for name, one in self._refused.items() if name not in seen]
        return [*seen.values(), *refused]

    def _by_workload(self, pods: Iterable[Object]) -> tuple[dict[str, Object], list[Object]]:
        """Return the pod of each workload, and the further pods of workloads that have more than one."""
        pods = list(pods)
        chosen: dict[str, Object] = {workload_of(pod): pod for pod in pods}
        if len(chosen) == len(pods):
            return chosen, []
        chosen.clear()
        surplus: list[Object] = []
        for pod in sorted(pods, key=self._preference):
            name = workload_of(pod)
            if name in chosen:
                surplus.append(pod)
            else:
                chosen[name] = pod
        return chosen, surplus

    def _preference(self, pod: Object) -> tuple[bool, bool, str]:
        leaving = is_leaving(pod) or uid_of(pod) in self._deleting
        return leaving, observed_workload(pod).state == "exited", key_of(pod)[1]

    async def carry_out(
        self,
        namespace: str,
        plan: Plan[Any],
        build: Callable[[Workload], Object],
        pods: Iterable[Object],
        take: Take | None = None,
    ) -> None:
        """Stop, launch and mark pods as a plan says.

        Args:
            build: Makes the pod of a workload.
            pods: The owner's pods from which the plan was made. The plan does not cover a pod that appeared
                since then, which another operator may have made. Such a pod is left to the next pass.
            take: Tries to use a pod that stands ready for a launch. None makes a new pod for each.

        Raises:
            KubeError: The API server does not answer, and the next pass tries again. A pod that it refuses is
                not an error; it is observed as blocked.
        """
        seen, surplus = self._by_workload(pods)
        steps = [self._stop(stop, seen.get(stop.name)) for stop in plan.stop]
        steps += [self._remove(pod) for pod in surplus]
        steps += [
            self._launch(namespace, launch, build, seen.get(launch.workload.name), take)
            for launch in plan.launch
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

    async def _remove(self, surplus: Object) -> None:
        pod = self._newest(surplus)
        if pod is not None and not is_leaving(pod) and uid_of(pod) not in self._deleting:
            await self._delete(pod, SURPLUS_SECONDS)

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
        self,
        namespace: str,
        launch: Launch,
        build: Callable[[Workload], Object],
        seen: Object | None,
        take: Take | None,
    ) -> None:
        launch = self._replaced.counted(launch)
        workload = launch.workload
        self._refused.pop(workload.name, None)
        try:
            pod = build(workload)
        except PodTemplateError as error:
            self._refuse(launch, str(error))
            return
        known_uids = set() if seen is None else {uid_of(seen)}
        for other in self.pods(workload.owner.uid, workload.kind):
            if key_of(other)[1] == workload.name or workload_of(other) != workload.name:
                continue
            if uid_of(other) not in known_uids and uid_of(other) not in self._deleting:
                return  # A pod that stood ready became this workload after the plan was made.
            await self._delete(other, 0)
        there = self._cache.get((namespace, workload.name))
        if there is not None:
            known = seen is not None and uid_of(seen) == uid_of(there)
            if not known and there in self.pods(workload.owner.uid, workload.kind):
                return  # The pod appeared after the plan and may run already. It caused the next pass.
            await self._delete(there, 0)
        elif take is not None and await take(launch) is not None:
            self._replaced.launched(workload.name)
            return
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
