"""The pool of one stage, which leases rollouts by long poll, never more than it has places for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rollyard_crds.lease import MAX_BATCH, Lease, LeaseRequest
from rollyard_crds.rolloutjob import StageName

from rollyard_pipeline.control_plane.calls import TRY_AGAIN, ControlPlaneUnavailable, WorkerCalls
from rollyard_pipeline.errors import ControlPlaneRefused, JobEnded

log = logging.getLogger(__name__)

POLL_SECONDS = 20.0
GATHER_SECONDS = 0.015
"""How long a free place waits for others while there is other work in this stage, in seconds. One request
then leases for all of them."""
PACE_SECONDS = 0.05
"""The shortest time from an answer to the next request while there is other work in this stage, in seconds.
Where stages are short, one request then leases for several places. A pool whose work has ended does not wait
for it, because its places would stand idle."""
_ROOM_CHECK = 1.0  # The time between two checks for room that another process may have made, in seconds.


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The identity under which a worker leases, and the job for which it leases."""

    worker: str
    node: str
    job: str | None = None
    namespace: str | None = None


class StagePool:
    """The places of one stage.

    Args:
        stage: The stage: init, run or eval.
        places: The number of rollouts that may be worked on at once.
        start: Begins work on a lease. Its place is free again when `release` is called.
        room: Returns how many more rollouts the node can take now. Sandboxes limit this for Init.
    """

    def __init__(
        self,
        control: WorkerCalls,
        identity: WorkerIdentity,
        stage: StageName,
        places: int,
        start: Callable[[Lease], None],
        room: Callable[[], int] | None = None,
    ) -> None:
        self._control = control
        self._identity = identity
        self._start = start
        self._room = room
        self._busy = 0
        self._freed = asyncio.Event()
        self._idle = asyncio.Event()
        self._answered = -PACE_SECONDS
        self.stage: StageName = stage
        self.places = places

    @property
    def busy(self) -> int:
        """Return the number of places in use."""
        return self._busy

    def release(self) -> None:
        """Free the place of a rollout that has ended."""
        self._busy -= 1
        self._freed.set()
        if self._busy == 0:
            self._idle.set()

    async def run(self) -> None:
        """Lease rollouts until cancelled, or until the control plane reports that the job is over."""
        tries = 0
        while True:
            free = await self._free()
            request = LeaseRequest(
                worker=self._identity.worker,
                node=self._identity.node,
                capacity={self.stage: free},
                job=self._identity.job,
                namespace=self._identity.namespace,
                wait=POLL_SECONDS,
            )
            try:
                answer = await self._control.lease(request)
            except JobEnded as error:
                log.info("%s: no more leases: %s", self.stage, error)
                return
            except (ControlPlaneUnavailable, ControlPlaneRefused) as error:
                tries += 1
                if tries in (1, 10, 100):
                    log.warning("%s: no lease: %s", self.stage, error)
                asked = error.retry_after if isinstance(error, ControlPlaneUnavailable) else None
                await asyncio.sleep(TRY_AGAIN.pause(tries, asked))
                continue
            tries = 0
            self._answered = time.monotonic()
            for lease in answer.leases:
                self._busy += 1
                self._start(lease)
            if answer.draining and not answer.leases and self._identity.job is not None:
                return

    async def _free(self) -> int:
        while True:
            if self._busy > 0:
                await asyncio.sleep(GATHER_SECONDS)
                await self._paced()
            self._freed.clear()
            free = min(self.places - self._busy, MAX_BATCH)
            if free > 0 and self._room is not None:
                free = min(free, await asyncio.to_thread(self._room))
            if free > 0:
                return free
            try:
                async with asyncio.timeout(_ROOM_CHECK if self._busy < self.places else None):
                    await self._freed.wait()
            except TimeoutError:
                continue

    async def _paced(self) -> None:
        """Wait until a request may follow the last answer, or no work is left in this stage."""
        left = self._answered + PACE_SECONDS - time.monotonic()
        if self._busy > 0 and left > 0:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._idle.wait()
