"""One task for each object. It makes a pass when it is woken, when a time is due, and after an error.

`Children` carries out the plans of a pass with pods: the stage workers of one job, or the backends of one
pool.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Generic, TypeVar

from rollyard_client import RollyardError
from rollyard_crds.reading.manifest import ManifestError
from rollyard_drivers.loop.driver import run_passes
from rollyard_drivers.reconcile import reconcile_pass
from rollyard_drivers.reconcile.placement import is_for
from rollyard_drivers.reconcile.plan import Launch, ObservedWorkload, Plan, Stop, Workload
from rollyard_drivers.reconcile.workloads import Replacements

from rollyard_operator.controllers.context import DRIVER, OperatorContext
from rollyard_operator.controllers.control_plane_view import POLL_SECONDS
from rollyard_operator.controllers.resource import (
    Reader,
    ThingT,
    generation_of,
    is_leaving,
    mirrored,
    write_status,
)
from rollyard_operator.errors import OperatorError
from rollyard_operator.kube import labels
from rollyard_operator.kube.client import TRY_AGAIN, KubeClient
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import Key, ObjectCache, PodCache, key_of, uid_of
from rollyard_operator.pods.parts import PodTemplateError
from rollyard_operator.pods.status import observed_workload, workload_of

LEFTOVER_SECONDS = 2.0
SURPLUS_SECONDS = 30
"""The time in seconds that a pod has to end if its workload has another pod."""
REMEMBERED = 4096
"""The number of deleted pods that are remembered until the watch reports their end."""


Take = Callable[[Launch], Awaitable[Object | None]]
"""Turns a ready pod into the pod of a workload and returns it. Returns None if none fits."""


RESYNC_SECONDS = 60.0
"""The longest time between two passes over an object, in seconds."""
REFUSED_SECONDS = 15.0
"""The time until a refused object is tried again, in seconds.

A missing ConfigMap may exist after that time, or the queue may have room.
"""
_log = logging.getLogger(__name__)


class Refused(OperatorError):
    """The object cannot be registered now. `reason` is a CamelCase word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@contextmanager
def refused_by(*kinds: type[RollyardError]) -> Iterator[None]:
    """Raise Refused for refusals of the control plane that a pass cannot change by trying again at once."""
    try:
        yield
    except kinds as error:
        raise Refused(error.reason, "; ".join(error.errors) or str(error)) from error


@dataclass(slots=True)
class Life:
    """The memory of one object from its first sight to its end. The loop works without any of it."""

    uid: str = ""
    registered: tuple[object, ...] | None = None
    """The generation, labels and annotations that were registered last."""
    generation: int = 0
    """The control plane's generation after that registration."""
    counts_written: float = 0.0
    left: bool = False
    """Whether the object was deleted and everything that belonged to it elsewhere was deleted too."""


LifeT = TypeVar("LifeT", bound=Life)


class ObjectLoop(ABC, Generic[ThingT, LifeT]):
    """Makes passes over one object, one after the other, until the object is `done`.

    Args:
        gate: Limits how many passes of all loops run at once.
        cache: The objects of this kind.
        model: The kind of the object.
        life: Makes the memory of an object with a uid.
    """

    component: ClassVar[str]
    """The component of the object's pods."""
    counts_seconds: ClassVar[float]
    """If only numbers have changed, the status is written at most once in this many seconds."""

    def __init__(
        self,
        key: Key,
        gate: asyncio.Semaphore,
        context: OperatorContext,
        cache: ObjectCache,
        model: type[ThingT],
        life: type[LifeT],
    ) -> None:
        self.key = key
        self.done = False
        self.context = context
        self.children = self._new_children()
        self._gate = gate
        self._cache = cache
        self._reader: Reader[ThingT] = Reader(model)
        self._new_life = life
        self._life = life()
        self._wake = asyncio.Event()
        self._soon: asyncio.TimerHandle | None = None
        self._failures = 0
        self._trouble = ""

    def _new_children(self) -> Children:
        return Children(self.context.kube, self.context.pods, self.context.settings.instance, self.wake)

    def wake(self, within: float = 0.0) -> None:
        """Start a pass at once, or within that many seconds together with other changes until then."""
        if not within:
            self._wake.set()
        elif self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(within, self._wake.set)

    async def run(self) -> None:
        """Make passes until done. An error of the cluster or the control plane delays the next pass."""
        await run_passes(self._tolerant_pass, self._wake, RESYNC_SECONDS, done=lambda: self.done)

    async def _tolerant_pass(self) -> float | None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        where = f"{type(self).__name__} {'/'.join(self.key)}"
        try:
            async with self._gate:
                delay = await self.run_pass()
        except KubeConflict:
            # The object was changed in the meantime. The watch reports its new version.
            self._failures += 1
        except (KubeError, RollyardError) as error:
            self._failures += 1
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.warning("%s: %s", where, error)
        except Exception:
            # A bug that one object triggers must neither stop the other loops nor go unnoticed.
            self._failures += 1
            _log.exception("%s: a pass failed", where)
        else:
            self._failures, self._trouble = 0, ""
            return 0.0 if self.done else delay
        # A wake-up does not remove the error, so the pause is kept. The pass after it sees what changed.
        await asyncio.sleep(TRY_AGAIN.pause(self._failures))
        return 0.0

    async def run_pass(self) -> float | None:
        """Reconcile the object once, and return the seconds until the next pass, if one is due."""
        obj = self._cache.get(self.key)
        if obj is None or is_leaving(obj):
            return await self._leave(obj)
        if self._life.uid != uid_of(obj):
            self._life = self._new_life(uid_of(obj))
            self.children = self._new_children()
        try:
            thing = self._reader.read(obj)
            if not self.context.plane.seen.is_set():
                return POLL_SECONDS
            view = await self._view(obj, thing)
        except (ManifestError, Refused) as error:
            return await self._refuse(obj, error.reason, str(error))
        if view is None:
            return 0.0  # The object was changed to follow the control plane.
        if not is_for(thing, DRIVER):
            return await self._mirror(obj, thing, view)
        return await self._reconcile(obj, thing, view)

    # The registration with the control plane

    @abstractmethod
    async def _view(self, obj: Object, thing: ThingT) -> ThingT | None:
        """Register changes and return the control plane's view, or None if the object was patched.

        Raises:
            Refused: The object cannot be registered now.
        """

    @abstractmethod
    def _changes(self, thing: ThingT, view: ThingT) -> Object:
        """Return the patch of the object's spec that repeats what was changed over REST."""

    @staticmethod
    def _registrable(obj: Object, thing: ThingT) -> tuple[object, ...]:
        return generation_of(obj), thing.metadata.labels, thing.metadata.annotations

    async def _followed(self, obj: Object, thing: ThingT, view: ThingT | None) -> bool:
        """Copy a change that was made over REST into the object's spec. Return whether there was one."""
        life = self._life
        known = life.registered is not None or generation_of(obj) == thing.status.observed_generation
        if view is None or not known or view.metadata.generation == life.generation:
            return False
        # If the object is unchanged since its registration, the control plane's spec was changed over REST.
        if life.registered in (None, self._registrable(obj, thing)):
            spec = self._changes(thing, view)
            if spec:
                fresh = await self.context.kube.patch(
                    thing.kind, *self.key, {"spec": spec}, uid=thing.metadata.uid
                )
                if fresh is not None:
                    self._cache.put(fresh)
                return True
        life.generation = view.metadata.generation or 0
        return False

    # The reconcile

    @abstractmethod
    async def _reconcile(self, obj: Object, thing: ThingT, view: ThingT) -> float | None:
        """Make the pass of an object that this driver runs."""

    async def _mirror(self, obj: Object, thing: ThingT, view: ThingT) -> float | None:
        """Show the status that another driver reported, because that driver runs the object."""
        after = mirrored(obj, view, thing.status)
        wait = await self.write(obj, thing.status, after)
        self._shown(after)
        return wait

    @abstractmethod
    def _facts(self, status: Any) -> tuple[object, ...]:
        """Return the fields of a status that are written at once when they change."""

    def _shown(self, status: Any) -> None:
        """Pass a status on to those who need it. The default does nothing."""

    async def write(self, obj: Object, before: Any, after: Any) -> float | None:
        """Write the status to the object.

        Returns:
            The number of seconds until a postponed write of counts or messages is due, or None.
        """
        if before == after:
            return None
        now = asyncio.get_running_loop().time()
        if self._facts(before) == self._facts(after):
            left = self.counts_seconds - (now - self._life.counts_written)
            if left > 0:
                return left
        self._life.counts_written = now
        await write_status(self.context.kube, self.context.recorder, self._cache, obj, before, after)
        return None

    # Refusal and deletion

    @abstractmethod
    def _refused(self, status: Any, generation: int, reason: str, message: str) -> Any:
        """Return the status of an object that cannot be registered now."""

    async def _refuse(self, obj: Object, reason: str, message: str) -> float:
        before = self._reader.status(obj)
        after = self._refused(before, generation_of(obj), reason, message)
        if reconcile_pass.in_words(before.conditions) != reconcile_pass.in_words(after.conditions):
            await write_status(self.context.kube, self.context.recorder, self._cache, obj, before, after)
            self._shown(after)
        return REFUSED_SECONDS

    @abstractmethod
    def _stop(self) -> None:
        """Stop what runs for the object in this process. This may be called repeatedly."""

    @abstractmethod
    async def _unregister(self, uid: str) -> None:
        """Delete what the control plane has for the object with this uid."""

    async def _leave(self, obj: Object | None) -> float | None:
        """Delete all that belongs to the object, because the object is gone or is being deleted."""
        uid = self._life.uid or (uid_of(obj) if obj is not None else "")
        self._stop()
        if not self._life.left and uid:
            await self._unregister(uid)
            self._life.left = True
        wait = await self.children.leave(uid, self.component, self.context.profile.stop_seconds)
        if obj is None and wait is None:
            self.done = True
        return wait


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
