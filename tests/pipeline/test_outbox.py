"""Outcomes that end at about the same time are reported with one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rollyard_crds.lease import CompleteRequest, OutcomeItem, OutcomeResponse, StageResult, StageTimes
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.worker.outbox import BATCH, Outbox
from rollyard_pipeline.worker.worker import hand_over
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.workerlab import Answer, Plane, lease, spec


class Counted(Plane):
    """A control plane that keeps the rollouts of each request."""

    def __init__(self) -> None:
        super().__init__(spec())
        self.requests: list[list[str]] = []

    async def complete(self, request: CompleteRequest) -> OutcomeResponse:
        self.requests.append([result.rollout for result in request.results])
        return await super().complete(request)


@asynccontextmanager
async def reporting(
    control: Plane, number: int, *, more: bool = False
) -> AsyncIterator[tuple[Outbox, list[tuple[str, str]]]]:
    """Yield an outbox that runs, and the rollouts and answers that it has passed on.

    At the end of the block it must pass on this many.
    """
    answers: list[tuple[str, str]] = []
    answered = asyncio.Semaphore(0)

    async def done(held: HeldLease, outcome: str) -> None:
        answers.append((held.lease.rollout, outcome))
        answered.release()

    outbox = Outbox(control, "w", done, lambda: more)
    running = asyncio.create_task(outbox.run())
    try:
        yield outbox, answers
        async with asyncio.timeout(patience(30)):
            for _ in range(number):
                await answered.acquire()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def reported(number: int, *, more: bool) -> list[list[str]]:
    """Report this many outcomes, one a turn of the event loop, and return the rollouts of each request."""
    control = Counted()
    async with reporting(control, number, more=more) as (outbox, answers):
        for index in range(number):
            held = HeldLease(lease(index, "run"))
            outbox.put(held, StageResult(rollout=f"r{index}", token=1, stage="run"))
            assert held.reporting
            await asyncio.sleep(0)
    assert {outcome for _, outcome in answers} == {"accepted"}
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


async def test_outcomes_wait_for_longer_where_another_was_reported_just_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollyard_pipeline.worker.outbox.GATHER_SECONDS", 0.0)
    monkeypatch.setattr("rollyard_pipeline.worker.outbox.PACE_SECONDS", 1.0)
    control = Counted()
    async with reporting(control, 4, more=True) as (outbox, answers):
        for index in range(4):
            outbox.put(HeldLease(lease(index, "run")), StageResult(rollout=f"r{index}", token=1, stage="run"))
            async with asyncio.timeout(patience(30)):
                while not answers:  # noqa: ASYNC110 - the outbox notes it
                    await asyncio.sleep(0.01)
            for _ in range(10):
                await asyncio.sleep(0)
    assert control.requests == [["r0"], ["r1", "r2", "r3"]]


async def test_a_request_holds_no_more_than_a_batch() -> None:
    requests = await reported(3 * BATCH, more=True)
    assert max(map(len, requests)) == BATCH


async def test_results_and_failures_are_reported_by_their_own_calls_in_the_order_of_arrival() -> None:
    control, kinds = Plane(spec()), "rrfrffr"
    async with reporting(control, len(kinds)) as (outbox, answers):
        for index, kind in enumerate(kinds):
            held = HeldLease(lease(index, "run"))
            result = StageResult(rollout=f"r{index}", token=1, stage="run")
            outbox.put(held, result if kind == "r" else hand_over(held.lease, StageTimes()))
    assert sorted(answers) == [(f"r{index}", "accepted") for index in range(len(kinds))]
    found = {one.rollout: "r" if isinstance(one, StageResult) else "f" for one in control.outcomes}
    assert "".join(found[f"r{index}"] for index in range(len(kinds))) == kinds
    assert len(control.outcomes) == len(kinds)


class Differing(Plane):
    """A control plane that answers each rollout otherwise, in another order, and not all of them."""

    async def complete(self, request: CompleteRequest) -> OutcomeResponse:
        answers: list[OutcomeItem] = []
        for number, result in enumerate(request.results):
            kind: Answer = ("accepted", "stale", "cancelled")[number % 3]
            answers.append(OutcomeItem(rollout=result.rollout, outcome=kind))
        return OutcomeResponse(outcomes=answers[2::-1])


async def test_each_outcome_has_its_own_answer_and_one_without_is_unknown() -> None:
    async with reporting(Differing(spec()), 4) as (outbox, answers):
        for index in range(4):
            outbox.put(HeldLease(lease(index, "run")), StageResult(rollout=f"r{index}", token=1, stage="run"))
    assert dict(answers) == {"r0": "accepted", "r1": "stale", "r2": "cancelled", "r3": "unknown"}
