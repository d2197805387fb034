"""One job passes through all stages, and delivers its trajectories."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pyarrow.parquet as pq
from rollyard_crds.lease import LeaseResponse
from rollyard_crds.rolloutjob import RolloutJob
from rollyard_crds.trajectory import Trajectory, Transcript
from rollyard_testing.api.plane import Worker, make_manifest


async def test_whole_way(served: Any) -> None:
    made = await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=3))
    assert made.status_code == 201, made.text
    job = RolloutJob.model_validate(made.json())
    assert job.status.counts.total == 6
    assert job.status.counts.init.queued == 6

    worker = Worker(served.worker)
    answer = await served.worker.post(
        "/v1/leases", json={"worker": "w", "node": "n", "capacity": {"init": 2}, "wait": 0}
    )
    first = LeaseResponse.model_validate(answer.json()).leases
    assert [(lease.stage, lease.token, lease.attempt) for lease in first] == [("init", 1, 0)] * 2
    assert first[0].rollout == f"job-{(job.metadata.uid or '')[:8]}-0-0"
    results = [worker.result(lease, carry={"x": 1}) for lease in answer.json()["leases"]]
    assert await worker.complete(*results) == ["accepted", "accepted"]
    assert await worker.complete(*results) == ["repeated", "repeated"]

    (run,) = await worker.lease(run=1)
    assert run["carry"] == {"x": 1}
    assert run["sandbox"]["node"] == "n"
    assert await Worker(served.worker, node="elsewhere").lease(run=1, eval=1) == []
    assert await worker.complete(worker.result(run)) == ["accepted"]
    (evaluation,) = await worker.lease(eval=1)
    assert Transcript.model_validate(evaluation["trajectory"]).sampled_tokens == 2
    times = {"active_seconds": 1.0, "model_seconds": 0.25}
    assert await worker.complete(worker.result(evaluation, reward=0.5, times=times)) == ["accepted"]
    assert await worker.complete(worker.result(run)) == ["repeated"]

    assert await worker.finish_all() == 5
    told = (await served.admin.get("/v1/rolloutjobs/job")).json()["status"]
    assert told["counts"]["succeeded"] == told["counts"]["total"] == 6
    assert (told["rewardMean"], told["rewardText"]) == (5.5 / 6, "0.917")
    assert "completionTime" in told


async def test_segments_that_templates_began_are_counted(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=2))
    worker = Worker(served.worker)
    results = [worker.result(lease) for lease in await worker.reach("run", 4)]
    for result, breaks in zip(results, (2, 0, 1, 0), strict=True):
        result["trajectory"]["template_breaks"] = breaks
    assert await worker.complete(*results) == ["accepted"] * 4
    assert await worker.complete(*results) == ["repeated"] * 4
    assert "rollyard_template_breaks_total 3.0" in (await served.admin.get("/metrics")).text
    assert await worker.finish_all() == 4
    lines = (await served.admin.get("/v1/rolloutjobs/job/trajectories")).text.splitlines()
    assert sorted(json.loads(line)["template_breaks"] for line in lines) == [0, 0, 1, 2]


async def test_what_workers_measure_adds_up_over_stages_attempts_and_segments(served: Any) -> None:
    tasks = {"inline": [{"id": "t0", "prompt": "p"}]}
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=tasks))
    worker = Worker(served.worker)
    (lease,) = await worker.lease(init=1)
    await worker.complete(worker.result(lease, times={"own_seconds": 0.5}))
    (lease,) = await worker.lease(run=1)
    await worker.fail(lease, times={"model_seconds": 4.0, "tool_seconds": 1.0})
    (lease,) = await worker.lease(run=1)
    result = worker.result(lease, times={"model_seconds": 2.0, "own_seconds": 0.25})
    result["trajectory"]["segments"] *= 3
    await worker.complete(result)
    (lease,) = await worker.lease(eval=1)
    await worker.complete(worker.result(lease, times={"tool_seconds": 8.0}))
    record = (await served.admin.get("/v1/rolloutjobs/job/trajectories")).json()
    measured = {name: record["timings"][f"{name}_seconds"] for name in ("model", "tool", "own")}
    assert measured == {"model": 6.0, "tool": 9.0, "own": 0.75}
    assert [record["timings"][stage]["attempts"] for stage in ("init", "run", "eval")] == [1, 2, 1]
    assert record["attempt"] == 1
    assert "rollyard_sampled_tokens_total 6.0" in (await served.admin.get("/metrics")).text


async def test_results_in_every_form(served: Any, tmp_path: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=2))
    await Worker(served.worker).finish_all(lambda lease: float(lease["sample_index"]))

    path = "/v1/rolloutjobs/job/trajectories"
    lines = await served.admin.get(path, params={"limit": 3})
    assert lines.headers["rollyard-finished"] == "false"
    got = [Trajectory.model_validate_json(line) for line in lines.content.splitlines()]
    rest = await served.admin.get(path, params={"cursor": lines.headers["rollyard-cursor"]})
    assert rest.headers["rollyard-finished"] == "true"
    got += [Trajectory.model_validate_json(line) for line in rest.content.splitlines()]
    assert len({t.id for t in got}) == 4
    assert {t.reward for t in got} == {0.0, 1.0}
    assert all(t.segments[0].response_ids == [4, 5, 6] for t in got)
    assert all(t.timings.run.attempts == 1 for t in got)

    packed = await served.admin.get(path, headers={"Accept": "application/msgpack"})
    assert [Trajectory.model_validate(t) for t in msgpack.unpackb(packed.content)] == got
    parquet = await served.admin.get(path, headers={"Accept": "application/vnd.apache.parquet"})
    file = tmp_path / "t.parquet"
    file.write_bytes(parquet.content)
    table = pq.read_table(file).to_pylist()
    assert [row["id"] for row in table] == [t.id for t in got]
    assert table[0]["segments"][0]["logprobs"] == [-0.5, 0.0, -1.5]

    groups = await served.admin.get("/v1/rolloutjobs/job/groups", params={"informative": True})
    assert groups.headers["rollyard-finished"] == "true"
    found = [json.loads(line) for line in groups.content.splitlines()]
    assert sorted(group["group_id"] for group in found) == ["t0", "t1"]
    assert all(len(group["trajectories"]) == 2 and group["informative"] for group in found)

    one = await served.admin.get(f"/v1/rolloutjobs/job/rollouts/{got[0].id}")
    assert Trajectory.model_validate_json(one.content) == got[0]
    summaries = (
        await served.admin.get("/v1/rolloutjobs/job/rollouts", params={"status": "succeeded"})
    ).json()
    assert {item["id"] for item in summaries["items"]} == {t.id for t in got}
