"""Attempts that did not end well: what is kept of each way back into a queue, and who is given it."""

from __future__ import annotations

import io
from typing import Any

import pyarrow.parquet
import pytest
from rollyard_api.machine import failure_policy
from rollyard_api.rollouts import heartbeats, sweeps
from rollyard_api.trajectories import attempts
from rollyard_client import RolloutSummary
from rollyard_crds.lease import Lease, StageTimes
from rollyard_crds.trajectory import MAX_ATTEMPT_MESSAGE, MAX_ATTEMPTS, Trajectory
from rollyard_pipeline.sandboxes.errors import SandboxLost
from rollyard_pipeline.worker.worker import stage_failure
from rollyard_testing.api.plane import Worker, make_manifest
from rollyard_testing.crds.segments import reported

PATH = "/v1/rolloutjobs/job"


async def _record(served: Any, **headers: str) -> dict[str, Any]:
    found: dict[str, Any] = (await served.admin.get(f"{PATH}/trajectories", headers=headers)).json()
    return found


def _told(found: dict[str, Any]) -> list[tuple[str, int, str, bool]]:
    return [(one["stage"], one["attempt"], one["reason"], one["counted"]) for one in found["attempts"]]


async def test_every_way_back_into_a_queue_is_explained(served: Any, worker: Any) -> None:
    """A failure, a hand-over, an expired lease and a lost node, and then the rollout succeeds."""
    (lease,) = await worker.lease(init=1)
    await worker.fail(lease, "ImageBroken", message="no such image")
    (lease,) = await worker.lease(init=1)
    await worker.fail(lease, "WorkerDrained", message="it stops", counts=False)
    await worker.reach("run")
    await served.later(60, sweeps.expire)
    (lease,) = await worker.lease(init=1)
    await worker.complete(worker.result(lease))
    await worker.heartbeat()
    await served.later(7200, lambda tx: heartbeats.give_up_silent(tx, 60.0))
    summary = (await served.admin.get(f"{PATH}/rollouts")).json()["items"][0]
    assert await worker.finish_all() == 1

    record = await _record(served)
    assert (record["status"], record["attempt"], record["attempts_dropped"]) == ("succeeded", 1, 0)
    assert _told(record) == [
        ("init", 1, "ImageBroken", True),
        ("init", 2, "WorkerDrained", False),
        ("run", 1, "LeaseExpired", False),
        ("run", 1, "NodeGone", False),
    ]
    assert summary["attempts"] == record["attempts"]
    first, _, expired, lost = record["attempts"]
    assert (first["message"], first["worker"], first["node"]) == ("no such image", "w", "n")
    assert (expired["worker"], expired["node"]) == ("w", "n")
    assert expired["seconds"] >= 60
    assert (lost["worker"], lost["node"]) == ("", "n"), "it waited, so no worker had it"
    assert Trajectory.model_validate(record).attempts[0].reason == "ImageBroken"
    assert record["timings"]["run"]["queued_seconds"] >= 7200


async def test_a_lost_sandbox_is_explained(served: Any, worker: Any) -> None:
    """The reports are those that a worker makes of the provider's error, once in Run and once in Eval."""

    async def until_lease(stage: str) -> Any:
        for before in ("init", "run", "eval"):
            (lease,) = await worker.lease(init=1, run=1, eval=1)
            assert lease["stage"] == before, "the sandbox is made again"
            if before == stage:
                return lease
            await worker.complete(worker.result(lease))
        raise AssertionError(stage)

    for stage in ("run", "eval"):
        lease = await until_lease(stage)
        lost = SandboxLost(f"the exec server of {stage} is gone")
        report = stage_failure(Lease.model_validate(lease), lost, StageTimes()).model_dump()
        kept = {name: report[name] for name in ("message", "return_to", "retryable", "counts")}
        await worker.fail(lease, report["reason"], **kept)
    summary = (await served.admin.get(f"{PATH}/rollouts")).json()["items"][0]
    assert await worker.finish_all() == 1
    record = await _record(served)
    assert _told(record) == [("run", 1, "SandboxLost", True), ("eval", 1, "SandboxLost", True)]
    assert [(one["worker"], one["node"], one["message"]) for one in record["attempts"]] == [
        ("w", "n", "the exec server of run is gone"),
        ("w", "n", "the exec server of eval is gone"),
    ]
    assert (record["status"], record["reward"]) == ("succeeded", 1.0)
    assert summary["attempts"] == record["attempts"]


async def test_failures_are_retried_and_the_last_is_final(served: Any, worker: Any) -> None:
    for attempt in range(3):
        (lease,) = await worker.lease(init=1)
        assert lease["attempt"] == attempt
        assert await worker.fail(lease, "ImageBroken", message="no such image") == "accepted"
        assert await worker.fail(lease, "ImageBroken") == "repeated"
    record = await _record(served)
    assert (record["status"], record["reason"], record["reward"]) == ("failed", "ImageBroken", None)
    assert (record["attempt"], record["message"]) == (3, "no such image")
    assert _told(record) == [("init", number, "ImageBroken", True) for number in (1, 2, 3)]


async def test_a_lease_that_is_lost_too_often_ends_as_an_attempt(
    served: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_policy, "MAX_EXPIRIES", 2)
    for _ in range(3):
        (lease,) = await worker.lease(init=1)
        await served.later(60, sweeps.expire)
    assert await worker.lease(init=1) == []
    assert await worker.complete(worker.result(lease)) == ["stale"]
    record = await _record(served)
    assert (record["status"], record["reason"], record["reward"]) == ("failed", "LeaseExpired", None)
    assert record["message"] == "3 leases were lost; the last was held by w"
    assert _told(record) == [("init", number, "LeaseExpired", False) for number in (1, 2, 3)]


async def test_what_a_worker_says_about_attempts_in_a_trajectory_is_refused(served: Any, worker: Any) -> None:
    (lease,) = await worker.reach("run")
    run = worker.result(lease)
    forged = attempts.attempt(
        stage="run", number=1, reason="Forged", message="", worker="", node="",
        started=0.0, seconds=0.0, counted=True,
    )  # fmt: skip
    forgery = run | {"trajectory": run["trajectory"] | {"attempts": [forged], "attempts_dropped": 7}}
    answer = await served.worker.post(
        "/v1/leases/complete", json={"worker": "w", "results": [reported(forgery)]}
    )
    assert answer.status_code == 422
    assert "results[0].trajectory.attempts: unknown field" in answer.json()["errors"]
    assert await worker.complete(run) == ["accepted"]
    assert await worker.finish_all() == 1
    assert not {"attempts", "attempts_dropped"} & (await _record(served)).keys()


async def test_parquet_has_the_attempts_as_a_list(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    await worker.fail(lease, "ImageBroken", message="no such image")
    assert await worker.finish_all() == 1
    rows = await _table(served)
    assert rows[0]["attempts"] == (await _record(served))["attempts"]
    assert rows[0]["attempts_dropped"] == 0


async def _table(served: Any) -> list[dict[str, Any]]:
    headers = {"Accept": "application/vnd.apache.parquet"}
    answer = await served.admin.get(f"{PATH}/trajectories", headers=headers)
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(io.BytesIO(answer.content)).to_pylist()
    return rows


async def test_only_rollouts_that_were_retried_are_listed_on_request(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest())
    worker = Worker(served.worker)
    first, _ = await worker.lease(init=2)
    await worker.fail(first, "ImageBroken")
    answer = await served.admin.get(f"{PATH}/rollouts", params={"retried": True})
    (found,) = [RolloutSummary.of(item | {"later": 1}) for item in answer.json()["items"]]
    assert found.id == first["rollout"]
    assert [one.reason for one in found.attempts] == ["ImageBroken"]
    assert len((await served.admin.get(f"{PATH}/rollouts")).json()["items"]) == 2


def _attempt(number: int, *, counted: bool, message: str = "") -> dict[str, Any]:
    return attempts.attempt(
        stage="run", number=number, reason="Broken", message=message, worker="w", node="n",
        started=1.0, seconds=2.0, counted=counted,
    )  # fmt: skip


def test_the_list_is_bounded_and_keeps_those_that_counted() -> None:
    kept: bytes | None = None
    for number in range(1, 41):
        kept = attempts.added(kept, _attempt(number, counted=number in (3, 7)))
    listed, dropped = attempts.listing(kept)
    assert (len(listed), dropped) == (MAX_ATTEMPTS, 40 - MAX_ATTEMPTS)
    assert [one["attempt"] for one in listed] == [3, 7, *range(27, 41)]
    for number in range(41, 81):
        kept = attempts.added(kept, _attempt(number, counted=True))
    listed, dropped = attempts.listing(kept)
    assert [one["attempt"] for one in listed] == list(range(65, 81))
    assert dropped == 80 - MAX_ATTEMPTS


@pytest.mark.parametrize("message", ["x" * 4096, "\x1b[2J" * 1000, "é" * 4096, "\n"])
def test_a_message_is_one_line_of_bounded_length(message: str) -> None:
    text = _attempt(1, counted=True, message=message)["message"]
    assert 0 < len(text) <= MAX_ATTEMPT_MESSAGE
    assert text.isprintable()
    assert text.endswith("…") == (len(message) > MAX_ATTEMPT_MESSAGE)
