"""What a driver's report of a dead worker changes: its leases return at once, and nobody else's do."""

from __future__ import annotations

from typing import Any

import pytest
from rollyard_api.machine.failure_policy import MAX_EXPIRIES
from rollyard_api.rollouts import sweeps
from rollyard_testing.api.plane import Worker


@pytest.fixture
async def job(served: Any) -> None:
    await served.submit(tasks={"inline": [{"id": f"t{number}", "prompt": "p"} for number in range(4)]})


async def _died(served: Any, worker: str, job: str = "job", namespace: str = "default") -> dict[str, Any]:
    body = {"namespace": namespace, "job": job, "worker": worker}
    answer = await served.driver.post("/v1/workers/died", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.usefixtures("job")
async def test_the_leases_of_a_dead_worker_return_at_once(served: Any) -> None:
    dead, alive = Worker(served.worker, name="dead"), Worker(served.worker, name="alive")
    first, second = await dead.lease(init=2)
    (kept,) = await alive.lease(init=1)
    assert await _died(served, "dead") == {"returned": 2, "completed": False}
    assert (await served.counts())["init"] == {"queued": 3, "active": 1}
    # Its late reports are fenced off, and the living worker's lease is untouched.
    assert await dead.complete(dead.result(first), dead.result(second)) == ["stale", "stale"]
    again = await alive.lease(init=4)
    assert {one["rollout"] for one in again} >= {first["rollout"], second["rollout"]}
    assert {one["attempt"] for one in again} == {0}, "a lease that returns counts as no attempt"
    listed = (await served.admin.get("/v1/rolloutjobs/job/rollouts")).json()["items"]
    told = [(one["reason"], one["worker"], one["counted"]) for row in listed for one in row["attempts"]]
    assert told == [("WorkerDied", "dead", False)] * 2
    assert await alive.complete(alive.result(kept)) == ["accepted"]


@pytest.mark.usefixtures("job")
async def test_a_repeat_changes_nothing_even_when_another_holds_the_rollouts(served: Any) -> None:
    dead, alive = Worker(served.worker, name="dead"), Worker(served.worker, name="alive")
    await dead.lease(init=2)
    await _died(served, "dead")
    taken = await alive.lease(init=4)
    assert await _died(served, "dead") == {"returned": 0, "completed": False}
    assert await alive.complete(*map(alive.result, taken)) == ["accepted"] * 4


@pytest.mark.usefixtures("job")
async def test_a_worker_that_completed_a_stage_is_told_apart(served: Any) -> None:
    useful, other = Worker(served.worker, name="useful"), Worker(served.worker, name="other")
    (lease, _) = await useful.lease(init=2)
    await useful.complete(useful.result(lease))
    await other.lease(init=1)
    assert (await _died(served, "other"))["completed"] is False
    assert await _died(served, "useful") == {"returned": 1, "completed": True}


@pytest.mark.usefixtures("job")
async def test_a_failure_is_no_completed_stage(served: Any) -> None:
    worker = Worker(served.worker, name="w")
    (lease,) = await worker.lease(init=1)
    failure = {key: lease[key] for key in ("rollout", "token", "stage")} | {"reason": "SandboxStartFailed"}
    answer = await served.worker.post("/v1/leases/fail", json={"worker": "w", "failures": [failure]})
    assert answer.json()["outcomes"][0]["outcome"] == "accepted"
    assert await _died(served, "w") == {"returned": 0, "completed": False}


@pytest.mark.usefixtures("job")
async def test_only_the_named_job_is_looked_at(served: Any) -> None:
    await served.submit("second")
    worker = Worker(served.worker, name="w")
    lease, *_ = await worker.lease(job="job", init=4)
    await worker.complete(worker.result(lease))
    for job, namespace in (("second", "default"), ("job", "elsewhere"), ("nothing", "default")):
        assert await _died(served, "w", job, namespace) == {"returned": 0, "completed": False}
    assert (await served.counts())["init"]["active"] == 3
    (other,) = await worker.lease(job="second", init=1)
    assert await _died(served, "w") == {"returned": 3, "completed": True}
    assert await worker.complete(worker.result(other)) == ["accepted"]


@pytest.mark.usefixtures("job")
async def test_more_leases_than_one_batch(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "EXPIRY_BATCH", 3)
    await Worker(served.worker, name="w").lease(init=4)
    assert (await _died(served, "w"))["returned"] == 4
    assert (await served.counts())["init"] == {"queued": 4, "active": 0}


@pytest.mark.usefixtures("job")
async def test_a_rollout_that_kills_every_worker_ends_as_failed(served: Any) -> None:
    for number in range(MAX_EXPIRIES + 1):
        assert len(await Worker(served.worker, name=f"w{number}").lease(init=4)) == 4
        await _died(served, f"w{number}")
    assert (await served.counts())["failed"] == 4


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"job": "job", "worker": "w"}, "namespace"),
        ({"namespace": "default", "worker": "w"}, "job"),
        ({"namespace": "default", "job": "job", "worker": ""}, "worker"),
        ({"namespace": "default", "job": "job", "worker": "w" * 254}, "worker"),
    ],
)
async def test_a_wrong_report_names_the_field(served: Any, body: dict[str, str], field: str) -> None:
    answer = await served.driver.post("/v1/workers/died", json=body)
    assert answer.status_code == 422
    assert any(line.startswith(field) for line in answer.json()["errors"])
