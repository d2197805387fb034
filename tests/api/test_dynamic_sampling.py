"""Jobs with dynamic sampling: groups without a signal are replaced until the target is met."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from rollyard_api.jobs import jobs
from rollyard_api.rollouts import transitions
from rollyard_api.storage.schema import dynamic_sampling, sampling_targets
from rollyard_crds.fields.dynamic_sampling import MIN_STD
from rollyard_crds.fields.signals import has_signal
from rollyard_testing.api.plane import Worker, make_manifest, read_pages, serving

PATH = "/v1/rolloutjobs/job"


def tasks_of(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"id": f"t{first + i}", "prompt": "p"} for i in range(count)]


@pytest.fixture
def dapo() -> Callable[..., dict[str, Any]]:
    """Return a maker of manifests: `dapo(6, targetGroups=2)` has six tasks of two samples."""

    def make(count: int, *, stream: bool = False, samples: int = 2, **sampling: Any) -> dict[str, Any]:
        source = {"stream": True} if stream else {"inline": tasks_of(count)}
        made: dict[str, Any] = make_manifest(
            tasks=source, samplesPerTask=samples, dynamicSampling={"maxInFlightGroups": 2, **sampling}
        )
        return made

    return make


async def status_of(http: Any) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get(PATH)).json()["status"]
    return found


async def groups_of(http: Any, **query: Any) -> list[dict[str, Any]]:
    answer = await http.get(f"{PATH}/groups", params=query)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.content.splitlines()]


def mixed(*informative: str) -> Callable[[dict[str, Any]], float]:
    """Return rewards that differ within these tasks' groups only."""
    return lambda lease: float(lease["sample_index"] % 2) if lease["group_id"] in informative else 0.0


async def begin(worker: Any, count: int) -> list[dict[str, Any]]:
    """Take `count` rollouts through Init and Run, and return their Eval leases."""
    leases = await worker.reach("eval", count)
    assert len(leases) == count
    return list(leases)


async def finish_group(worker: Any, leases: list[dict[str, Any]], task: str, *rewards: float) -> None:
    """Give the rollouts of one group these rewards."""
    own = sorted((x for x in leases if x["group_id"] == task), key=lambda x: int(x["sample_index"]))
    results = [worker.result(x, reward=reward) for x, reward in zip(own, rewards, strict=True)]
    assert set(await worker.complete(*results)) == {"accepted"}


async def test_groups_are_filtered_and_refilled_until_the_target(served: Any, dapo: Any) -> None:
    assert (await served.admin.post("/v1/rolloutjobs", json=dapo(9, targetGroups=2))).status_code == 201
    told = await status_of(served.admin)
    assert (told["counts"]["total"], told["counts"]["init"]["queued"]) == (4, 4), "two groups are in flight"
    worker = Worker(served.worker)
    evaluations = await begin(worker, 4)
    await finish_group(worker, evaluations, "t0", 0.5, 0.5)
    told = (await status_of(served.admin))["dynamicSampling"]
    assert told == {
        "targetGroups": 2,
        "informativeGroups": 0,
        "uninformativeGroups": 1,
        "droppedGroups": 0,
        "surplusGroups": 0,
        "inFlightGroups": 2,
        "waitingGroups": 6,
        "surplusRollouts": 0,
        "discardedTokens": 4,
    }
    # The group that ended made room for the next one at once, while its neighbour is not done.
    (left, right) = await worker.lease(init=16)
    assert {left["group_id"], right["group_id"]} == {"t2"}
    await finish_group(worker, evaluations, "t1", 0.0, 1.0)
    more = await worker.lease(init=16)
    assert {lease["group_id"] for lease in more} == {"t3"}
    assert await worker.complete(worker.result(left), worker.result(right)) == ["accepted"] * 2
    (first, second) = await worker.lease(run=2)
    assert await worker.complete(worker.result(first), worker.result(second)) == ["accepted"] * 2
    # The target is met, while the rollouts of another group are in Init, with the leases in `more`.
    await finish_group(worker, await worker.lease(eval=2), "t2", 1.0, 0.0)
    beat = await worker.heartbeat(*more)
    assert sorted(x["rollout"] for x in beat["cancelled"]) == sorted(x["rollout"] for x in more)
    assert await worker.lease(init=16, run=16, eval=16) == []
    assert await worker.complete(worker.result(more[0])) == ["cancelled"]
    document = (await served.admin.get(PATH)).json()
    assert document["metadata"]["annotations"]["rollyard.dev/cancel-reason"] == "TargetMet"
    told = document["status"]
    assert "completionTime" in told
    assert (told["counts"]["total"], told["counts"]["succeeded"], told["counts"]["cancelled"]) == (8, 6, 2)
    assert told["dynamicSampling"] == {
        "targetGroups": 2,
        "informativeGroups": 2,
        "uninformativeGroups": 1,
        "droppedGroups": 0,
        "surplusGroups": 1,
        "inFlightGroups": 0,
        "waitingGroups": 5,
        "surplusRollouts": 2,
        "discardedTokens": 4,
    }
    found = await groups_of(served.admin, informative=True)
    assert [(g["group_id"], len(g["trajectories"]), g["informative"]) for g in found] == [
        ("t1", 2, True),
        ("t2", 2, True),
    ]
    dropped = {g["group_id"]: g["reason"] for g in await groups_of(served.admin, dropped=True)}
    assert dropped == {"t0": "", "t1": "", "t2": "", "t3": "TargetMet"}
    ended = (await served.admin.get(f"{PATH}/rollouts", params={"status": "cancelled"})).json()["items"]
    assert {item["reason"] for item in ended} == {"TargetMet"}


async def test_a_jobs_target_and_counters_are_its_own(served: Any, dapo: Any) -> None:
    """The groups of two jobs have the same numbers, and those of one decide nothing about the other."""
    other, worker = "/v1/rolloutjobs/other", Worker(served.worker)
    first = dapo(6, targetGroups=1)
    first["metadata"]["name"] = "other"
    await served.admin.post("/v1/rolloutjobs", json=first)
    await served.admin.post("/v1/rolloutjobs", json=dapo(6, targetGroups=1))
    before = (await served.admin.get(other)).json()["status"]
    evaluations = []
    for stage in ("init", "run", "eval"):
        evaluations = await worker.lease(job="job", **{stage: 4})
        if stage != "eval":
            await worker.complete(*[worker.result(lease) for lease in evaluations])
    assert {lease["job"] for lease in evaluations} == {"job"}
    await finish_group(worker, evaluations, "t0", 0.5, 0.5)
    await finish_group(worker, evaluations, "t1", 0.0, 1.0)
    assert "completionTime" in await status_of(served.admin)
    document = (await served.admin.get(other)).json()
    assert document["status"] == before, "nothing was started, counted or cancelled there"
    assert "rollyard.dev/cancel-reason" not in document["metadata"].get("annotations", {})
    leases = await worker.lease(job="other", init=16)
    assert len(leases) == 4, "and its rollouts may begin"
    assert (await worker.heartbeat(*leases))["cancelled"] == []


async def test_a_member_that_a_trainer_cancelled_leaves_the_group_to_the_others(
    served: Any, dapo: Any
) -> None:
    await served.admin.post("/v1/rolloutjobs", json=dapo(3, samples=3, targetGroups=2, maxInFlightGroups=3))
    worker = Worker(served.worker)
    evaluations = await begin(worker, 9)
    of = {task: [x for x in evaluations if x["group_id"] == task] for task in ("t0", "t1", "t2")}
    for lease in (of["t0"][0], of["t1"][0], of["t2"][0]):
        await served.admin.post(f"{PATH}/cancel", json={"rollout": lease["rollout"]})
    await worker.complete(*[worker.result(x, reward=float(i)) for i, x in enumerate(of["t0"][1:])])
    assert await worker.fail(of["t1"][1], "SandboxLost", retryable=False) == "accepted"
    await worker.complete(worker.result(of["t1"][2], reward=1.0))
    await served.admin.post(f"{PATH}/cancel", json={"group": "t2"})
    found = {g["group_id"]: g for g in await groups_of(served.admin, dropped=True)}
    told = {task: (g["delivered"], g["reason"], len(g["trajectories"])) for task, g in found.items()}
    assert told == {"t0": (True, "", 2), "t1": (False, "TooFewRewards", 0), "t2": (False, "Cancelled", 0)}
    sampling = (await status_of(served.admin))["dynamicSampling"]
    counts = [sampling[f"{kind}Groups"] for kind in ("informative", "uninformative", "dropped", "surplus")]
    assert (counts, sampling["surplusRollouts"]) == ([1, 0, 2, 0], 0)


async def test_a_surplus_group_is_not_delivered_however_many_members_have_a_reward(
    served: Any, dapo: Any
) -> None:
    await served.admin.post("/v1/rolloutjobs", json=dapo(2, samples=3, targetGroups=1))
    worker = Worker(served.worker)
    evaluations = await begin(worker, 6)
    ready = [x for x in evaluations if x["group_id"] == "t1"][:2]
    await worker.complete(*[worker.result(x, reward=float(i)) for i, x in enumerate(ready)])
    assert (await status_of(served.admin))["dynamicSampling"]["informativeGroups"] == 0
    await finish_group(worker, evaluations, "t0", 0.0, 1.0, 1.0)
    told = (await status_of(served.admin))["dynamicSampling"]
    assert (told["surplusGroups"], told["surplusRollouts"], told["discardedTokens"]) == (1, 1, 6)
    assert [g["group_id"] for g in await groups_of(served.admin, informative=True)] == ["t0"]


@pytest.mark.parametrize(("tasks", "most"), [(3, None), (9, 3)])
async def test_a_target_that_cannot_be_met_ends_the_job(
    served: Any, dapo: Any, tasks: int, most: int | None
) -> None:
    limit = {} if most is None else {"maxGroups": most}
    await served.admin.post("/v1/rolloutjobs", json=dapo(tasks, targetGroups=2, **limit))
    worker = Worker(served.worker)
    assert await worker.finish_all(mixed("t1")) == 6, "all groups that may start are tried"
    document = (await served.admin.get(PATH)).json()
    assert document["metadata"]["annotations"]["rollyard.dev/cancel-reason"] == "TargetNotMet"
    told = document["status"]
    assert "completionTime" in told
    assert (told["counts"]["total"], told["counts"]["cancelled"]) == (6, 0)
    sampling = told["dynamicSampling"]
    assert (sampling["informativeGroups"], sampling["uninformativeGroups"]) == (1, 2)
    assert sampling["waitingGroups"] == tasks - 3
    assert [g["group_id"] for g in await groups_of(served.admin, informative=True)] == ["t1"]
    assert len(await groups_of(served.admin)) == 3


async def test_a_component_and_a_threshold_decide(served: Any, dapo: Any) -> None:
    manifest = dapo(5, targetGroups=1, maxInFlightGroups=5, metric="exit_zero", minStd=0.25)
    await served.admin.post("/v1/rolloutjobs", json=manifest)
    worker = Worker(served.worker)
    evaluations = await begin(worker, 10)
    # The rewards differ in each group. The component is missing, missing in one, equal, too close, different.
    components = {"t0": ({}, {"other": 1}), "t1": ({"exit_zero": 1}, {"other": 1})}
    components |= {"t2": ({"exit_zero": 1}, {"exit_zero": 1}), "t3": ({"exit_zero": 0.0}, {"exit_zero": 0.5})}
    components["t4"] = ({"exit_zero": 0.0}, {"exit_zero": 0.51})
    informative = []
    for task, given in components.items():
        own = sorted((x for x in evaluations if x["group_id"] == task), key=lambda x: x["sample_index"])
        pairs = enumerate(zip(own, given, strict=True))
        results = [worker.result(x, reward=float(i), reward_components=c) for i, (x, c) in pairs]
        assert await worker.complete(*results) == ["accepted"] * 2
        informative.append((await status_of(served.admin))["dynamicSampling"]["informativeGroups"])
    assert informative == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("values", "least", "expected"),
    [
        ([], 0.0, False),
        ([1.0], 0.0, False),
        ([0.1] * 7, 0.0, False),
        # The same weighted sums, rounded in another order.
        ([0.3, 0.1 + 0.2], MIN_STD, False),
        ([0.3, 0.1 + 0.2], 0.0, True),
        ([0.0, 0.1 + 0.2 - 0.3], MIN_STD, False),
        ([1e6, math.nextafter(1e6, 0)], MIN_STD, False),
        ([0.0, 2e-9], MIN_STD, False),
        ([0.0, 3e-9], MIN_STD, True),
        ([1e6, 1e6 - 1e-4], MIN_STD, True),
        ([0.0, 1e-9], 1e-6, False),
        ([0.0, 1.0], 0.5, False),
        ([0.0, 1.0], 0.499, True),
        ([-1e308, 1e308], 0.0, True),
    ],
)
def test_signal(values: list[float], least: float, expected: bool) -> None:
    assert has_signal(values, least) is expected


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"targetGroups": 4}, "targetGroups: must be at most 3, "),
        ({"targetGroups": 3, "minStd": 0.5}, "minStd: must be less than 0.5, "),
        ({"targetGroups": 3, "metric": "exit_cero"}, "metric: there is no component 'exit_cero'; there are "),
    ],
)
async def test_a_target_that_is_out_of_reach_is_refused_before_anything_starts(
    served: Any, dapo: Any, wrong: dict[str, Any], field: str
) -> None:
    manifest = dapo(3, **wrong)
    owned = manifest | {"metadata": {"name": "job", "annotations": {"rollyard.dev/object-uid": "u1"}}}
    for refused in (
        await served.admin.post("/v1/rolloutjobs", json=manifest),
        await served.driver.put(PATH, json={"manifest": owned}),
    ):
        assert (refused.status_code, refused.json()["reason"]) == (422, "TargetOutOfReach"), refused.text
        (problem,) = refused.json()["errors"]
        assert problem.startswith(f"spec.dynamicSampling.{field}")
    assert (await served.admin.get(PATH)).status_code == 404
    manifest["spec"]["tasks"] |= {"epochs": 2}
    manifest["spec"]["dynamicSampling"] = {"targetGroups": 6, "minStd": 0.49, "metric": "exit_zero"}
    made = await served.admin.post("/v1/rolloutjobs", json=manifest)
    assert made.status_code == 201, "each task is a group in each epoch"


async def test_a_stream_may_want_more_groups_and_says_what_it_waits_for(served: Any, dapo: Any) -> None:
    made = await served.admin.post("/v1/rolloutjobs", json=dapo(0, stream=True, targetGroups=9))
    assert made.status_code == 201, made.text
    # What the driver says of it is also in the list of all jobs.
    said = {"phase": "Pending", "conditions": [], "message": "no task is left"}
    assert (await served.driver.put(f"{PATH}/status", json=said)).status_code == 200
    (row,) = (await served.viewer.get("/v1/jobs")).json()["items"]
    assert row["waits_for"] == {"reason": "NoTasks", "message": "no task is left"}


async def test_rewards_that_differ_by_rounding_are_no_signal_without_dynamic_sampling(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=2))
    worker = Worker(served.worker)
    evaluations = await begin(worker, 4)
    await finish_group(worker, evaluations, "t0", 0.3, 0.1 + 0.2)
    await finish_group(worker, evaluations, "t1", 0.3, 0.3001)
    assert [g["group_id"] for g in await groups_of(served.admin, informative=True)] == ["t1"]


async def test_an_infrastructure_failure_is_no_signal(served: Any, dapo: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=dapo(3, samples=3, targetGroups=1, maxInFlightGroups=3))
    worker = Worker(served.worker)
    evaluations = await begin(worker, 9)
    rewards = {"t0": (0.0, 0.0), "t1": (1.0,), "t2": (0.0, 1.0)}
    told = []
    for task, given in rewards.items():
        own = [x for x in evaluations if x["group_id"] == task]
        for lease in own[len(given) :]:
            assert await worker.fail(lease, "SandboxLost", retryable=False) == "accepted"
        results = [worker.result(x, reward=reward) for x, reward in zip(own, given, strict=False)]
        await worker.complete(*results)
        sampling = (await status_of(served.admin))["dynamicSampling"]
        told.append(tuple(sampling[f"{kind}Groups"] for kind in ("informative", "uninformative", "dropped")))
    # Two equal rewards are no signal, one reward is too few, and two that differ are a signal.
    assert told == [(0, 1, 0), (0, 1, 1), (1, 1, 1)]
    (group,) = await groups_of(served.admin, informative=True)
    assert (group["group_id"], len(group["trajectories"])) == ("t2", 2)


async def open_step(http: Any, manifest: dict[str, Any], tasks: int) -> None:
    """Create a stream with this number of tasks, and open its first step, "a"."""
    await http.post("/v1/rolloutjobs", json=manifest)
    await http.post(f"{PATH}/tasks", json={"tasks": tasks_of(tasks)})
    await http.post(f"{PATH}/targets", json={"id": "a"})


async def test_the_steps_of_a_stream(served: Any, dapo: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=dapo(0, stream=True, targetGroups=1))
    worker = Worker(served.worker)
    await served.admin.post(f"{PATH}/tasks", json={"tasks": tasks_of(5)})
    assert (await status_of(served.admin))["counts"]["total"] == 0, "no step is open"
    assert await worker.lease(init=16) == []

    opened = await served.admin.post(f"{PATH}/targets", json={"id": "step-1"})
    assert opened.status_code == 201
    assert opened.json() == {"id": "step-1", "groups": 1, "goal": 1, "met": False, "opened": True}
    evaluations = await begin(worker, 4)
    await finish_group(worker, evaluations, "t0", 0.0, 1.0)
    again = await served.admin.post(f"{PATH}/targets", json={"id": "step-1", "groups": 1})
    assert again.status_code == 200
    assert again.json() == {"id": "step-1", "groups": 1, "goal": 1, "met": True, "opened": False}

    # The step is met. Nothing was cancelled, and t1, which has begun, may continue; nothing else begins.
    told = await status_of(served.admin)
    assert told["counts"]["cancelled"] == 0
    assert told["dynamicSampling"]["inFlightGroups"] == 1
    assert (await worker.heartbeat(*[x for x in evaluations if x["group_id"] == "t1"]))["cancelled"] == []
    (kept, failed) = [x for x in evaluations if x["group_id"] == "t1"]
    assert await worker.fail(failed, "SandboxLost", return_to="init") == "accepted"
    assert await worker.complete(worker.result(kept, reward=0.0)) == ["accepted"]
    assert await worker.lease(init=16, run=16, eval=16) == [], "a rollout at Init begins in the next step"

    opened = await served.admin.post(f"{PATH}/targets", json={"id": "step-2", "groups": 2})
    assert (opened.json()["goal"], opened.json()["met"]) == (3, False)
    first = (await served.admin.post(f"{PATH}/targets", json={"id": "step-1"})).json()
    assert (first["goal"], first["met"]) == (1, True), "an earlier step keeps its own goal"
    assert (await status_of(served.admin))["dynamicSampling"]["inFlightGroups"] == 2
    await worker.finish_all(mixed("t1", "t2", "t3"))
    told = await status_of(served.admin)
    # The rest of t1 was sampled in the second step, for which the whole group counts.
    assert [g["group_id"] for g in await groups_of(served.admin, informative=True)][:2] == ["t0", "t1"]
    assert told["dynamicSampling"]["informativeGroups"] >= 3
    assert "completionTime" not in told

    before = told["dynamicSampling"]
    await served.admin.post(f"{PATH}/close")
    told = await status_of(served.admin)
    assert "completionTime" in told
    assert told["dynamicSampling"]["inFlightGroups"] == 0
    assert told["dynamicSampling"]["surplusGroups"] == before["inFlightGroups"]
    refused = await served.admin.post(f"{PATH}/targets", json={"id": "step-3"})
    assert (refused.status_code, refused.json()["reason"]) == (409, "JobCancelled")
    assert (await served.admin.post(f"{PATH}/targets", json={"id": "step-2", "groups": 2})).status_code == 200


async def test_a_step_lets_go_on_what_has_begun_though_no_further_group_is_there(
    served: Any, dapo: Any
) -> None:
    await open_step(served.admin, dapo(0, stream=True, targetGroups=1), 2)
    worker = Worker(served.worker)
    evaluations = await begin(worker, 4)
    await finish_group(worker, evaluations, "t0", 0.0, 1.0)
    (kept, failed) = [x for x in evaluations if x["group_id"] == "t1"]
    assert await worker.fail(failed, "SandboxLost", return_to="init") == "accepted"
    assert await worker.lease(init=4) == [], "the step is met"
    await served.admin.post(f"{PATH}/targets", json={"id": "b"})
    (again,) = await worker.lease(init=4)
    assert (again["group_id"], again["sample_index"]) == ("t1", failed["sample_index"])
    assert await worker.complete(worker.result(kept, reward=0.0)) == ["accepted"]


async def test_carried_groups_keep_the_policy_versions_of_both_steps(served: Any, dapo: Any) -> None:
    await open_step(served.admin, dapo(0, stream=True, targetGroups=1), 2)
    worker = Worker(served.worker)
    runs = await worker.reach("run", 4)

    def sampled(lease: dict[str, Any], version: str) -> dict[str, Any]:
        result: dict[str, Any] = worker.result(lease)
        (segment,) = result["trajectory"]["segments"]
        versions = [version if mask else "" for mask in segment["loss_mask"]]
        return result | {
            "trajectory": result["trajectory"] | {"segments": [segment | {"policy_versions": versions}]}
        }

    early = [x for x in runs if (x["group_id"], x["sample_index"]) != ("t1", 1)]
    (late,) = [x for x in runs if x not in early]
    await worker.complete(*[sampled(x, "v1") for x in early])
    evaluations = await worker.lease(eval=3)
    await finish_group(worker, evaluations, "t0", 0.0, 1.0)
    assert (await served.admin.post(f"{PATH}/targets", json={"id": "a"})).json()["met"] is True
    await worker.complete(sampled(late, "v2"))
    (other,) = [x for x in evaluations if x["group_id"] == "t1"]
    await worker.complete(worker.result(other, reward=0.0))
    (last,) = await worker.lease(eval=1)
    await worker.complete(worker.result(last, reward=1.0))
    answer = await served.admin.post(f"{PATH}/targets", json={"id": "b"})
    assert answer.json() == {"id": "b", "groups": 1, "goal": 2, "met": True, "opened": True}
    groups = await groups_of(served.admin, informative=True)
    assert [g["group_id"] for g in groups] == ["t0", "t1"]
    versions = [set(t["segments"][0]["policy_versions"]) - {""} for t in groups[1]["trajectories"]]
    assert versions == [{"v1"}, {"v2"}]


async def test_a_stream_that_is_closed_before_its_target_fails(served: Any, dapo: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=dapo(0, stream=True, targetGroups=4))
    await served.admin.post(f"{PATH}/targets", json={"id": "a"})
    await served.admin.post(f"{PATH}/tasks", json={"tasks": tasks_of(2)})
    worker = Worker(served.worker)
    assert await worker.finish_all(mixed("t0", "t1")) == 4
    assert "completionTime" not in await status_of(served.admin), "more tasks may come"
    await served.admin.post(f"{PATH}/tasks", json={"tasks": tasks_of(1, first=2)})
    assert await worker.finish_all(mixed("t2")) == 2
    document = (await served.admin.post(f"{PATH}/close")).json()
    assert document["metadata"]["annotations"]["rollyard.dev/cancel-reason"] == "TargetNotMet"
    assert len(await groups_of(served.admin, informative=True)) == 3


async def test_an_open_stream_that_may_start_no_more_groups_fails(served: Any, dapo: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=dapo(0, stream=True, targetGroups=2, maxGroups=2))
    await served.admin.post(f"{PATH}/targets", json={"id": "a"})
    await served.admin.post(f"{PATH}/tasks", json={"tasks": tasks_of(4)})
    assert await Worker(served.worker).finish_all(mixed("t0")) == 4
    document = (await served.admin.get(PATH)).json()
    assert document["metadata"]["annotations"]["rollyard.dev/cancel-reason"] == "TargetNotMet"
    assert "completionTime" in document["status"]


async def test_wrong_targets_are_refused(served: Any, dapo: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=dapo(0, stream=True, targetGroups=2))
    assert (await served.admin.post(f"{PATH}/targets", json={"id": "a"})).status_code == 201
    wrong: list[tuple[Any, int, str]] = [
        ({"id": "a", "groups": 3}, 409, "TargetDiffers"),
        ({"id": "b", "groups": 0}, 422, "groups"),
        ({"id": "b", "groups": 100_001}, 422, "groups"),
        ({"id": "b", "groups": 1.5}, 422, "groups"),
        ({"id": "b", "groups": "2"}, 422, "groups"),
        ({"id": "b", "groups": True}, 422, "groups"),
        ({"id": ""}, 422, "id"),
        ({"id": "x" * 129}, 422, "id"),
        ({"id": "a b"}, 422, "id"),
        ({"groups": 2}, 422, "id"),
        ({"id": "b", "more": 1}, 422, "more"),
        ([], 422, ""),
    ]
    for body, code, word in wrong:
        refused = await served.admin.post(f"{PATH}/targets", json=body)
        assert refused.status_code == code, body
        assert word in refused.text, body
    assert (await status_of(served.admin))["dynamicSampling"]["targetGroups"] == 2


async def test_only_streams_with_dynamic_sampling_have_steps(served: Any, dapo: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=dapo(2, targetGroups=1))
    refused = await served.admin.post(f"{PATH}/targets", json={"id": "a"})
    assert (refused.status_code, refused.json()["reason"]) == (409, "NotAStream")
    await served.admin.post("/v1/rolloutjobs", json=make_manifest("plain", tasks={"stream": True}))
    refused = await served.admin.post("/v1/rolloutjobs/plain/targets", json={"id": "a"})
    assert (refused.status_code, refused.json()["reason"]) == (409, "NoDynamicSampling")
    assert (await served.admin.post("/v1/rolloutjobs/none/targets", json={"id": "a"})).status_code == 404
    assert "dynamicSampling" not in (await served.admin.get("/v1/rolloutjobs/plain")).json()["status"]


async def test_the_steps_of_a_job_are_its_own_and_bounded(
    served: Any, dapo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_STEPS", 2)
    other = "/v1/rolloutjobs/other"
    twin = dapo(0, stream=True, targetGroups=5)
    twin["metadata"]["name"] = "other"
    await served.admin.post("/v1/rolloutjobs", json=twin)
    await served.admin.post("/v1/rolloutjobs", json=dapo(0, stream=True, targetGroups=2))
    for path, goals in ((PATH, (2, 4)), (other, (5, 10))):
        for step, goal in zip(("a", "b"), goals, strict=True):
            opened = await served.admin.post(f"{path}/targets", json={"id": step})
            assert (opened.status_code, opened.json()["goal"]) == (201, goal)
    for path in (PATH, other):
        full = await served.admin.post(f"{path}/targets", json={"id": "c"})
        assert (full.status_code, full.json()["reason"]) == (409, "TooManyTargets")
        assert (await served.admin.post(f"{path}/targets", json={"id": "b"})).status_code == 200
    assert (await status_of(served.admin))["dynamicSampling"]["targetGroups"] == 4


async def test_a_step_is_opened_once_by_many_callers(served: Any, dapo: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=dapo(0, stream=True, targetGroups=2))
    calls = [served.admin.post(f"{PATH}/targets", json={"id": "a", "groups": 3}) for _ in range(8)]
    answers = await asyncio.gather(*calls)
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert (await status_of(served.admin))["dynamicSampling"]["targetGroups"] == 3


async def test_groups_that_wait_count_against_the_queue(settings: Any, dapo: Any) -> None:
    async with serving(settings, max_queued=20) as served:
        refused = await served.admin.post("/v1/rolloutjobs", json=dapo(11, targetGroups=2))
        assert refused.status_code == 429
        assert (await served.admin.post("/v1/rolloutjobs", json=dapo(9, targetGroups=2))).status_code == 201
        assert (await status_of(served.admin))["counts"]["total"] == 4
        full = await served.admin.post("/v1/rolloutjobs", json=make_manifest("b", samplesPerTask=2))
        assert full.status_code == 429
        await served.admin.post(f"{PATH}/cancel", json={})
        await served.submit("b", samplesPerTask=2)


async def test_a_cancelled_job_starts_no_more_groups_and_leaves_no_rows(served: Any, dapo: Any) -> None:
    await open_step(served.admin, dapo(0, stream=True, targetGroups=2), 6)
    evaluations = await begin(Worker(served.worker), 4)
    await finish_group(Worker(served.worker), evaluations, "t0", 0.0, 1.0)
    document = (await served.admin.post(f"{PATH}/cancel", json={})).json()
    assert document["metadata"]["annotations"]["rollyard.dev/cancel-reason"] == "Cancelled"
    assert "completionTime" in document["status"]
    assert document["status"]["dynamicSampling"]["droppedGroups"] == 2
    assert document["status"]["dynamicSampling"]["surplusRollouts"] == 0
    assert await Worker(served.worker).lease(init=16, run=16, eval=16) == []
    await served.admin.delete(PATH)
    await served.until_stored()
    await served.plane.sweep()

    def rows(conn: Any) -> int:
        tables = (dynamic_sampling, sampling_targets)
        return sum(conn.execute(sa.select(sa.func.count()).select_from(t)).scalar_one() for t in tables)

    assert await served.plane.database.read(rows) == 0


async def test_large_surplus_is_ended_by_the_sweep(
    served: Any, dapo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can lease what one transaction does not cancel, and the sweep ends it."""
    monkeypatch.setattr(transitions, "CANCEL_BATCH", 3)
    await served.admin.post("/v1/rolloutjobs", json=dapo(9, targetGroups=1, maxInFlightGroups=6))
    worker = Worker(served.worker)
    evaluations = await begin(worker, 2)
    await finish_group(worker, evaluations, "t0", 0.0, 1.0)
    told = await status_of(served.admin)
    assert (told["counts"]["cancelled"], told["counts"]["total"]) == (3, 12)
    assert "completionTime" not in told
    assert await worker.lease(init=16, run=16, eval=16) == []
    await served.plane.sweep()
    told = await status_of(served.admin)
    assert (told["counts"]["cancelled"], told["dynamicSampling"]["surplusRollouts"]) == (10, 10)
    assert told["dynamicSampling"]["surplusGroups"] == 5
    assert "completionTime" in told


async def test_pages_of_informative_groups_come_in_the_order_of_ends(served: Any, dapo: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=dapo(12, targetGroups=6, maxInFlightGroups=4))
    await Worker(served.worker).finish_all(mixed(*(f"t{i}" for i in range(0, 12, 2))))
    whole = [g["group_id"] for g in await groups_of(served.admin, informative=True)]
    assert len(whole) == len(set(whole)) == 6
    pages = [page async for page in read_pages(served.admin, f"{PATH}/groups", informative=True, limit=2)]
    assert [json.loads(line)["group_id"] for page in pages for line in page.content.splitlines()] == whole
