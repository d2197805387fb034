"""What a tenant, a worker or a reporting policy tries with the targets of dynamic sampling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_testing.adversary.restplane import Yard, control_plane, result

pytestmark = pytest.mark.attack(boundary="trainers", surface="targets of dynamic sampling")


HUGE = 10**30


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with control_plane(tmp_path) as made:
        sampling: dict[str, Any] = {"targetGroups": 1, "maxInFlightGroups": 1}
        for name in ("mine", "other"):
            await made.submit(name, tasks=3, samplesPerTask=2, dynamicSampling=sampling)
        manifest = (await made.admin.get("/v1/rolloutjobs/mine")).json()
        manifest["spec"]["tasks"] = {"stream": True}
        steps = manifest | {"metadata": {"name": "steps"}, "status": {}}
        assert (await made.admin.post("/v1/rolloutjobs", json=steps)).status_code == 201
        yield made


async def target_of(yard: Yard, name: str) -> int:
    job = (await yard.admin.get(f"/v1/rolloutjobs/{name}")).json()
    found: int = job["status"]["dynamicSampling"]["targetGroups"]
    return found


@pytest.mark.attack(
    "a worker, or a guessed token, opens a step and makes the job work longer",
    stopped_by="the call is the admin's alone",
)
async def test_no_token_of_workers_opens_a_step(yard: Yard) -> None:
    uid = (await yard.admin.get("/v1/rolloutjobs/steps")).json()["metadata"]["uid"]
    tokens = (
        yard.job_token("steps", uid),
        yard.job_token("mine"),
        yard.plane.tokens.current("worker"),
        "forged",
        None,
    )
    for token in tokens:
        refused = await yard.client(token).post("/v1/rolloutjobs/steps/targets", json={"id": "a"})
        assert refused.status_code in (401, 403), token
    assert await target_of(yard, "steps") == 0


@pytest.mark.attack(
    "a step reaches a job of the same name in another namespace",
    stopped_by="the job is found by its namespace",
)
async def test_a_step_does_not_reach_the_same_name_in_another_namespace(yard: Yard) -> None:
    path = "/v1/rolloutjobs/steps/targets"
    refused = await yard.admin.post(path, params={"namespace": "elsewhere"}, json={"id": "a"})
    assert refused.status_code == 404
    assert await target_of(yard, "steps") == 0


@pytest.mark.attack(
    "huge, negative and odd numbers, long or odd ids",
    stopped_by="both are bounded and refused by field; the body has at most 1 MiB",
)
async def test_huge_and_odd_numbers_open_nothing(yard: Yard) -> None:
    path = "/v1/rolloutjobs/steps/targets"
    for groups in (HUGE, -HUGE, -1, 0, 1e300, "9" * 4000, [1], {"a": 1}):
        assert (await yard.admin.post(path, json={"id": "a", "groups": groups})).status_code == 422
    nan = await yard.admin.post(path, content=b'{"id": "a", "groups": NaN}')
    assert nan.status_code in (400, 422)
    large = await yard.admin.post(path, content=b'{"id": "' + b"a" * (2 << 20) + b'"}')
    assert large.status_code == 413
    for text in ("a\nb", "../other", "\x00", "a'; DROP TABLE jobs; --"):
        assert (await yard.admin.post(path, json={"id": text})).status_code == 422, text
    assert await target_of(yard, "steps") == 0


@pytest.mark.attack(
    "a step is sent again and again",
    stopped_by="a step is a row of its id, made in the transaction that raises the target",
)
async def test_a_replayed_step_adds_nothing(yard: Yard) -> None:
    path = "/v1/rolloutjobs/steps/targets"
    body = {"id": "a", "groups": 5}
    answers = await asyncio.gather(*[yard.admin.post(path, json=body) for _ in range(20)])
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    assert (await yard.admin.post(path, json=body | {"groups": 6})).status_code == 409
    assert await target_of(yard, "steps") == 5


@pytest.mark.attack(
    "a job keeps so many rollouts in flight that ending them holds the others up",
    surface="`spec.dynamicSampling`",
    stopped_by="groups in flight times samples are bounded, and at most 2,000 rollouts end in one "
    "transaction",
)
async def test_a_spec_cannot_ask_for_more_rollouts_at_once_than_are_allowed(yard: Yard) -> None:
    manifest = (await yard.admin.get("/v1/rolloutjobs/mine")).json()
    manifest.pop("status")
    manifest["metadata"] = {"name": "greedy"}
    for sampling in (
        {"targetGroups": 1, "maxInFlightGroups": 8192},
        {"targetGroups": HUGE},
        {"targetGroups": 1, "minStd": -1},
        {"targetGroups": 1, "minStd": 1e300},
        {"targetGroups": 2, "maxGroups": 1},
        {"targetGroups": 1, "metric": "m" * 129},
    ):
        manifest["spec"] |= {"dynamicSampling": sampling, "samplesPerTask": 4}
        refused = await yard.admin.post("/v1/rolloutjobs", json=manifest)
        assert refused.status_code == 422, sampling
        assert "dynamicSampling" in refused.text, sampling


@pytest.mark.attack(
    "a worker reports rewards for another job's groups, or for rollouts that were cancelled",
    surface="`spec.dynamicSampling`",
    stopped_by="fencing tokens, and the job of the worker's token",
)
async def test_a_worker_cannot_meet_another_jobs_target_nor_undo_its_own(yard: Yard) -> None:
    http = yard.client(yard.job_token("mine"))
    # Both jobs are at Eval, with one group in flight each.
    leases: dict[str, list[dict[str, Any]]] = {}
    for name in ("mine", "other"):
        own = yard.client(yard.job_token(name))
        leases[name] = await yard.lease(own, name, init=2)
    forged = [
        {k: x[k] for k in ("rollout", "token")} | {"stage": "eval", "reward": float(i)}
        for i, x in enumerate(leases["other"])
    ]
    told = await http.post("/v1/leases/complete", json={"worker": "w", "results": forged})
    assert told.status_code in (200, 403)
    if told.status_code == 200:
        assert "accepted" not in {x["outcome"] for x in told.json()["outcomes"]}
    job = (await yard.admin.get("/v1/rolloutjobs/other")).json()
    assert job["status"]["dynamicSampling"]["informativeGroups"] == 0
    # A report of a rollout that was cancelled changes nothing, however often it comes.
    await yard.admin.post("/v1/rolloutjobs/mine/cancel", json={})
    late = [result(x) for x in leases["mine"]]
    for _ in range(3):
        told = await http.post("/v1/leases/complete", json={"worker": "w", "results": late})
        assert {x["outcome"] for x in told.json()["outcomes"]} == {"cancelled"}
    job = (await yard.admin.get("/v1/rolloutjobs/mine")).json()
    assert job["status"]["counts"]["total"] == job["status"]["counts"]["cancelled"] == 2
