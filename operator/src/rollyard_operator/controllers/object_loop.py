"""One task for each object. It makes a pass when it is woken, when a time is due, and after an error."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from rollyard_client import RollyardError

from rollyard_operator.kube.client import TRY_AGAIN
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.object_cache import Key

RESYNC_SECONDS = 60.0
"""The longest time between two passes over an object, in seconds."""
_log = logging.getLogger(__name__)


class ObjectLoop(ABC):
    """Makes passes over one object, one after the other, until the object is `done`.

    Args:
        gate: Limits how many passes of all loops run at once.
    """

    def __init__(self, key: Key, gate: asyncio.Semaphore) -> None:
        self.key = key
        self.done = False
        self._gate = gate
        self._wake = asyncio.Event()
        self._soon: asyncio.TimerHandle | None = None
        self._failures = 0
        self._trouble = ""

    def wake(self, within: float = 0.0) -> None:
        """Start a pass at once, or within that many seconds together with other changes until then."""
        if not within:
            self._wake.set()
        elif self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(within, self._wake.set)

    @abstractmethod
    async def run_pass(self) -> float | None:
        """Make one pass.

        Returns:
            The number of seconds until the next pass, or None if it waits until the loop is woken.
        """

    async def run(self) -> None:
        """Make passes until done. An error of the cluster or the control plane delays the next pass."""
        while not self.done:
            self._begin()
            delay = await self._run_pass()
            if self.done:
                return
            try:
                async with asyncio.timeout(RESYNC_SECONDS if delay is None else min(delay, RESYNC_SECONDS)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _begin(self) -> None:
        """Begin a pass, which handles all changes that have woken the loop so far."""
        self._wake.clear()
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    async def _run_pass(self) -> float | None:
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
            return delay
        pause = TRY_AGAIN.pause(self._failures)
        # A wake-up does not remove the error, so the pause is kept. The pass after it sees what changed.
        await asyncio.sleep(pause)
        return 0.0
