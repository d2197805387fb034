"""One task for each object: it looks when woken, when time is due, and again after trouble."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from rollyard_client import RollyardError

from rollyard_operator.kube.client import TRY_AGAIN, KubeConflict, KubeError
from rollyard_operator.kube.object_cache import Key

RESYNC_SECONDS = 60.0
"""At the latest an object is looked at again after this long."""
_log = logging.getLogger(__name__)


class ObjectLoop(ABC):
    """Turns for one object, one after the other, until it is `done`.

    Args:
        gate: bounds how many passes of all loops run at once.
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
        """Makes a pass at once, or within that many seconds, together with what else comes until then."""
        if not within:
            self._wake.set()
        elif self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(within, self._wake.set)

    @abstractmethod
    async def run_pass(self) -> float | None:
        """Look and act; returns after how many seconds to look again, None: when woken."""

    async def run(self) -> None:
        """Turns until done. Trouble with the cluster or the control plane delays the next one."""
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
        """Begins a pass, which sees all that it was woken for so far."""
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
            # Somebody changed the object meanwhile; what it is now, the watch tells.
            self._failures += 1
        except (KubeError, RollyardError) as error:
            self._failures += 1
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.warning("%s: %s", where, error)
        except Exception:
            # A fault of ours on one object must not stop the others, nor go unseen.
            self._failures += 1
            _log.exception("%s: a pass failed", where)
        else:
            self._failures, self._trouble = 0, ""
            return delay
        pause = TRY_AGAIN.pause(self._failures)
        # What wakes it does not heal it: the pause is kept to, and what was missed is seen after it.
        await asyncio.sleep(pause)
        return 0.0
