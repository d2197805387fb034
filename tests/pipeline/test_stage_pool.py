"""A pool of places keeps a distance between its requests while it has other work, and none without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rollyard_crds.lease import Lease, LeaseRequest, LeaseResponse
from rollyard_pipeline.worker.worker import StagePool, WorkerOptions
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.workerlab import Plane, lease, spec
from rollyard_testing.waiting import eventually


class Generous(Plane):
    """A control plane that gives one lease at each request, and keeps the free places and the times."""

    def __init__(self) -> None:
        super().__init__(spec())
        self.free: list[int] = []
        self.times: list[float] = []

    async def lease(self, request: LeaseRequest) -> LeaseResponse:
        self.free.append(request.capacity["run"])
        self.times.append(time.monotonic())
        await asyncio.sleep(0)
        return LeaseResponse(leases=[lease(len(self.free), "run")])


@asynccontextmanager
async def leasing(places: int, *, ends_at_once: bool = False) -> AsyncIterator[tuple[StagePool, Generous]]:
    """Yield a pool of Run that leases until the end of the block."""
    control = Generous()

    def start(_: Lease) -> None:
        if ends_at_once:
            pool.release()

    pool = StagePool(control, WorkerOptions("w", "n", {"run": places}), "run", start)
    running = asyncio.create_task(pool.run())
    try:
        yield pool, control
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def requested(control: Generous, number: int) -> None:
    """Wait until there were this many requests."""
    await eventually(lambda: len(control.free) >= number, patience(30), pause=0.001)


async def test_requests_keep_their_distance_while_there_is_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollyard_pipeline.worker.worker.PACE_SECONDS", 0.2)
    async with leasing(places=4) as (pool, control):
        await requested(control, 2)
        pool.release()
        await requested(control, 3)
    # The place that has become free meanwhile is requested together with the others.
    assert control.free == [4, 3, 3]
    assert min(after - before for before, after in zip(control.times, control.times[1:], strict=False)) > 0.19


async def test_a_pool_without_other_work_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard_pipeline.worker.worker.PACE_SECONDS", 3600.0)
    async with leasing(places=4, ends_at_once=True) as (_, control):
        await requested(control, 5)
    assert control.free[:5] == [4] * 5


async def test_a_pool_whose_work_has_ended_keeps_no_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard_pipeline.worker.worker.PACE_SECONDS", 3600.0)
    async with leasing(places=1) as (pool, control):
        for number in range(1, 4):
            await requested(control, number)
            pool.release()
    assert control.free == [1] * 3
