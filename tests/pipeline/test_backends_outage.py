"""A rollout in Run whose pool has no ready backend waits and continues, or it gives its place back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from rollyard_crds.lease import BackendAssignment, Lease, NoBackend, RouteResponse, StageTimes
from rollyard_inference.errors import BackendUnavailable
from rollyard_pipeline import errors
from rollyard_pipeline.backends import BackendClient, session
from rollyard_pipeline.backends.session import Outage
from rollyard_pipeline.worker.worker import stage_failure
from rollyard_testing.pace import patience

_HERE = BackendAssignment(pool="p", url="http://here", model="tiny", tokenizer="t")


def _told(reason: NoBackend = "", backend: BackendAssignment | None = None) -> RouteResponse:
    return RouteResponse(backend=backend, retry_after=0.02, reason=reason)


class Plane:
    """The control plane's part: it has no ready backend for the first so many questions."""

    def __init__(self, then: BackendAssignment, outage: int, reason: NoBackend = "NoBackendReady") -> None:
        self.then = then
        self.left = outage
        self.reason: NoBackend = reason

    async def __call__(self, url: str, error: str, blame: bool) -> RouteResponse:
        self.left -= 1
        return _told(backend=self.then) if self.left < 0 else _told(self.reason)


def _refuse(body: dict[str, Any]) -> Any:
    return web.Response(status=500, text="down")


async def test_an_outage_is_no_part_of_the_time_after_which_a_rollout_gives_up(backend: Any) -> None:
    """It lasts for several times the budget, and then the turn continues from the same ids."""
    gone, back = backend(generate=_refuse), backend(generate=backend.generated)
    async with gone, back, BackendClient() as client:
        plane = Plane(back.assignment, outage=40)
        talk = gone.session(client, plane, budget=0.5)
        waited: list[float] = []
        talk.on_wait = waited.append
        sample = await talk.turn([1, 2, 3], 8, 0)
        assert talk.failing is None
    assert sample.token_ids == (5, 6)
    assert plane.left < 0, "it did not wait for the end of the outage"
    assert sum(waited) > 0.5, "the wait was taken for the policy's own time"
    assert back.requests[0][1] == gone.requests[0][1]


async def test_a_long_outage_sends_the_rollout_back_to_its_queue(backend: Any) -> None:
    async with backend(generate=_refuse) as gone, BackendClient() as client:
        talk = gone.session(client, Plane(gone.assignment, outage=10**6), budget=20.0, outage_seconds=0.3)
        async with asyncio.timeout(patience(15)):
            with pytest.raises(errors.PipelineError, match="no ready backend") as caught:
                await talk.turn([1], 8, 0)
    lease = Lease.model_validate(
        {
            "rollout": "r", "token": 1, "stage": "run", "job": "j", "namespace": "default", "job_uid": "u",
            "group_id": "t", "sample_index": 0, "attempt": 0, "queued_seconds": 0.0, "lease_seconds": 30.0,
            "task": {"id": "t", "prompt": "p"},
        }
    )  # fmt: skip
    failure = stage_failure(lease, caught.value, StageTimes())
    assert (failure.reason, failure.counts, failure.retryable) == ("NoBackend", False, True)


@pytest.mark.parametrize("reason", ["", "PoolPaused", "BackendsFull", "WeightsUpdating"])
async def test_only_a_pool_without_a_ready_backend_has_an_outage(backend: Any, reason: NoBackend) -> None:
    """An empty reason stands for a control plane that could not be asked."""
    async with backend(generate=_refuse) as gone, BackendClient() as client:
        talk = gone.session(client, Plane(gone.assignment, 10**6, reason), budget=0.3)
        with pytest.raises(BackendUnavailable, match=r"no backend answered for 0\.3 s"):
            await talk.turn([1], 8, 0)


async def test_a_backend_that_is_ready_and_fails_again_uses_up_the_budget(backend: Any) -> None:
    """What failed before and after an outage counts; the outage in between does not."""
    async with backend(generate=_refuse) as gone, BackendClient() as client:
        talk = gone.session(client, Plane(gone.assignment, outage=10), budget=1.0)
        async with asyncio.timeout(patience(15)):
            with pytest.raises(BackendUnavailable, match="no backend answered for 1 s"):
                await talk.turn([1], 8, 0)


def test_the_seconds_of_outages_add_up_until_a_backend_answers() -> None:
    outage = Outage()
    outage.note(_told("NoBackendReady"), 10.0)
    outage.note(_told("NoBackendReady"), 12.0)
    outage.note(_told(), 15.0)
    assert (outage.lasts, outage.seconds(16.0)) == (True, 6.0), "one that cannot be asked ends no outage"
    outage.note(_told(backend=_HERE), 20.0)
    assert (outage.lasts, outage.seconds(30.0)) == (False, 10.0)
    outage.note(_told("NoBackendReady"), 31.0)
    assert outage.seconds(33.0) == 12.0
    outage.end()
    assert (outage.lasts, outage.seconds(40.0)) == (False, 0.0)
    assert session.OUTAGE_SECONDS < 3600, "a place in Run is held for less time than the queue waits"
