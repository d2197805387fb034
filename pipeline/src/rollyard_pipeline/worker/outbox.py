"""Reporting of outcomes to the control plane, promptly and in batches, with retries until it answers.

A network failure never causes an outcome to be dropped. Fencing decides whether the outcome still counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final

from rollyard_crds.lease import CompleteRequest, FailRequest, OutcomeResponse, StageFailure, StageResult

from rollyard_pipeline.control_plane.calls import TRY_AGAIN, ControlPlaneUnavailable, WorkerCalls
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import ControlPlaneRefused

log = logging.getLogger(__name__)

BATCH: Final = 8  # Outcomes per request: few enough to be answered while the next ones are collected.
_SENDERS: Final = 2  # One sender collects outcomes while the other waits for its answer.
GATHER_SECONDS: Final = 0.02
"""How long an outcome waits for others while there is other work, in seconds. A request costs both sides
about as much processor time as the outcome itself, and a stage takes much longer than this."""
PACE_SECONDS: Final = 0.05
"""The shortest time between two requests while there is other work and less than a batch waits, in seconds.
Where stages are short, one request then reports several outcomes."""

Reported = Callable[[HeldLease, str], Coroutine[None, None, None]]
"""A function that is called with the lease and the control plane's answer for each outcome."""


@dataclass(frozen=True, slots=True)
class Item:
    """One outcome that waits to be reported."""

    holding: HeldLease
    outcome: StageResult | StageFailure


class Outbox:
    """The queue of outcomes to report. It is bounded by the leases held, as each lease adds one outcome.

    Args:
        control: The control plane.
        worker: The name of this worker.
        reported: Called when the control plane has answered for an outcome.
        more: Returns whether more outcomes are expected, so that the first one waits for them.
    """

    def __init__(
        self, control: WorkerCalls, worker: str, reported: Reported, more: Callable[[], bool]
    ) -> None:
        self._control = control
        self._worker = worker
        self._reported = reported
        self._more = more
        self._collecting = asyncio.Lock()
        self._items: deque[Item] = deque()
        self._ready = asyncio.Event()
        self._sent = -PACE_SECONDS

    def put(self, holding: HeldLease, outcome: StageResult | StageFailure) -> None:
        """Add an outcome to the queue.

        The lease stays held, and its heartbeats continue, until it is answered.
        """
        holding.reporting = True
        self._items.append(Item(holding, outcome))
        self._ready.set()

    async def run(self) -> None:
        """Send outcomes until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_SENDERS):
                group.create_task(self._send())

    async def _send(self) -> None:
        while True:
            async with self._collecting:
                await self._ready.wait()
                if len(self._items) < BATCH and self._more():
                    paced = self._sent + PACE_SECONDS - time.monotonic()
                    await asyncio.sleep(max(GATHER_SECONDS, paced))
                batch = self._take()
                self._sent = time.monotonic()
            await self._deliver(batch)

    def _take(self) -> list[Item]:
        """Return up to BATCH outcomes of one kind, in the order of arrival."""
        batch: list[Item] = []
        while self._items and len(batch) < BATCH:
            if batch and type(self._items[0].outcome) is not type(batch[0].outcome):
                break
            batch.append(self._items.popleft())
        if not self._items:
            self._ready.clear()
        return batch

    async def _deliver(self, batch: list[Item]) -> None:
        tries = 0
        while True:
            try:
                answer = await self._post(batch)
            except ControlPlaneUnavailable as error:
                tries += 1
                if tries in (1, 10, 100):
                    log.warning("%d outcomes wait for the control plane: %s", len(batch), error)
                await asyncio.sleep(TRY_AGAIN.pause(tries, error.retry_after))
            except ControlPlaneRefused as error:
                await self._refused(batch, error)
                return
            else:
                outcomes = {item.rollout: item.outcome for item in answer.outcomes}
                # The callbacks run concurrently because each may have a sandbox to remove.
                async with asyncio.TaskGroup() as group:
                    for item in batch:
                        outcome = outcomes.get(item.holding.lease.rollout, "unknown")
                        group.create_task(self._reported(item.holding, outcome))
                return

    async def _post(self, batch: list[Item]) -> OutcomeResponse:
        results = [item.outcome for item in batch if isinstance(item.outcome, StageResult)]
        if results:
            return await self._control.complete(CompleteRequest(worker=self._worker, results=results))
        failures = [item.outcome for item in batch if isinstance(item.outcome, StageFailure)]
        return await self._control.fail(FailRequest(worker=self._worker, failures=failures))

    async def _refused(self, batch: list[Item], error: ControlPlaneRefused) -> None:
        """Handle the refusal of a whole batch: find the outcome that caused it, and fail that rollout."""
        if len(batch) > 1:
            for item in batch:
                await self._deliver([item])
            return
        item = batch[0]
        if isinstance(item.outcome, StageFailure):
            log.error("the control plane refuses a failure of %s: %s", item.holding.lease.rollout, error)
            await self._reported(item.holding, "unknown")
            return
        lease = item.holding.lease
        failure = StageFailure(
            rollout=lease.rollout,
            token=lease.token,
            stage=lease.stage,
            reason="ResultRefused",
            message=f"the control plane refused the result: {error}"[:4096],
            retryable=False,
            times=item.outcome.times,
        )
        await self._deliver([Item(item.holding, failure)])
