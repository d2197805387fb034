"""The calls that people look with: the fleet, lists of rollouts and groups, and kept statistics."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from rollyard_testing.api.plane import Worker, listed, make_manifest

TASKS = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(6)]}


async def a_job(served: Any, name: str = "job", **spec: Any) -> Any:
    """Submit a job of 6 groups with 2 samples, end it, and return its worker.

    Task i's samples have the rewards i/10 and i/10 + 0.05, and the first rollout of t5 fails.
    """
    spec = {"tasks": TASKS, "samplesPerTask": 2, **spec}
    await served.submit(name, **spec)
    worker = Worker(served.worker)
    while leases := await worker.lease(init=16, run=16, eval=16, job=name):
        for lease in leases:
            task, sample = int(lease["task"]["id"][1:]), lease["sample_index"]
            if (task, sample, lease["stage"]) == (5, 0, "run"):
                await worker.fail(lease, "TestBroken", retryable=False)
                continue
            fields = {"reward": task / 10 + sample / 20} if lease["stage"] == "eval" else {}
            assert await worker.complete(worker.result(lease, **fields)) == ["accepted"]
    return worker


async def rows(served: Any, name: str = "job", **params: Any) -> list[dict[str, Any]]:
    """Return all slim rows, page by page."""
    return await listed(served.viewer, f"/v1/rolloutjobs/{name}/rollouts", slim=True, **params)


async def test_slim_rows_are_sorted_and_filtered_page_by_page(served: Any) -> None:
    await a_job(served)
    by_id = await rows(served, limit=5)
    assert len(by_id) == 12
    assert [row["id"] for row in by_id] == sorted(row["id"] for row in by_id)
    rising = await rows(served, limit=5, sort="reward")
    rewards = [row["reward"] for row in rising]
    assert rewards == [*sorted(r for r in rewards if r is not None), None]
    falling = await rows(served, limit=5, sort="-reward")
    assert [row["reward"] for row in falling] == [
        *sorted((r for r in rewards if r is not None), reverse=True),
        None,
    ]
    assert {row["id"] for row in rising} == {row["id"] for row in falling} == {row["id"] for row in by_id}
    (failed,) = await rows(served, reason="TestBroken")
    assert (failed["status"], failed["task_id"], failed["sample"], failed["attempts"]) == (
        "failed",
        "t5",
        0,
        1,
    )
    assert failed["ended_at"] == failed["since"]
    assert [row["id"] for row in await rows(served, status="failed")] == [failed["id"]]
    some = await rows(served, sort="reward", min_reward=0.2, max_reward=0.31, limit=1)
    assert [row["reward"] for row in some] == pytest.approx([0.2, 0.25, 0.3])
    assert {row["task_id"] for row in await rows(served, task="t3")} == {"t3"}
    assert await rows(served, task="nothing") == []
    ends = [row["ended_at"] for row in await rows(served, sort="-ended", limit=4)]
    assert ends == sorted(ends, reverse=True)
    middle = ends[6]
    assert {row["ended_at"] >= middle for row in await rows(served, after_time=middle)} == {True}
    assert {row["ended_at"] < middle for row in await rows(served, before_time=middle)} <= {True}
    for order in ("duration", "-duration", "-tokens", "ended"):
        assert {row["id"] for row in await rows(served, sort=order, limit=5)} == {row["id"] for row in by_id}
    assert all(row["tokens"] == 2 for row in by_id if row["status"] == "succeeded")
    assert await rows(served, sort="since") == []


FORGED_CONTINUE = pytest.mark.attack(
    "a forged one, or one of another order, filter or job, shows rows that the list does not show, or "
    "breaks it",
    boundary="viewers",
    surface="`continue` of lists",
    stopped_by="it is bound to the job, the order and the filters, and checked",
)


@FORGED_CONTINUE
async def test_a_continue_belongs_to_its_order_and_filters(served: Any) -> None:
    await a_job(served)
    path = "/v1/rolloutjobs/job/rollouts"
    asked = {"slim": True, "limit": 3, "sort": "reward"}
    given = (await served.viewer.get(path, params=asked)).json()["metadata"]["continue"]
    for change in ({"sort": "-reward"}, {"status": "failed"}, {"min_reward": 0.1}, {"sort": "id"}):
        answer = await served.viewer.get(path, params={**asked, "continue": given, **change})
        assert answer.status_code == 400, (change, answer.text)
        assert answer.json()["reason"] == "CursorInvalid"
    head, _, place = given.rpartition(".")
    digest, *_ = json.loads(base64.urlsafe_b64decode(place + "=" * (-len(place) % 4)))
    places = (["x", 1], [[], 1], [True, 1], [1.0, -1], [1.0, 1.5], [1.0, 1 << 63], [1.0], [1.0, 1, 1], [])
    documents: list[Any] = [[digest, *one] for one in places] + [["0" * 12, 1.0, 1], [], {}, 7]
    bodies = [json.dumps(one).encode() for one in documents]
    bodies += [f'["{digest}",NaN,1]'.encode(), f'["{digest}",1e999,1]'.encode(), b"", b"\xff"]
    for forged in (
        *(f"{head}.{base64.urlsafe_b64encode(body).rstrip(b'=').decode()}" for body in bodies),
        f"{head}.\u00e9",
        "v1.v.x",
        "x" * 300,
    ):
        answer = await served.viewer.get(path, params={**asked, "continue": forged})
        assert answer.status_code == 400, (forged, answer.text)
    plain = await served.viewer.get(path, params={"sort": "reward"})
    assert plain.status_code == 400
    assert "slim: must be true" in plain.json()["detail"]
    infinite = await served.viewer.get(path, params={"slim": True, "min_reward": "nan"})
    assert infinite.status_code == 400


async def test_unfinished_rollouts_are_listed_by_the_time_in_their_state(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=TASKS, samplesPerTask=2))
    worker = Worker(served.worker, "w1", "n1")
    leases = await worker.lease(init=3)
    found = await rows(served, sort="since", limit=5)
    assert len(found) == 12
    assert [row["since"] for row in found] == sorted(row["since"] for row in found)
    held = await rows(served, sort="since", status="leased")
    assert {row["id"] for row in held} == {lease["rollout"] for lease in leases}
    assert {(row["worker"], row["node"], row["stage"]) for row in held} == {("w1", "n1", "init")}
    of_worker = (await served.viewer.get("/v1/workers/w1/rollouts")).json()["items"]
    assert {row["id"] for row in of_worker} == {lease["rollout"] for lease in leases}
    assert {(row["namespace"], row["job"]) for row in of_worker} == {("default", "job")}
    elsewhere = await served.viewer.get("/v1/workers/w1/rollouts", params={"namespace": "other"})
    assert elsewhere.json()["items"] == []


async def grid(served: Any, **params: Any) -> list[dict[str, Any]]:
    return await listed(served.viewer, "/v1/rolloutjobs/job/grid", **params)


async def test_the_grid_has_a_row_for_each_group_and_a_cell_for_each_sample(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=TASKS, samplesPerTask=2))
    assert {(row["state"], row["mean"]) for row in await grid(served)} == {("waiting", None)}
    worker = Worker(served.worker)
    (lease,) = await worker.lease(init=1)
    (active,) = [row for row in await grid(served) if row["state"] == "active"]
    assert [cell[1] for cell in active["samples"]].count("l") == 1
    await worker.fail(lease, counts=False)
    await served.admin.delete("/v1/rolloutjobs/job")
    await a_job(served)
    answer = (await served.viewer.get("/v1/rolloutjobs/job/grid", params={"limit": 500})).json()
    assert [row["task_id"] for row in answer["items"]] == [f"t{i}" for i in range(6)]
    ids = {answer["prefix"] + cell[0] for row in answer["items"] for cell in row["samples"]}
    assert ids == {row["id"] for row in await rows(served)}
    first, last = answer["items"][0], answer["items"][5]
    assert [cell[1:] for cell in first["samples"]] == [["s", 0.0], ["s", 0.05]]
    assert (first["state"], first["informative"], first["mean"]) == ("ended", True, pytest.approx(0.025))
    assert sorted(cell[1] for cell in last["samples"]) == ["f", "s"]
    assert (last["informative"], last["delivered"], last["reason"]) == (False, False, "TooFewRewards")
    means = [row["mean"] for row in await grid(served, sort="-reward", limit=2)]
    assert means == sorted(means, reverse=True)
    for order in ("reward", "variance", "-variance", "reason", "ended", "-ended", "no"):
        assert len({row["no"] for row in await grid(served, sort=order, limit=2)}) == 6, order
    assert [row["task_id"] for row in await grid(served, informative=False)] == ["t5"]
    assert len(await grid(served, informative=True, limit=2)) == 5
    assert [row["task_id"] for row in await grid(served, status="failed")] == ["t5"]
    assert [row["task_id"] for row in await grid(served, search="T3")] == ["t3"]
    assert await grid(served, search="%") == [], "no sign of a search has a meaning"
    assert [row["task_id"] for row in await grid(served, task="t2", sort="reward")] == ["t2"]


async def test_statistics_are_kept_and_count_each_rollout_once(served: Any) -> None:
    await a_job(served)
    found = (await served.viewer.get("/v1/rolloutjobs/job/statistics")).json()
    assert found["upto"] == 12
    rewards = found["rewards"]
    assert (rewards["n"], rewards["min"], rewards["zeros"], rewards["ones"]) == (11, 0.0, 1, 0)
    assert (sum(rewards["bins"]), len(rewards["bins"])) == (11, 20)
    assert rewards["max"] == pytest.approx(0.55)
    assert sum(one["n"] for one in found["by_time"]) == 12
    assert found["by_version"] == [
        {"version": "", "index": 0, "n": 11, "mean": pytest.approx(rewards["mean"])}
    ]
    (failure,) = found["failures"]
    assert (failure["reason"], failure["n"], failure["stage"]) == ("TestBroken", 1, "run")
    assert failure["example"] == (await rows(served, status="failed"))[0]["id"]
    assert found["tokens"] == 22
    assert {stage: one["n"] for stage, one in found["stages"].items()} == {"init": 12, "run": 12, "eval": 11}
    await served.plane.views.folding.round()
    assert (await served.viewer.get("/v1/rolloutjobs/job/statistics")).json() == found


async def test_the_overview_shows_jobs_queues_rates_and_workers(served: Any) -> None:
    await a_job(served, "done")
    await served.admin.post("/v1/rolloutjobs", json=make_manifest("open", tasks=TASKS))
    worker = Worker(served.worker, "w2", "n2")
    first, second = await worker.lease(init=2, run=8)
    await worker.fail(first, "TestBroken", message="it broke\x1b[31m", retryable=True)
    await served.plane.views.folding.round()
    await served.plane.views.seen_workers.write()
    found = (await served.viewer.get("/v1/overview")).json()
    assert sum(found["phases"].values()) == 2
    assert found["queues"]["init"] == {"queued": 5, "active": 1, "slots": 18}
    assert (found["queues"]["run"]["queued"], found["queues"]["eval"]["active"]) == (0, 0)
    assert sum(found["rates"]["rollouts"]) == 12
    assert sum(found["rates"]["tokens"]) == 22
    (seen,) = [one for one in found["workers"] if one["name"] == "w2"]
    assert (seen["node"], seen["active"], seen["stages"]) == ("n2", 1, ["init", "run"])
    error = seen["last_error"]
    assert (error["reason"], error["rollout"]) == ("TestBroken", first["rollout"])
    assert "\x1b" not in error["message"]
    (node,) = [one for one in found["nodes"] if one["name"] == "n2"]
    assert (node["workers"], node["active"]) == (1, 1)
    jobs = (await served.viewer.get("/v1/jobs")).json()["items"]
    assert [job["name"] for job in jobs] == ["open", "done"]
    assert jobs[0]["stages"]["init"] == {"queued": 5, "active": 1}
    assert jobs[1]["reward_mean"] == pytest.approx(
        sum(i / 10 + j / 20 for i in range(6) for j in range(2) if (i, j) != (5, 0)) / 11
    )
    await worker.fail(second, counts=False)
    waits = (await served.viewer.get("/v1/jobs", params={"state": "active"})).json()["items"][0]["waits_for"]
    assert waits["reason"] == "NoDriver"
    await served.admin.patch("/v1/rolloutjobs/open", json={"suspend": True})
    (job,) = (await served.viewer.get("/v1/jobs", params={"search": "OPEN"})).json()["items"]
    assert (job["waits_for"]["reason"], job["suspended"]) == ("Suspended", True)


@FORGED_CONTINUE
async def test_jobs_come_late_ones_first_and_page_by_page(served: Any) -> None:
    for place in range(5):
        spec = {"activeDeadlineSeconds": 1000} if place == 3 else {}
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(f"job{place}", **spec))
    await served.plane.database.write(
        lambda tx: tx.conn.exec_driver_sql("UPDATE jobs SET deadline_at = 1.0 WHERE name = 'job3'") and None
    )
    names = [job["name"] for job in await listed(served.viewer, "/v1/jobs", limit=2)]
    assert names == ["job3", "job0", "job1", "job2", "job4"]
    first = (await served.viewer.get("/v1/jobs", params={"limit": 2})).json()
    params = {"limit": 2, "continue": first["metadata"]["continue"]}
    (late,) = (await served.viewer.get("/v1/jobs", params={"state": "late"})).json()["items"]
    assert late["name"] == "job3"
    assert late["late"] > 1000
    for forged in ("x", "W10", "WzEsMiwzXQ", "bnVsbA", params["continue"] + "A"):
        answer = await served.viewer.get("/v1/jobs", params={"limit": 2, "continue": forged})
        assert answer.status_code == 400, forged
    other = await served.viewer.get("/v1/jobs", params={**params, "sort": "name"})
    assert other.status_code == 400
    assert (await served.viewer.get("/v1/jobs", params={"namespace": "other"})).json()["items"] == []


async def test_what_is_kept_of_a_job_goes_with_it(served: Any) -> None:
    await a_job(served)
    await served.plane.views.folding.round()
    await served.plane.flush()
    await served.admin.delete("/v1/rolloutjobs/job")
    await served.plane.sweep()

    def left(conn: Any) -> list[int]:
        tables = ("ended_rollouts", "ended_groups", "job_statistics")
        return [conn.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar() for table in tables]

    assert await served.plane.database.read(left) == [0, 0, 0]
    answer = await served.viewer.get("/v1/rolloutjobs/job/statistics")
    assert (answer.status_code, answer.json()["reason"]) == (404, "JobNotFound")


async def looks(served: Any, name: str) -> dict[str, Any]:
    """Return what all views of a job show, without times that pass, and in no order: many times are equal."""
    found: dict[str, Any] = {}
    for sort in ("id", "reward", "-ended", "since"):
        for more in ({}, {"task": "t1"}):
            found[f"rollouts {sort} {len(more)}"] = sorted(
                (row["id"], row["task_id"], row["sample"], row["status"], row["reward"])
                for row in await rows(served, name, sort=sort, **more)
            )
    for sort in ("no", "-reward"):
        answer = await served.viewer.get(f"/v1/rolloutjobs/{name}/grid", params={"sort": sort})
        found[f"grid {sort}"] = answer.json()
    for sort in ("-duration", "started"):
        answer = await served.viewer.get(f"/v1/rolloutjobs/{name}/gantt", params={"sort": sort})
        found[f"gantt {sort}"] = sorted((one["id"], one["task_id"]) for one in answer.json()["items"])
    found["statistics"] = (await served.viewer.get(f"/v1/rolloutjobs/{name}/statistics")).json()
    for row in found["rollouts -ended 0"][:3]:
        brief = await served.viewer.get(f"/v1/rolloutjobs/{name}/rollouts/{row[0]}/brief")
        found[f"brief {row[0]}"] = brief.json()
    return found


async def test_what_other_jobs_do_changes_no_view_of_a_job(served: Any) -> None:
    """The other jobs have the same tasks, and groups, samples and failures with the same numbers."""

    async def some_jobs(ended: str, unfinished: str) -> None:
        worker = await a_job(served, ended)
        tasks = {"tasks": TASKS, "samplesPerTask": 2}
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(unfinished, **tasks))
        leases = await worker.lease(init=3, job=unfinished)
        await worker.complete(*map(worker.result, leases[:2]))

    await some_jobs("ended", "unfinished")
    before = {name: await looks(served, name) for name in ("ended", "unfinished")}
    assert len(before["ended"]["gantt started"]) == 12
    assert len(before["unfinished"]["gantt started"]) == 3
    await some_jobs("another", "open")
    for name, shown in before.items():
        after = await looks(served, name)
        for view, what in shown.items():
            assert after[view] == what, (name, view)


async def test_a_brief_names_the_samples_beside_it_and_the_failures_around_it(served: Any) -> None:
    """Samples are neighbours by their numbers within the group, failures by the order of their ends."""
    spec = {"tasks": {"inline": TASKS["inline"][:2]}, "samplesPerTask": 4}
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(**spec))
    worker = Worker(served.worker)
    leases = {(one["task"]["id"], one["sample_index"]): one for one in await worker.lease(init=8)}
    ids = {place: lease["rollout"] for place, lease in leases.items()}
    for place in (("t0", 2), ("t1", 1), ("t0", 0), ("t0", 3)):
        await worker.fail(leases.pop(place), retryable=False)
    await worker.complete(*map(worker.result, leases.values()))
    while more := await worker.lease(run=8, eval=8):
        await worker.complete(*map(worker.result, more))
    await served.plane.views.folding.round()
    for place, expected in {
        ("t0", 0): (None, ("t0", 1), ("t1", 1), ("t0", 3)),
        ("t0", 2): (("t0", 1), ("t0", 3), None, ("t1", 1)),
        ("t0", 3): (("t0", 2), None, ("t0", 0), None),
        ("t1", 3): (("t1", 2), None, ("t0", 3), None),
    }.items():
        found = await served.viewer.get(f"/v1/rolloutjobs/job/rollouts/{ids[place]}/brief")
        names = ("sample_before", "sample_after", "failed_before", "failed_after")
        around = tuple(None if one is None else ids[one] for one in expected)
        assert tuple(found.json()["neighbours"][name] for name in names) == around, place
