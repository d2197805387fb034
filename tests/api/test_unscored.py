"""Rewards from the trainer: what waits for them, how they are handed in, and how a wait ends without one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgpack
import pytest
import sqlalchemy as sa
from rollyard_api.jobs import jobs
from rollyard_api.rollouts import staleness, sweeps
from rollyard_api.settings import Settings
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import backends, payloads, pools, rollouts
from rollyard_crds.trajectory import UnscoredTrajectory
from rollyard_testing.api.plane import Worker, make_manifest, serving

PATH = "/v1/rolloutjobs/job"
STREAM: dict[str, Any] = {"tasks": {"stream": True}, "handler": "unscored"}


async def submit(served: Any, *tasks: str, name: str = "job", close: bool = False, **spec: Any) -> None:
    """Submit a stream whose rewards the trainer gives, and push tasks to it."""
    await served.submit(name, **STREAM, **spec)
    await push(served, *tasks, name=name)
    if close:
        assert (await served.admin.post(f"/v1/rolloutjobs/{name}/close", json={})).status_code == 200


async def push(served: Any, *tasks: str, name: str = "job") -> Any:
    body = {"tasks": [{"id": task, "prompt": "p"} for task in tasks]}
    answer = await served.admin.post(f"/v1/rolloutjobs/{name}/tasks", json=body)
    assert answer.status_code in (200, 409, 429), answer.text
    return answer


async def play(served: Any) -> list[str]:
    """Take all rollouts through Init and Run, and return their ids."""
    worker = Worker(served.worker)
    played = []
    while leases := await worker.lease(init=16, run=16, eval=16):
        assert {lease["stage"] for lease in leases} <= {"init", "run"}, "no worker evaluates them"
        assert set(await worker.complete(*map(worker.result, leases))) == {"accepted"}
        played += [lease["rollout"] for lease in leases if lease["stage"] == "run"]
    return sorted(played)


async def unscored(served: Any, cursor: str = "", **query: Any) -> tuple[list[dict[str, Any]], Any]:
    answer = await served.admin.get(f"{PATH}/unscored", params={"cursor": cursor, **query})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.content.splitlines()], answer.headers


async def hand_in(served: Any, rewards: dict[str, Any], name: str = "job", **query: Any) -> Any:
    return await served.admin.post(f"/v1/rolloutjobs/{name}/rewards", json={"rewards": rewards}, params=query)


async def trajectories(served: Any) -> dict[str, dict[str, Any]]:
    answer = await served.admin.get(f"{PATH}/trajectories")
    return {record["id"]: record for record in map(json.loads, answer.content.splitlines())}


async def test_what_run_left_is_read_and_gets_its_reward(served: Any) -> None:
    await submit(served, "a", "b", samplesPerTask=2, close=True)
    ids = await play(served)
    assert (await served.counts())["eval"] == {"queued": 4, "active": 0}
    waiting, headers = await unscored(served)
    assert headers["rollyard-finished"] == "false"
    records = [UnscoredTrajectory.model_validate(record) for record in waiting]
    assert sorted(record.id for record in records) == ids
    assert {record.group_id for record in records} == {"a", "b"}
    first = records[0]
    assert (first.status, first.reward, first.segments[0].response_ids) == ("unscored", None, [4, 5, 6])
    one, *others = ids
    full = {"reward": 0.5, "components": {"style": -1.5, "length": 2}, "reason": "JudgeAgreed"}
    assert (await hand_in(served, {one: full, others[0]: 1})).json() == {
        "accepted": 2, "repeated": 0, "late": {},
    }  # fmt: skip
    left, _ = await unscored(served)
    assert sorted(record["id"] for record in left) == others[1:]
    assert (await hand_in(served, dict.fromkeys(others[1:], 0.25))).json()["accepted"] == 2
    ended = await trajectories(served)
    assert {id: record["reward"] for id, record in ended.items()} == {
        one: 0.5, others[0]: 1.0, others[1]: 0.25, others[2]: 0.25,
    }  # fmt: skip
    assert ended[one]["reward_components"] == {"style": -1.5, "length": 2.0}
    assert (ended[one]["reward_reason"], ended[one]["status"]) == ("JudgeAgreed", "succeeded")
    groups = (await served.admin.get(f"{PATH}/groups")).content.splitlines()
    assert {(g["group_id"], g["informative"]) for g in map(json.loads, groups)} == {("a", True), ("b", False)}
    job = (await served.admin.get(PATH)).json()["status"]
    assert job["rewardMean"] == 0.5
    assert "completionTime" in job, "the closed stream has ended"
    assert (await unscored(served))[1]["rollyard-finished"] == "true"


async def test_the_same_reward_is_a_repeat_and_another_one_a_conflict(served: Any) -> None:
    await submit(served, "a", "b", "c")
    one, two, three = await play(served)
    full = {"reward": 0.1 + 0.2, "components": {"style": 1e-300}, "reason": "JudgeAgreed"}
    assert (await hand_in(served, {one: full})).json()["accepted"] == 1
    before = await trajectories(served)
    again = await hand_in(served, {one: full, two: 1.0})
    assert again.json() == {"accepted": 1, "repeated": 1, "late": {}}
    for other in (0.1 + 0.2, full | {"components": {}}, full | {"reason": ""}, full | {"reward": 0.3}):
        refused = await hand_in(served, {three: 1.0, one: other})
        assert (refused.status_code, refused.json()["reason"]) == (409, "RewardDiffers")
        assert refused.json()["errors"] == [
            f"rewards.{one}: the rollout has the reward {0.1 + 0.2!r} already"
        ]
    await served.plane.flush()
    assert (await hand_in(served, {one: full})).json()["repeated"] == 1, "the same once it is in the store"
    assert (await trajectories(served))[one] == before[one]
    assert [record["id"] for record in (await unscored(served))[0]] == [three], "nothing of a refusal is kept"


BAD: list[tuple[Any, str, str]] = [
    (1e6 + 1, "", "must be a finite number from -1,000,000 to 1,000,000"),
    ("1", "", "must be a finite number"),
    (True, "", "must be a finite number"),
    (None, "", "must be a finite number"),
    ({"reward": 1.0, "components": {"a": -1e7}}, ".components.a", "must be a finite number"),
    ({"reward": 1.0, "components": {"overlong": 0.0}}, ".components.overlong", "must not be one of"),
    ({"reward": 1.0, "components": {"no name": 0.0}}, ".components.no name", ""),
    ({"reward": 1.0, "reason": "two words"}, ".reason", ""),
    ({"reward": 1.0, "fence": -1}, ".fence", ""),
    ({"reward": 1.0, "weights": {}}, ".weights", ""),
    ({}, ".reward", ""),
]
"""Rewards that are refused, the field of the rollout's entry that the error names, and what it says."""


async def test_bad_rewards_are_refused_by_name(served: Any) -> None:
    await submit(served, "a", "b")
    one, two = await play(served)
    for reward, field, says in BAD:
        refused = await hand_in(served, {one: 1.0, two: reward})
        assert refused.status_code == 422, refused.text
        (error,) = refused.json()["errors"]
        assert error.startswith(f"rewards.{two}{field}"), error
        assert says in error
    assert len((await unscored(served))[0]) == 2, "all or nothing"


async def test_numbers_that_json_lacks_and_too_many_rewards_are_refused(served: Any) -> None:
    await submit(served, "a")
    (one,) = await play(served)
    for value in (float("nan"), float("inf"), float("-inf")):
        data = msgpack.packb({"rewards": {one: value}})
        kind = {"Content-Type": "application/msgpack"}
        refused = await served.admin.post(f"{PATH}/rewards", content=data, headers=kind)
        assert (refused.status_code, f"rewards.{one}" in refused.text) == (422, True), refused.text
    for many in ({}, {f"r{i}": 0.0 for i in range(1001)}):
        refused = await hand_in(served, many)
        assert (refused.status_code, refused.json()["errors"][0].split(":")[0]) == (422, "rewards")


async def test_only_rollouts_of_this_job_that_wait_take_rewards(served: Any) -> None:
    await submit(served, "a", "b", "c")
    await submit(served, "a", name="other")
    await served.submit("evaluated")
    worker = Worker(served.worker)
    begun = (await worker.lease(init=1, job="job"))[0]["rollout"]
    (lease,) = await worker.lease(init=1, job="job")
    await worker.complete(worker.result(lease))
    (running,) = await worker.lease(run=1, job="job")
    (theirs,) = await worker.lease(init=1, job="other")
    (evaluated,) = await worker.lease(init=1, job="evaluated")
    for ids, status, reason in (
        ([begun], 409, "RolloutNotWaiting"),
        ([running["rollout"]], 409, "RolloutNotWaiting"),
        (["nobody"], 404, "RolloutNotFound"),
        ([theirs["rollout"], begun], 404, "RolloutNotFound"),
        ([evaluated["rollout"]], 404, "RolloutNotFound"),
    ):
        refused = await hand_in(served, dict.fromkeys(ids, 1.0))
        assert (refused.status_code, refused.json()["reason"]) == (status, reason)
        assert refused.json()["errors"][0].startswith(f"rewards.{ids[0]}: ")
    refused = await hand_in(served, {evaluated["rollout"]: 1.0}, name="evaluated")
    assert (refused.status_code, refused.json()["reason"]) == (409, "NotRewardedByTrainer")
    refused = await served.admin.get("/v1/rolloutjobs/evaluated/unscored")
    assert (refused.status_code, refused.json()["reason"]) == (409, "NotRewardedByTrainer")
    refused = await hand_in(served, {begun: 1.0}, namespace="team")
    assert (refused.status_code, refused.json()["reason"]) == (404, "JobNotFound")


async def test_a_cursor_yields_each_rollout_once_and_wakes(served: Any) -> None:
    await submit(served, "a", "b")
    worker = Worker(served.worker)
    leases = await worker.lease(init=2)
    await worker.complete(*map(worker.result, leases))
    first, second = await worker.lease(run=2)
    await worker.complete(worker.result(second))
    seen, headers = await unscored(served)
    assert [record["id"] for record in seen] == [second["rollout"]]
    poll = asyncio.create_task(unscored(served, headers["rollyard-cursor"], wait=30))
    await served.until_waiting()
    await worker.complete(worker.result(first))
    late, headers = await poll
    assert [record["id"] for record in late] == [first["rollout"]]
    none, after = await unscored(served, headers["rollyard-cursor"])
    assert (none, after["rollyard-cursor"]) == ([], headers["rollyard-cursor"])
    page, headers = await unscored(served, limit=1)
    assert [record["id"] for record in page] == [second["rollout"]], "a new trainer begins with the first"
    for kind, status in (("application/vnd.apache.parquet", 422), ("application/msgpack", 200)):
        answer = await served.admin.get(f"{PATH}/unscored", headers={"Accept": kind})
        assert answer.status_code == status
    assert [record["status"] for record in msgpack.unpackb(answer.content)] == ["unscored"] * 2
    wrong = await served.admin.get(f"{PATH}/unscored", params={"cursor": "v1.t.x.1"})
    assert (wrong.status_code, wrong.json()["reason"]) == (400, "CursorInvalid")


async def test_the_sandbox_is_nobodys_once_run_is_over(served: Any) -> None:
    await submit(served, "a")
    worker = Worker(served.worker)
    (lease,) = await worker.lease(init=1)
    await worker.complete(worker.result(lease))
    sandbox = f"sb-{lease['rollout']}-{lease['token']}"
    (lease,) = await worker.lease(run=1)
    assert (await worker.heartbeat(lease, sandboxes=[sandbox]))["orphans"] == []
    await worker.complete(worker.result(lease))
    assert (await worker.heartbeat(sandboxes=[sandbox]))["orphans"] == [sandbox]


async def test_a_worker_evaluates_none_of_them(served: Any) -> None:
    await submit(served, "a")
    worker = Worker(served.worker)
    for stage in ("init", "run"):
        (lease,) = await worker.lease(**{stage: 1})
        await worker.complete(worker.result(lease))
    for token in (lease["token"], lease["token"] + 1):
        forged = {"rollout": lease["rollout"], "token": token, "stage": "eval", "reward": 1.0}
        assert await worker.complete(forged) in (["stale"], ["repeated"])
        assert await worker.fail(lease | {"token": token, "stage": "eval"}) == "stale"
    assert (await unscored(served))[0][0]["id"] == lease["rollout"]


async def test_a_reward_that_never_comes_ends_the_wait(served: Any) -> None:
    limit = {"trainer": {"timeoutSeconds": 100}}
    await submit(served, "a", samplesPerTask=2, minGroupSize=1, reward=limit, close=True)
    one, two = await play(served)
    assert (await hand_in(served, {one: 1.0})).json()["accepted"] == 1
    sweep = partial(sweeps.end_unrewarded, not_before=0.0)
    assert await served.later(99, sweep) == 0
    assert await served.later(101, partial(sweeps.end_unrewarded, not_before=1e12)) == 0, "just started"
    assert await served.later(101, sweep) == 1
    failed = (await trajectories(served))[two]
    assert (failed["status"], failed["reward"], failed["reason"]) == ("failed", None, "RewardNotGiven")
    assert "within 100 s: call client.rewards" in failed["message"]
    assert (await hand_in(served, {two: 1.0, one: 1.0})).json() == {
        "accepted": 0, "repeated": 1, "late": {two: "RewardNotGiven"},
    }  # fmt: skip
    (group,) = map(json.loads, (await served.admin.get(f"{PATH}/groups")).content.splitlines())
    assert [member["id"] for member in group["trajectories"]] == [one], "minGroupSize allows it"
    job = (await served.admin.get(PATH)).json()["status"]
    assert (job["counts"]["failed"], "completionTime" in job) == (1, True)


async def test_a_long_wait_is_mentioned(served: Any) -> None:
    await submit(served, "a", "b")
    await play(served)
    assert "advice" not in (await served.admin.get(PATH)).json()["status"]

    def age(tx: Transaction) -> None:
        tx.conn.execute(sa.update(rollouts).values(since=rollouts.c.since - 1000.0))

    await served.plane.database.write(age)
    (advice,) = (await served.admin.get(PATH)).json()["status"]["advice"]
    assert advice["reason"] == "RewardsAwaited"
    assert advice["message"].startswith("rollouts that wait for the trainer's rewards: 2, the first for 1,00")
    (row,) = (await served.admin.get("/v1/jobs")).json()["items"]
    assert row["waits_for"]["reason"] == "RewardsAwaited"
    assert row["stages"]["eval"]["queued"] == 2


@pytest.mark.parametrize("how", ["rollout", "group", "job", "deadline", "delete"])
async def test_what_waits_is_cancelled_like_everything_else(served: Any, how: str) -> None:
    await submit(served, "a", "b", activeDeadlineSeconds=3600)
    one, two = await play(served)
    match how:
        case "rollout" | "group":
            target = {"rollout": one} if how == "rollout" else {"group": "a"}
            assert (await served.admin.post(f"{PATH}/cancel", json=target)).status_code == 200
            assert (await hand_in(served, {one: 1.0, two: 1.0})).json() == {
                "accepted": 1, "repeated": 0, "late": {one: "Cancelled"},
            }  # fmt: skip
            return
        case "job":
            assert (await served.admin.post(f"{PATH}/cancel", json={})).status_code == 200
        case "deadline":
            patch = await served.driver.put(f"{PATH}/status", json={"phase": "Run", "conditions": [
                {"type": "Admitted", "status": "True", "reason": "Admitted", "message": "",
                 "lastTransitionTime": "2020-01-01T00:00:00Z"}]})  # fmt: skip
            assert patch.status_code == 200, patch.text
            await served.later(7200, jobs.enforce)
            await served.plane.sweep()
        case "delete":
            assert (await served.admin.delete(PATH)).status_code == 202
            await served.plane.flush()
            await served.plane.sweep()
            refused = await hand_in(served, {one: 1.0})
            assert (refused.status_code, refused.json()["reason"]) == (404, "JobNotFound")
            query = sa.select(sa.func.count()).select_from(payloads)
            assert await served.plane.database.read(lambda conn: conn.execute(query).scalar_one()) == 0
            return
    late = (await hand_in(served, {one: 1.0, two: 1.0})).json()["late"]
    assert set(late) == {one, two}
    assert (await unscored(served))[0] == []
    assert (await served.counts())["cancelled"] == 2


async def test_dynamic_sampling_decides_by_the_trainers_rewards(served: Any) -> None:
    sampling = {"targetGroups": 1, "maxInFlightGroups": 1, "metric": "style", "minStd": 0.1}
    await submit(served, "a", "b", "c", samplesPerTask=2, dynamicSampling=sampling)
    step = await served.admin.post(f"{PATH}/targets", json={"id": "1"})
    assert step.status_code == 201, step.text
    alike = await play(served)
    assert len(alike) == 2, "one group is in flight"
    await hand_in(served, {id: {"reward": n, "components": {"style": 1.0}} for n, id in enumerate(alike)})
    differing = await play(served)
    await hand_in(served, {id: {"reward": 0.0, "components": {"style": n}} for n, id in enumerate(differing)})
    counts = (await served.admin.get(PATH)).json()["status"]["dynamicSampling"]
    assert (counts["informativeGroups"], counts["uninformativeGroups"]) == (1, 1)
    assert await play(served) == [], "the step is met"


async def test_surplus_is_late_when_the_target_is_met(served: Any) -> None:
    sampling = {"targetGroups": 1, "maxInFlightGroups": 2}
    await submit(served, "a", "b", samplesPerTask=2, dynamicSampling=sampling)
    await served.admin.post(f"{PATH}/targets", json={"id": "1"})
    ids = await play(served)
    assert (await served.admin.post(f"{PATH}/close", json={})).status_code == 200
    # Both groups are in one call: the first one meets the target, and what was taken is kept.
    assert (await hand_in(served, {id: float(n % 2) for n, id in enumerate(ids[:2])})).json()["accepted"] == 2
    late = await hand_in(served, dict.fromkeys(ids[2:], 1.0))
    assert late.json() == {"accepted": 0, "repeated": 0, "late": dict.fromkeys(ids[2:], "TargetMet")}


async def test_a_trainer_that_gives_no_rewards_cannot_push_for_ever(settings: Settings) -> None:
    async with serving(settings, max_unread=2) as served:
        await submit(served, "a", "b")
        ids = await play(served)
        refused = await push(served, "c")
        assert (refused.status_code, refused.json()["reason"]) == (409, "RewardsAwaited")
        await hand_in(served, {ids[0]: 1.0})
        assert (await push(served, "c")).json() == {"accepted": 1, "repeated": 0}


@pytest.fixture
async def stale(settings: Settings) -> AsyncIterator[Any]:
    """Yield a control plane with a pool, whose weights the test updates."""
    async with serving(settings, weights_seconds=3600.0) as served:
        manifest = {
            "apiVersion": "rollyard.dev/v1alpha1",
            "kind": "BackendPool",
            "metadata": {"name": "pool"},
        }
        made = await served.admin.post("/v1/backendpools", json=manifest | {"spec": {"model": "tiny"}})
        assert made.status_code == 201, made.text
        await served.report_backends("http://b:8000")
        yield served


async def new_weights(served: Any, index: int) -> int:
    def op(tx: Transaction) -> int:
        tx.conn.execute(sa.update(pools).values(policy_index=index))
        tx.conn.execute(sa.update(backends).values(policy_index=index, weights="Current"))
        return staleness.enforce(tx, "default", "pool")

    count: int = await served.plane.database.write(op)
    return count


OF_POOL: dict[str, Any] = {"backendRef": {"name": "pool"}, "agent": {"type": "tools"}, "maxPolicyLag": 0}


async def test_a_reward_for_an_earlier_run_never_goes_to_the_next_one(stale: Any) -> None:
    await submit(stale, "a", **OF_POOL)
    (one,) = await play(stale)
    before = (await unscored(stale))[0][0]["fence"]
    refused = await hand_in(stale, {one: 1.0})
    assert (refused.status_code, refused.json()["reason"]) == (422, "FenceMissing")
    assert refused.json()["errors"][0].startswith(f"rewards.{one}.fence: is required")
    assert await new_weights(stale, 1) == 1
    reward = {"reward": 1.0, "fence": before}
    again = {"accepted": 0, "repeated": 0, "late": {one: "PlaysAgain"}}
    assert (await hand_in(stale, {one: reward})).json() == again, "it waits for Init"
    assert await play(stale) == [one]
    (record,), _ = await unscored(stale)
    assert record["fence"] > before
    assert [attempt["reason"] for attempt in record["attempts"]] == ["PolicyTooStale"]
    assert (await hand_in(stale, {one: reward})).json() == again, (
        "the reward is for what nobody sees any more"
    )
    refused = await hand_in(stale, {one: {"reward": 1.0, "fence": record["fence"] + 1}})
    assert (refused.status_code, refused.json()["reason"]) == (409, "RolloutNotWaiting")
    assert (await hand_in(stale, {one: {"reward": 0.5, "fence": record["fence"]}})).json()["accepted"] == 1
    assert (await trajectories(stale))[one]["reward"] == 0.5
    assert (await hand_in(stale, {one: reward})).json() == again


async def test_stale_rollouts_that_wait_are_cancelled_where_the_job_says_so(stale: Any) -> None:
    await submit(stale, "a", staleRollouts="Cancel", **OF_POOL)
    (one,) = await play(stale)
    assert await new_weights(stale, 1) == 1
    assert (await hand_in(stale, {one: 1.0})).json()["late"] == {one: "PolicyTooStale"}


async def test_a_restart_loses_nothing(settings: Settings) -> None:
    async with serving(settings) as served:
        await submit(served, "a", "b")
        one, two = await play(served)
        before, headers = await unscored(served, limit=1)
        await hand_in(served, {one: 1.0})
    async with serving(settings) as served:
        assert (await hand_in(served, {one: 1.0})).json()["repeated"] == 1
        after, _ = await unscored(served, headers["rollyard-cursor"])
        waiting, _ = await unscored(served)
        assert [record["id"] for record in waiting] == [two]
        assert {record["id"] for record in (*before, *after)} >= {two}
        assert await play(served) == [], "nothing is played again"
        assert (await hand_in(served, {two: 0.0})).json()["accepted"] == 1


async def test_two_trainers_at_once_give_one_reward(served: Any) -> None:
    await submit(served, "a")
    (one,) = await play(served)
    answers = await asyncio.gather(*(hand_in(served, {one: float(n)}) for n in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    assert (await served.counts())["succeeded"] == 1


async def test_batch_jobs_are_refused_with_all_three_ways(served: Any) -> None:
    refused = await served.admin.post("/v1/rolloutjobs", json=make_manifest(handler="unscored"))
    assert refused.status_code == 422
    for word in ("reward.function", "reward.service", "client.rewards", "tasks.stream: true"):
        assert word in refused.json()["detail"]
