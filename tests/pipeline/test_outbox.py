"""Outcomes that end at about the same time are reported with one request."""

from __future__ import annotations

import asyncio

import pytest
from rollyard_crds.lease import CompleteRequest, OutcomeResponse, StageResult
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.worker.outbox import BATCH, Outbox
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.workerlab import Plane, lease, spec


class Counted(Plane):
    """A control plane that keeps the rollouts of each request."""

    def __init__(self) -> None:
        super().__init__(spec())
        self.requests: list[list[str]] = []

    async def complete(self, request: CompleteRequest) -> OutcomeResponse:
        self.requests.append([result.rollout for result in request.results])
        return await super().complete(request)


async def reported(number: int, *, more: bool) -> list[list[str]]:
    """Report this many outcomes, one a turn of the event loop, and return the rollouts of each request."""
    control, answered = Counted(), asyncio.Semaphore(0)

    async def done(held: HeldLease, outcome: str) -> None:
        assert outcome == "accepted"
        answered.release()

    outbox = Outbox(control, "w", done, lambda: more)
    running = asyncio.create_task(outbox.run())
    try:
        for index in range(number):
            held = HeldLease(lease(index, "run"))
            outbox.put(held, StageResult(rollout=f"r{index}", token=1, stage="run"))
            assert held.reporting
            await asyncio.sleep(0)
        async with asyncio.timeout(patience(30)):
            for _ in range(number):
                await answered.acquire()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [rollout for request in control.requests for rollout in request] == [
        f"r{index}" for index in range(number)
    ]
    return control.requests


@pytest.mark.parametrize("number", [1, 5, BATCH])
async def test_outcomes_wait_for_others_while_there_is_other_work(number: int) -> None:
    assert len(await reported(number, more=True)) == 1


async def test_the_last_outcome_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard_pipeline.worker.outbox.GATHER_SECONDS", 3600.0)
    assert await reported(1, more=False) == [["r0"]]


async def test_a_request_holds_no_more_than_a_batch() -> None:
    requests = await reported(3 * BATCH, more=True)
    assert max(map(len, requests)) == BATCH
