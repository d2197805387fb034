"""What a worker, a policy or another trainer tries with the rewards that a trainer hands in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_testing.adversary.restplane import Yard, control_plane
from rollyard_testing.api.plane import Worker
from rollyard_testing.manifests import job_manifest

pytestmark = pytest.mark.attack(boundary="trainers", surface="rewards from the trainer")

PATH = "/v1/rolloutjobs/mine/rewards"


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    """Yield a control plane with two streams whose rollouts wait for the trainer's rewards."""
    async with control_plane(tmp_path) as made:
        for name in ("mine", "other"):
            spec = {"tasks": {"stream": True}, "handler": "unscored", "agent": {"type": "oracle"}}
            job = await made.admin.post("/v1/rolloutjobs", json=job_manifest(name, spec))
            assert job.status_code == 201, job.text
            made.uids[name] = job.json()["metadata"]["uid"]
            tasks = {"tasks": [{"id": f"t{i}", "prompt": "p"} for i in range(2)]}
            assert (await made.admin.post(f"/v1/rolloutjobs/{name}/tasks", json=tasks)).status_code == 200
        worker = Worker(made.worker)
        for stage in ("init", "run"):
            leases = await worker.lease(**{stage: 4})
            assert set(await worker.complete(*map(worker.result, leases))) == {"accepted"}
        yield made


async def waiting(yard: Yard, name: str = "mine") -> list[str]:
    """Return the ids of the rollouts of a stream that have no reward yet."""
    answer = await yard.admin.get(f"/v1/rolloutjobs/{name}/unscored")
    assert answer.status_code == 200, answer.text
    return [json.loads(line)["id"] for line in answer.content.splitlines()]


@pytest.mark.attack(
    "a worker, a driver, or a guessed token hands in a reward, for its own job or for another one",
    stopped_by="the call is the admin's alone",
)
async def test_no_token_of_workers_hands_in_a_reward(yard: Yard) -> None:
    ids = await waiting(yard)
    tokens = (
        yard.job_token("mine"),
        yard.job_token("other"),
        yard.plane.tokens.current("worker"),
        yard.plane.tokens.current("driver"),
        yard.plane.tokens.by_role.get("viewer", ("forged-viewer",))[0],
        "forged",
        None,
    )
    for token in tokens:
        refused = await yard.client(token).post(PATH, json={"rewards": {ids[0]: 1.0}})
        assert refused.status_code in (401, 403), token
    read = await yard.client(yard.job_token("mine")).get("/v1/rolloutjobs/mine/unscored")
    assert read.status_code == 403, "workers do not read what others have played"
    assert await waiting(yard) == ids


@pytest.mark.attack(
    "a worker evaluates a rollout that waits for its trainer, under its old lease or a guessed one",
    stopped_by="the rollout is in no state in which Eval can be leased or completed",
)
async def test_a_worker_gives_no_reward_of_its_own(yard: Yard) -> None:
    ids = await waiting(yard)
    worker = Worker(yard.client(yard.job_token("mine")))
    assert await worker.lease(job="mine", eval=16) == []
    for token in range(4):
        for id in ids:
            forged = {"rollout": id, "token": token, "stage": "eval", "reward": 1.0}
            assert await worker.complete(forged) in (["stale"], ["repeated"])
            failure = {"rollout": id, "token": token, "stage": "eval"}
            assert await worker.fail(failure, retryable=False) in ("stale", "repeated")
    ask = {"rollout": ids[0], "token": 2, "episode": {}}
    assert (await worker.http.post("/v1/leases/reward", json=ask)).status_code in (409, 422)
    assert await waiting(yard) == ids


@pytest.mark.attack(
    "a trainer names rollouts of another job, or the job's name in another namespace",
    stopped_by="a rollout must be of the job that the call names, which is found by its namespace",
)
async def test_rewards_reach_no_other_job(yard: Yard) -> None:
    mine, theirs = await waiting(yard), await waiting(yard, "other")
    refused = await yard.admin.post(PATH, json={"rewards": {mine[0]: 1.0, theirs[0]: 1.0}})
    assert (refused.status_code, refused.json()["reason"]) == (404, "RolloutNotFound")
    refused = await yard.admin.post(PATH, params={"namespace": "team"}, json={"rewards": {mine[0]: 1.0}})
    assert (refused.status_code, refused.json()["reason"]) == (404, "JobNotFound")
    assert (await waiting(yard), await waiting(yard, "other")) == (mine, theirs)


@pytest.mark.attack(
    "huge numbers, endless or odd texts, deep and large bodies",
    stopped_by="numbers, names and reasons are bounded and refused by field; the body has at most 8 MiB",
)
async def test_odd_rewards_give_nothing(yard: Yard) -> None:
    ids = await waiting(yard)
    deep: Any = 1.0
    for _ in range(200):
        deep = {"reward": deep}
    for reward in (
        10**400, 1e300, "9" * 4000, [1], deep, {"reward": 1.0, "reason": "A" * 129},
        {"reward": 1.0, "reason": "A\nB"}, {"reward": 1.0, "components": {"\x1b[2J": 1.0}},
        {"reward": 1.0, "components": {f"c{i}": 1.0 for i in range(65)}}, {"reward": 1.0, "fence": 2**80},
    ):  # fmt: skip
        answer = await yard.admin.post(PATH, json={"rewards": {ids[0]: reward}})
        assert answer.status_code in (400, 409, 422), reward
    for id in ("\x00", "a" * 129, "../other", "a'; DROP TABLE jobs; --"):
        answer = await yard.admin.post(PATH, json={"rewards": {id: 1.0}})
        assert answer.status_code in (400, 404, 422), id
    large = await yard.admin.post(PATH, content=b'{"rewards": {"' + b"a" * (9 << 20) + b'": 1}}')
    assert large.status_code == 413
    assert await waiting(yard) == ids


@pytest.mark.attack(
    "two trainers hand in different rewards at the same time, again and again",
    stopped_by="the first reward ends the rollout in one transaction, and another one is a conflict",
)
async def test_a_replayed_reward_changes_nothing(yard: Yard) -> None:
    first, second = await waiting(yard)
    calls = [yard.admin.post(PATH, json={"rewards": {first: float(n % 2)}}) for n in range(20)]
    answers = await asyncio.gather(*calls)
    assert sorted(answer.status_code for answer in answers) == [200] * 10 + [409] * 10
    assert sum(answer.json().get("accepted", 0) for answer in answers) == 1
    assert await waiting(yard) == [second]
