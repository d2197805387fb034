"""Iterators, batches and waits that end, or time out, with a reason."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import nan
from typing import Any

import httpx
import pytest
from rollyard import AsyncClient, Client, Retry, RolloutJob, errors
from rollyard_client import DriverClient
from rollyard_client.call import Call
from rollyard_client.finish import POLL_SECONDS, check_success, failure, late
from rollyard_client.paging import Cursor, Following
from rollyard_client.requests.results import Page
from rollyard_crds.base import Condition
from rollyard_crds.fields.annotations import CANCEL_REASON
from rollyard_crds.rolloutjob import RolloutJobStatus
from rollyard_testing.api.control_plane import StartedControlPlane, a_control_plane
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

TASKS = [{"id": "a", "prompt": "p"}, {"id": "b", "prompt": "p"}]
LONG = patience(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedControlPlane]:
    with a_control_plane(tmp_path_factory.mktemp("api"), ready_seconds=50, end_seconds=20) as started:
        yield started


@pytest.fixture
def client(server: StartedControlPlane) -> Iterator[Client]:
    with Client(server.url, server.tokens["admin"]) as made:
        yield made


def stream(name: str, **spec: Any) -> dict[str, Any]:
    body = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
    return job_manifest(name, body | spec)


def one_ends(server: StartedControlPlane, job: str) -> None:
    """Let one rollout of a job fail in Init, which ends it."""
    headers = {"Authorization": f"Bearer {server.tokens['worker']}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=LONG) as http:
        ask = {"worker": "w", "node": "n", "capacity": {"init": 1}, "job": job}
        (lease,) = http.post("/v1/leases", json=ask).json()["leases"]
        failure = {"rollout": lease["rollout"], "token": lease["token"], "stage": "init"}
        failure |= {"reason": "TestBroken", "message": "it broke", "retryable": False}
        http.post("/v1/leases/fail", json={"worker": "w", "failures": [failure]}).raise_for_status()


def condition(kind: str, reason: str, message: str = "", status: str = "True") -> Condition:
    moment = "2026-01-01T00:00:00Z"
    return Condition.model_validate(
        {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": moment}
    )


async def reported(server: StartedControlPlane, job: RolloutJob, *conditions: Condition) -> None:
    async with DriverClient(server.url, server.tokens["driver"]) as driver:
        await driver.put_job_status(job, RolloutJobStatus(phase="Failed", conditions=list(conditions)))


async def test_a_cancelled_job_ends_what_follows_it_with_that_reason(
    client: Client, server: StartedControlPlane
) -> None:
    client.submit(stream("cancelled"))
    client.push_tasks("cancelled", TASKS)
    one_ends(server, "cancelled")
    client.cancel("cancelled")
    results = client.trajectories("cancelled", follow=True)
    assert [next(results).status, next(results).status] == ["failed", "cancelled"]
    for _ in range(2):
        with pytest.raises(errors.JobFailed, match="'cancelled' was cancelled") as ended:
            next(results)
        assert ended.value.reason == "JobCancelled"
    assert len(list(client.trajectories("cancelled"))) == 2, "what is not followed just ends"
    with pytest.raises(errors.JobFailed, match="was cancelled; 0 of 4 groups had ended, which `groups` with"):
        client.batch("cancelled", groups=4, timeout=LONG)
    async with AsyncClient(server.url, server.tokens["admin"]) as other:
        with pytest.raises(errors.JobFailed, match="was cancelled"):
            _ = [group async for group in other.groups("cancelled", follow=True)]
        with pytest.raises(errors.JobFailed, match="was cancelled; 0 of 4 groups"):
            await other.array_batch("cancelled", groups=4, timeout=LONG)


async def test_a_failed_job_says_what_its_driver_said(client: Client, server: StartedControlPlane) -> None:
    job = client.submit(stream("failed"))
    client.push_tasks("failed", TASKS[:1])
    one_ends(server, "failed")
    client.close_stream("failed")
    verdict = condition("Failed", "TooManyFailures", "1 of 1 rollouts failed")
    await reported(server, job, condition("Finished", "TooManyFailures"), verdict)
    with pytest.raises(errors.JobFailed) as ended:
        list(client.groups("failed", follow=True, dropped=True))
    assert str(ended.value) == "RolloutJob 'failed' has failed: TooManyFailures: 1 of 1 rollouts failed"
    assert ended.value.reason == "JobFailed"


async def test_a_job_that_is_deleted_while_it_is_followed(
    client: Client, server: StartedControlPlane
) -> None:
    async with AsyncClient(server.url, server.tokens["admin"]) as other:
        reads: list[Callable[[str], Any]] = [
            lambda name: anext(other.trajectories(name, follow=True)),
            lambda name: other.batch(name, groups=1, timeout=LONG),
            lambda name: other.wait(name, timeout=LONG),
        ]
        for number, read in enumerate(reads):
            name = f"deleted-{number}"
            with pytest.raises(errors.NotFound):
                await read(name)
            await other.submit(stream(name))
            answered = asyncio.Event()
            hooks = {"response": [partial(_set, answered)]}
            other._transport.client.event_hooks = hooks
            waiting = asyncio.create_task(read(name))
            await asyncio.wait_for(answered.wait(), LONG)
            client.delete(name)
            with pytest.raises(errors.RollyardError) as gone:
                await asyncio.wait_for(waiting, LONG)
            assert (type(gone.value), gone.value.reason) == (errors.JobFailed, "JobDeleted"), number


async def _set(event: asyncio.Event, _answer: httpx.Response) -> None:
    event.set()


async def test_a_time_out_has_the_reason_of_the_wait(client: Client, server: StartedControlPlane) -> None:
    client.submit(stream("waits"))
    async with AsyncClient(server.url, server.tokens["admin"]) as other:

        async def reason(expected: str) -> str:
            """Return the message, once the overview of the fleet, which is up to a second old, says why."""
            end = time.monotonic() + LONG
            while True:
                with pytest.raises(errors.WaitTimeout) as late:
                    await anext(other.trajectories("waits", follow=True, timeout=0))
                if late.value.reason == expected:
                    return str(late.value)
                assert time.monotonic() < end, late.value.reason

        said = await reason("NoTasks")
        assert said.startswith(
            "RolloutJob 'waits': no further result within 0 s; it says: the stream is open"
        )
        assert said.endswith("; the iterator can still be used")
        client.push_tasks("waits", TASKS)
        assert "no driver has looked at the job" in await reason("NoDriver")
        results = client.trajectories("waits", follow=True, timeout=0)
        for read in (
            lambda: next(results),
            lambda: next(client.groups("waits", follow=True, timeout=0)),
            lambda: client.batch("waits", groups=1, timeout=0),
            lambda: client.array_batch("waits", groups=1, timeout=0),
            lambda: client.wait("waits", timeout=0),
            lambda: [list(client.events("waits", timeout=0))],
        ):
            with pytest.raises(errors.WaitTimeout, match="it says: no driver has looked at the job") as late:
                read()
            assert late.value.reason == "NoDriver"
        client.update("waits", suspend=True)
        assert "the job is suspended" in await reason("Suspended")
    client.update("waits", suspend=False)
    one_ends(server, "waits")
    assert next(results).reason == "TestBroken", "the iterator was usable all the time"


def job_with(*conditions: Condition, failed: int = 0, cancelled: str = "") -> RolloutJob:
    job = RolloutJob.model_validate(stream("j"))
    job.metadata.annotations = {CANCEL_REASON: cancelled} if cancelled else {}
    job.status.conditions = list(conditions)
    job.status.counts.failed = failed
    return job


ADMITTED = condition("Admitted", "Admitted")
FAILED = (condition("Finished", "BackoffLimit"), condition("Failed", "BackoffLimit", "workers died"))
BY_USER = condition("Failed", "Cancelled", "by the user")


@pytest.mark.parametrize(
    ("job", "reason", "message"),
    [
        (job_with(), None, ""),
        (job_with(cancelled="TargetMet"), None, ""),
        (job_with(condition("Failed", "Done", status="False"), failed=3), None, ""),
        (job_with(*FAILED), "JobFailed", "has failed: BackoffLimit: workers died"),
        (job_with(*FAILED, cancelled="Cancelled"), "JobFailed", "has failed: BackoffLimit: workers died"),
        (job_with(cancelled="DeadlineExceeded"), "JobFailed", "has failed: DeadlineExceeded"),
        (job_with(cancelled="Cancelled"), "JobCancelled", "was cancelled"),
        (job_with(BY_USER), "JobCancelled", "was cancelled: by the user"),
        (job_with(cancelled="Deleted"), "JobDeleted", "was deleted"),
    ],
)
def test_how_a_job_has_ended(job: RolloutJob, reason: str | None, message: str) -> None:
    error = failure(job)
    assert (error is None) == (reason is None)
    if error is not None:
        assert (error.reason, str(error)) == (reason, f"RolloutJob 'j' {message}")


def test_the_verdict_on_failed_rollouts_is_waited_for() -> None:
    steps = check_success("j", "default")
    asked = next(steps)
    assert isinstance(asked, Call)
    assert steps.send(job_with(ADMITTED, failed=1)) == POLL_SECONDS
    assert isinstance(steps.send(None), Call)
    with pytest.raises(errors.JobFailed, match="workers died"):
        steps.send(job_with(*FAILED, failed=1))
    # Nobody decides about a job that no driver has seen, and about one without failures nothing is to decide.
    for job in (job_with(failed=1), job_with(ADMITTED)):
        steps = check_success("j", "default")
        next(steps)
        with pytest.raises(StopIteration):
            steps.send(job)


def test_what_the_job_says_is_enough_if_the_overview_cannot_be_read() -> None:
    job = job_with(ADMITTED)
    job.status.message = "0 of 1 stage workers run"
    steps = late("nothing came", "j", "default", end="!")
    assert isinstance(next(steps), Call)
    assert isinstance(steps.throw(errors.Unauthorized("no")), Call)
    with pytest.raises(errors.WaitTimeout) as timeout:
        steps.send(job)
    assert str(timeout.value) == "nothing came; it says: 0 of 1 stage workers run!"
    assert timeout.value.reason == "WaitTimeout"


def test_other_results_that_end_are_progress() -> None:
    def page(cursor: str, wait: float) -> Any:
        return "page", cursor, wait

    pages = Cursor(page, int, Following("j", "default", follow=True, timeout=0.0))
    steps = pages.fetch()
    assert next(steps) == ("page", "", 0.0)
    # A page without a result of the kind that was asked for, behind others that have ended.
    assert steps.send(Page([], "c1", False)) == ("page", "c1", 0.0)
    assert isinstance(steps.send(Page([], "c1", False)), Call), "it asks what the job waits for"


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [(200, errors.ServerUnavailable, "ServerUnavailable"), (404, errors.JobFailed, "JobDeleted")],
)
def test_a_stream_of_events_that_is_cut_says_why(
    status: int, error: type[errors.RollyardError], reason: str
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/events"):
            data = {
                "rollout": "r",
                "stage": None,
                "status": "succeeded",
                "reward": 1.0,
                "reason": "",
                "newer": 1,
            }
            text = f"id: 7\nevent: transition\ndata: {json.dumps(data)}\n\n"
            return httpx.Response(200, text=text)
        return httpx.Response(status, content=job_with().model_dump_json(by_alias=True))

    with Client("http://x", "t") as client:
        client._transport.client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x")
        events = client.events("j")
        first = next(events)
        assert first.transition is not None
        assert (first.transition.rollout, first.transition.reward, first.counts) == ("r", 1.0, None)
        with pytest.raises(error) as cut:
            next(events)
        assert cut.value.reason == reason


@pytest.mark.parametrize("wrong", [{"timeout": -1}, {"timeout": nan}, {"cursor": "c", "consumer": "n"}])
def test_arguments_of_iterators_are_checked_at_once(wrong: dict[str, Any]) -> None:
    with Client("http://x", "t") as client:
        for read in (client.trajectories, client.groups):
            with pytest.raises(errors.Invalid):
                read("j", **wrong)


@pytest.mark.parametrize("body", [b"{}", b"[]", b"{", b'{"upto": "many"}'])
def test_an_answer_of_another_form_is_an_error_of_its_own(body: bytes) -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=body))
    with Client("http://x", "t") as client:
        client._transport.client = httpx.Client(transport=transport, base_url="http://x")
        for read in (lambda: client.statistics("j"), client.overview, lambda: client.push_tasks("j", [])):
            with pytest.raises(errors.AnswerInvalid):
                read()


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"base": -0.1}, {"longest": nan}])
def test_a_policy_of_retries_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.Invalid, match=f"^{next(iter(wrong))}: must be"):
        Retry(**wrong)
