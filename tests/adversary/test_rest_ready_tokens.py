"""What the holder of a ready worker's token tries: other calls, other workers' jobs, and a second job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_api.access import permissions
from rollyard_api.core.wakeups import ready_topic
from rollyard_api.rollouts import assignments
from rollyard_crds.security.job_token import job_of, job_token
from rollyard_crds.security.ready_token import ready_token, ready_worker_of
from rollyard_testing.adversary.restplane import Yard, control_plane
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

pytestmark = pytest.mark.attack(boundary="worker", surface="ready token")


OFFERS, ASSIGNMENT = "/v1/workers/offers", "/v1/workers/assignment"


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with control_plane(tmp_path) as made:
        await made.submit("mine", tasks=2)
        await made.submit("other", tasks=2)
        yield made


def ready(yard: Yard, worker: str = "w-1", namespace: str = "default") -> httpx.AsyncClient:
    return yard.client(ready_token(yard.plane.tokens.current("worker"), namespace, worker))


async def offer(yard: Yard, worker: str = "w-1", job: str = "mine", **changes: Any) -> httpx.Response:
    body = {
        "namespace": "default",
        "worker": worker,
        "job": job,
        "uid": yard.uids.get(job, "u-gone"),
        "arguments": ["--job", job],
    }
    return await yard.client(yard.plane.tokens.current("driver")).post(OFFERS, json=body | changes)


async def ask(http: httpx.AsyncClient, worker: str = "w-1", **changes: Any) -> httpx.Response:
    return await http.post(ASSIGNMENT, json={"namespace": "default", "worker": worker} | changes)


# The token itself.


CHANGED_TOKEN = pytest.mark.attack(
    "it is changed to name another ready worker or namespace, or is used as the token of a job",
    stopped_by="an HMAC under the worker token over all of it, with a word of its own",
)


@CHANGED_TOKEN
def test_a_token_is_of_one_ready_worker() -> None:
    token = ready_token("secret", "team", "w-1")
    found = ready_worker_of(token, "secret")
    assert found is not None
    assert (found.namespace, found.worker) == ("team", "w-1")
    assert ready_worker_of(token, "another secret") is None
    for forged in (token.replace(".w-1.", ".w-2."), token.replace(".team.", ".default."), f"{token}.x"):
        assert ready_worker_of(forged, "secret") is None
    for text in ("", "ry-ready", "ry-ready.a.b", "ry-ready.a.b.c", "ry-ready.a.b.c.d", "secret"):
        assert ready_worker_of(text, "secret") is None


@CHANGED_TOKEN
def test_neither_kind_of_token_is_taken_for_the_other() -> None:
    assert job_of(ready_token("secret", "team", "w-1"), "secret") is None
    assert job_of(ready_token("secret", "team", "w-1").replace("ry-ready", "ry-job"), "secret") is None
    made = job_token("secret", "team", "w-1", "u")
    assert ready_worker_of(made.replace("ry-job", "ry-ready").replace(".u.", "."), "secret") is None


@CHANGED_TOKEN
@pytest.mark.parametrize("parts", [("", "a"), ("n", "a.b"), ("n", ""), ("n/", "a")])
def test_a_token_is_made_of_names_only(parts: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="is not a DNS label"):
        ready_token("secret", *parts)


# What the token reaches.


OTHER_CALLS = pytest.mark.attack(
    "its holder reads jobs, leases rollouts, reports or offers anything",
    stopped_by="one rule permits one call, which asks for an assignment",
)


@OTHER_CALLS
async def test_a_ready_token_makes_no_other_call(yard: Yard) -> None:
    """It reads no job, leases nothing and reports nothing, before and after its assignment."""
    await offer(yard)
    http = ready(yard)
    for taken in (False, True):
        if taken:
            assert (await ask(http)).status_code == 200
        for (method, template), rule in permissions.RULES.items():
            if rule.open or (method, template) == ("POST", ASSIGNMENT):
                continue
            path = template.replace("{name}", "mine").replace("{", "").replace("}", "")
            answer = await http.request(method, path, json={})
            assert answer.status_code == 403, f"{method} {template}: {answer.text}"
            assert "ready" in answer.json()["detail"]


JOB_OF_ANOTHER_WORKER = pytest.mark.attack(
    "a ready worker, or the worker of a job, asks for the job of another one or of another namespace",
    surface="`/v1/workers/assignment`",
    stopped_by="the request must name the worker of its token, and jobs are offered within their namespace",
)


@JOB_OF_ANOTHER_WORKER
async def test_only_a_ready_token_asks_for_an_assignment(yard: Yard) -> None:
    await offer(yard)
    tokens = yard.plane.tokens
    for token in (*(tokens.by_role[role][0] for role in tokens.by_role), yard.job_token("mine")):
        answer = await ask(yard.client(token))
        assert answer.status_code == 403, answer.text
    assert (await ask(yard.client(None))).status_code == 401
    assert (await ask(ready(yard))).status_code == 200, "nobody has taken it before"


@OTHER_CALLS
@pytest.mark.parametrize("role", ["worker", "metrics", "job", "ready"])
async def test_only_a_driver_offers_a_job(yard: Yard, role: str) -> None:
    tokens = yard.plane.tokens
    token = {
        "job": yard.job_token("mine"),
        "ready": ready_token(tokens.current("worker"), "default", "w-1"),
    }.get(role) or tokens.by_role[role][0]  # type: ignore[index]
    body = {
        "namespace": "default", "worker": "w-1", "job": "other", "uid": yard.uids["other"], "arguments": [],
    }  # fmt: skip
    assert (await yard.client(token).post(OFFERS, json=body)).status_code == 403
    assert (await ask(ready(yard))).status_code == 204


@JOB_OF_ANOTHER_WORKER
async def test_a_ready_worker_cannot_take_the_job_of_another_one(yard: Yard) -> None:
    """Neither by the other's name, nor by its namespace, nor by a name that its own token does not have."""
    await offer(yard, worker="w-2")
    assert (await ask(ready(yard, "w-1"), worker="w-2")).status_code == 403
    assert (await ask(ready(yard, "w-2", "team"), worker="w-2")).status_code == 403
    assert (await ask(ready(yard, "w-2", "team"), worker="w-2", namespace="team")).status_code == 204
    assert (await ask(ready(yard, "w-2"), worker="w-2")).status_code == 200


@JOB_OF_ANOTHER_WORKER
async def test_a_job_of_another_namespace_is_not_offered(yard: Yard) -> None:
    answer = await offer(yard, namespace="team")
    assert (answer.status_code, answer.json()["reason"]) == (404, "JobNotFound")
    assert (await ask(ready(yard, namespace="team"), namespace="team")).status_code == 204


# One job, once.


HOSTILE_OFFER = pytest.mark.attack(
    "an offer with endless arguments, or with a token of its own",
    surface="`/v1/workers/offers`",
    stopped_by="sizes and fields are checked, and the token is made when the assignment is handed out",
)


@HOSTILE_OFFER
async def test_the_answer_brings_the_token_of_that_job_alone(yard: Yard) -> None:
    assert (await offer(yard)).json() == {"taken": False}
    answer = await ask(ready(yard))
    assert answer.headers["cache-control"] == "no-store"
    found = job_of(answer.json()["token"], yard.plane.tokens.current("worker"))
    assert found is not None
    assert (found.namespace, found.name, found.uid) == ("default", "mine", yard.uids["mine"])
    assert answer.json()["arguments"] == ["--job", "mine"]
    http = yard.client(answer.json()["token"])
    assert len(await yard.lease(http, "mine", init=1)) == 1
    refused = await http.post(
        "/v1/leases", json={"worker": "w", "node": "n", "capacity": {"init": 1}, "job": "other"}
    )
    assert refused.status_code == 403


SECOND_ASSIGNMENT = pytest.mark.attack(
    "it takes a second assignment, or one answer is taken many times",
    stopped_by="an offer is handed out in one transaction, and its row shows that the token is spent",
)


@SECOND_ASSIGNMENT
async def test_a_second_assignment_is_refused(yard: Yard) -> None:
    await offer(yard)
    http = ready(yard)
    assert (await ask(http)).status_code == 200
    again = await ask(http)
    assert (again.status_code, again.json()["reason"]) == (409, "AssignmentTaken")
    assert "token" not in again.json()
    other = await offer(yard, job="other")
    assert (other.status_code, other.json()["reason"]) == (409, "AlreadyAssigned")
    assert (await offer(yard)).json() == {"taken": True}, "a driver that repeats its offer learns so"
    assert (await ask(http)).status_code == 409


@SECOND_ASSIGNMENT
async def test_of_many_requests_at_once_one_is_answered(yard: Yard) -> None:
    http = ready(yard)
    asking = [asyncio.create_task(ask(http, wait=30)) for _ in range(8)]
    await eventually(
        lambda: len(yard.plane.bus._waiting.get(ready_topic("default", "w-1"), ())) >= 8, patience(30)
    )
    await offer(yard)
    answers = await asyncio.wait_for(asyncio.gather(*asking), patience(30))
    assert sorted(one.status_code for one in answers) == [200] + [409] * 7


SUCCESSOR_OF_A_JOB = pytest.mark.attack(
    "it is used after its job was deleted, to get the job that follows under the name",
    stopped_by="the offer names the row of the job, and outlives it",
)


@SUCCESSOR_OF_A_JOB
@pytest.mark.parametrize("how", ["deleted", "replaced", "finished"])
async def test_a_job_that_is_over_withdraws_its_offer(yard: Yard, how: str) -> None:
    await offer(yard)
    if how == "finished":
        await yard.admin.post("/v1/rolloutjobs/mine/cancel", json={})
        await yard.plane.sweep()
    else:
        await yard.admin.delete("/v1/rolloutjobs/mine")
        await yard.plane.sweep()
    if how == "replaced":
        await yard.submit("mine")
    for reason in ("AssignmentWithdrawn", "AssignmentTaken"):
        answer = await ask(ready(yard))
        assert (answer.status_code, answer.json()["reason"]) == (409, reason)
        assert "token" not in answer.json()
    late = await offer(yard, worker="w-9", uid="u-gone")
    assert late.status_code == 404


@SUCCESSOR_OF_A_JOB
async def test_an_offer_is_kept_while_its_token_could_be_used_again(yard: Yard) -> None:
    """The rows of a deleted job are removed, but not what shows that the ready token is spent."""
    await offer(yard)
    assert (await ask(ready(yard))).status_code == 200
    await yard.admin.delete("/v1/rolloutjobs/mine")
    await yard.plane.flush()
    await yard.plane.sweep()
    await yard.submit("mine")
    assert (await ask(ready(yard))).status_code == 409
    assert (await offer(yard)).status_code == 409, "not even the successor of its job"
    assert (await ask(ready(yard))).status_code == 409


@SUCCESSOR_OF_A_JOB
async def test_an_old_offer_of_a_deleted_job_is_removed(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    await offer(yard)
    await yard.admin.delete("/v1/rolloutjobs/mine")
    await yard.plane.flush()
    await yard.plane.sweep()
    is_offered = partial(assignments.is_offered, namespace="default", worker="w-1")
    assert not await yard.plane.database.read(assignments.has_old), "a sweep has nothing to write yet"
    assert await yard.plane.database.read(is_offered)
    monkeypatch.setattr(assignments, "KEPT_SECONDS", -1.0)
    await yard.plane.sweep()
    assert not await yard.plane.database.read(is_offered)


@pytest.mark.attack(
    "many requests wait and hold the control plane",
    surface="`/v1/workers/assignment`",
    stopped_by="they count among the long polls of workers of their namespace",
)
async def test_a_namespace_holds_a_bounded_number_of_waits(tmp_path: Path) -> None:
    async with control_plane(tmp_path, max_worker_polls_per_namespace=1) as yard:
        first = asyncio.create_task(ask(ready(yard), wait=30))
        await eventually(lambda: yard.plane.bus._waiting.get(ready_topic("default", "w-1")), patience(30))
        assert (await ask(ready(yard, "w-2"), worker="w-2", wait=30)).status_code == 429
        yard.plane.bus.close()
        assert (await first).status_code == 204


@HOSTILE_OFFER
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"arguments": ["x" * 5000]}, "arguments"),
        ({"arguments": ["x"] * 65}, "arguments"),
        ({"worker": ""}, "worker"),
        ({"uid": ""}, "uid"),
        ({"token": "mine"}, "token"),
    ],
)
async def test_an_offer_is_checked(yard: Yard, changes: dict[str, Any], field: str) -> None:
    answer = await offer(yard, **changes)
    assert answer.status_code == 422
    assert field in answer.text
