"""While a pool has no ready backend, its rollouts wait: it costs no attempt, and the wait is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from rollyard_api.jobs import jobs
from rollyard_api.machine.failure_policy import MAX_OUTAGES
from rollyard_api.rollouts import sweeps
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_testing.api.plane import Worker, make_manifest
from rollyard_testing.manifests import pool_manifest

URL = "http://backend-0:8000"
HOUR = 3600.0


class Pool:
    """A pool with one backend, a job on it, and a clock that the test moves."""

    def __init__(self, served: Any, worker: Any) -> None:
        self.served = served
        self.worker = worker
        self.offset = 0.0

    async def ready(self, ready: bool) -> None:
        await self.served.report_backends(URL, ready=ready)

    async def pass_(self, seconds: float) -> int:
        """Let the time pass, sweep, and return how many rollouts ended for lack of a backend."""
        self.offset += seconds

        def op(tx: Transaction) -> int:
            tx.now += self.offset
            sweeps.note_outages(tx)
            ended = sweeps.end_overdue(tx, HOUR)
            jobs.enforce(tx)
            return ended

        ended: int = await self.served.plane.database.write(op)
        for job_id in await self.served.plane.database.read(job_rows.cancelling):
            await self.served.plane.cancel_rest(job_id)
        return ended

    async def to_run(self, count: int = 16) -> None:
        """Take up to `count` rollouts through Init."""
        leases = await self.worker.lease(init=count)
        await self.worker.complete(*[self.worker.result(lease) for lease in leases])

    async def records(self) -> list[dict[str, Any]]:
        listed = (await self.served.admin.get("/v1/rolloutjobs/job/rollouts")).json()["items"]
        return sorted(listed, key=lambda one: str(one["id"]))


async def create_pool(served: Any, name: str) -> None:
    manifest = pool_manifest(name, {"model": "tiny"})
    assert (await served.admin.post("/v1/backendpools", json=manifest)).status_code == 201


@pytest.fixture
async def make_pool(served: Any) -> Any:
    async def make(init: int = 16, **spec: Any) -> Pool:
        await create_pool(served, "pool")
        pool = Pool(served, Worker(served.worker))
        await pool.ready(True)
        await served.submit(
            agent={"type": "tools"}, backendRef={"name": "pool"}, stages={"run": {"maxAttempts": 2}}, **spec
        )
        await pool.to_run(init)
        return pool

    return make


@pytest.mark.parametrize("reason", ["BackendUnavailable", "NoBackend"])
async def test_runs_that_an_outage_interrupts_return_without_an_attempt(make_pool: Any, reason: str) -> None:
    """A worker that could not ask about the pool reports BackendUnavailable, and the pool is looked at."""
    pool = await make_pool()
    leases = await pool.worker.lease(run=2)
    await pool.ready(False)
    for lease in leases:
        fields = {"return_to": "init", "counts": reason != "NoBackend", "message": "nobody answers"}
        assert await pool.worker.fail(lease, reason, **fields) == "accepted"
    for record in await pool.records():
        assert (record["stage"], record["status"], record["attempt"]) == ("init", "queued", 0)
        assert [(one["reason"], one["counted"]) for one in record["attempts"]] == [(reason, False)]
    await pool.to_run()
    assert await pool.worker.lease(run=2) == [], "a lease for which there is no backend"
    await pool.ready(True)
    assert await pool.worker.finish_all() == 2


async def test_an_outage_of_one_pool_is_none_of_anothers(make_pool: Any, served: Any) -> None:
    """Neither for failures that one request reports, nor for what waits in the queues."""
    pool = await make_pool()
    await create_pool(served, "second")
    await served.report_backends("http://backend-1:8000", pool="second")
    job = make_manifest("second", agent={"type": "tools"}, backendRef={"name": "second"})
    assert (await served.admin.post("/v1/rolloutjobs", json=job)).status_code == 201
    await pool.to_run()
    leases = await pool.worker.lease(run=4)
    assert sorted(one["job"] for one in leases) == ["job", "job", "second", "second"]
    await pool.ready(False)
    assert await pool.worker.fail_all(leases, "BackendUnavailable") == ["accepted"] * 4
    for name, attempt in (("job", 0), ("second", 1)):
        items = (await served.admin.get(f"/v1/rolloutjobs/{name}/rollouts")).json()["items"]
        assert [one["attempt"] for one in items] == [attempt] * 2
    assert await pool.pass_(1.0) == 0
    assert await pool.pass_(HOUR + 5.0) == 2
    assert {one["reason"] for one in await pool.records()} == {"NoBackend"}
    assert (await served.counts("second"))["run"] == {"queued": 2, "active": 0}


async def test_a_failure_that_has_nothing_to_do_with_the_outage_counts(make_pool: Any) -> None:
    pool = await make_pool()
    leases = await pool.worker.lease(run=2)
    await pool.ready(False)
    for lease, reason in zip(leases, ("AgentBroken", "BackendMismatch"), strict=True):
        assert await pool.worker.fail(lease, reason) == "accepted"
    assert [record["attempt"] for record in await pool.records()] == [1, 1]


async def test_a_failure_of_a_backend_that_is_ready_counts(make_pool: Any) -> None:
    pool = await make_pool()
    lease, _ = await pool.worker.lease(run=2)
    await pool.worker.fail(lease, "BackendUnavailable", message="it answers 500")
    records = await pool.records()
    assert sorted(record["attempt"] for record in records) == [0, 1]
    (counted,) = [one["counted"] for record in records for one in record["attempts"]]
    assert counted


async def test_outages_excuse_a_bounded_number_of_attempts(make_pool: Any) -> None:
    """A backend that is ready for moments only does not keep a rollout for ever."""
    pool = await make_pool()
    excused = 0
    for _ in range(MAX_OUTAGES + 2):
        leases = await pool.worker.lease(run=1)
        await pool.ready(False)
        for lease in leases:
            await pool.worker.fail(lease, "NoBackend", counts=False)
        await pool.ready(True)
    ended = [record for record in await pool.records() if record["status"] == "failed"]
    excused = [one["counted"] for record in ended for one in record["attempts"]].count(False)
    assert [(record["reason"], record["attempt"]) for record in ended] == [("NoBackend", 2)]
    assert excused + ended[0]["attempts_dropped"] == MAX_OUTAGES


async def test_without_a_deadline_they_wait_for_an_hour(make_pool: Any) -> None:
    pool = await make_pool()
    assert await pool.pass_(2 * HOUR) == 0, "there was a backend all the time"
    await pool.ready(False)
    assert await pool.pass_(1.0) == 0
    assert await pool.pass_(HOUR - 5.0) == 0
    assert await pool.pass_(10.0) == 2
    for record in await pool.records():
        assert (record["status"], record["reason"], record["attempt"]) == ("failed", "NoBackend", 0)
        assert record["message"] == "the pool had no ready backend for 3600 s"
        assert record["timings"]["run"]["queued_seconds"] > HOUR


async def test_those_in_the_queue_of_init_wait_as_long_as_those_in_that_of_run(make_pool: Any) -> None:
    """One that a worker prepares while the hour ends waits for another hour, in Run's queue."""
    pool = await make_pool(samplesPerTask=2, init=1)
    (prepared,) = await pool.worker.lease(init=1)
    await pool.ready(False)
    assert await pool.pass_(1.0) == 0
    assert await pool.pass_(HOUR - 5.0) == 0
    assert await pool.pass_(10.0) == 3
    records = {one["id"]: one for one in await pool.records()}
    assert records.pop(prepared["rollout"])["status"] == "leased"
    for record in records.values():
        assert (record["status"], record["reason"], record["attempt"]) == ("failed", "NoBackend", 0)
    assert sorted(_waited_in(one) for one in records.values()) == ["init", "init", "run"]


async def test_a_backend_that_comes_back_ends_the_wait(make_pool: Any) -> None:
    pool = await make_pool()
    await pool.ready(False)
    assert await pool.pass_(1.0) == 0
    assert await pool.pass_(HOUR - 5.0) == 0
    await pool.ready(True)
    assert await pool.pass_(1.0) == 0
    await pool.ready(False)
    assert await pool.pass_(10.0) == 0
    assert await pool.pass_(HOUR - 5.0) == 0
    assert await pool.pass_(10.0) == 2


async def test_a_paused_pool_is_no_outage(make_pool: Any, served: Any) -> None:
    pool = await make_pool()

    def pause(tx: Transaction) -> None:
        tx.conn.exec_driver_sql(f"UPDATE pools SET paused = {'1' if tx.sqlite else 'true'}")

    await served.plane.database.write(pause)
    assert await pool.pass_(1.0) == 0
    assert await pool.pass_(2 * HOUR) == 0


async def test_a_suspended_job_does_not_lose_its_hour(make_pool: Any, served: Any) -> None:
    pool = await make_pool()
    await pool.ready(False)
    await pool.pass_(1.0)
    await served.admin.patch("/v1/rolloutjobs/job", json={"suspend": True})
    await pool.pass_(2 * HOUR)
    await served.admin.patch("/v1/rolloutjobs/job", json={"suspend": False})
    assert await pool.pass_(1.0) == 0
    assert await pool.pass_(HOUR - 5.0) == 0
    assert await pool.pass_(10.0) == 2


async def test_with_a_deadline_they_wait_until_then(make_pool: Any, served: Any) -> None:
    """Those in the queues of Init and Run have failed. One that a worker holds is cancelled, as ever."""
    pool = await make_pool(activeDeadlineSeconds=int(3 * HOUR), samplesPerTask=2)
    lease, *_ = await pool.worker.lease(run=4)
    await pool.ready(False)
    await pool.worker.fail(lease, "NoBackend", counts=False, return_to="init")
    rest = [one for one in await pool.records() if one["status"] == "leased"]
    assert len(rest) == 3
    for one in rest[1:]:
        await pool.worker.fail(await _lease_of(pool, one["id"]), "NoBackend", counts=False, return_to="run")
    await pool.pass_(1.0)
    assert await pool.pass_(2 * HOUR) == 0, "the job has a deadline"
    assert await pool.pass_(2 * HOUR) == 0
    records = await pool.records()
    ended = {(one["status"], one["reason"]) for one in records}
    assert ended == {("failed", "NoBackend"), ("cancelled", "DeadlineExceeded")}
    assert {one["status"] for one in records if one["id"] == rest[0]["id"]} == {"cancelled"}, (
        "a worker has it"
    )
    failed = [one for one in records if one["status"] == "failed"]
    assert len(failed) == 3
    assert {one["message"] for one in failed} == {"the pool had no ready backend until the job's deadline"}


def _waited_in(record: dict[str, Any]) -> str:
    """Return the only stage in whose queue a rollout has waited for an hour or more."""
    stages = {name: record["timings"][name] for name in ("init", "run") if name in record["timings"]}
    (stage,) = [name for name, one in stages.items() if one["queued_seconds"] > HOUR - 5.0]
    return stage


async def _lease_of(pool: Pool, rollout: str) -> dict[str, Any]:
    """Return the one lease that a rollout in Run has had there, as far as a report names it."""
    (record,) = [one for one in await pool.records() if one["id"] == rollout]
    assert record["timings"]["run"]["attempts"] == 1
    return {"rollout": rollout, "token": 2, "stage": "run"}
