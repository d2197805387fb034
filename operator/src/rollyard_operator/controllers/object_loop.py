"""One task for each object. It makes a pass when it is woken, when a time is due, and after an error."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rollyard_client import RollyardError
from rollyard_crds.reading.manifest import ManifestError
from rollyard_drivers.loop.driver import run_passes
from rollyard_drivers.reconcile import reconcile_pass
from rollyard_drivers.reconcile.placement import is_for

from rollyard_operator.controllers.children import Children
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
from rollyard_operator.kube.client import TRY_AGAIN
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import Key, ObjectCache, uid_of

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
