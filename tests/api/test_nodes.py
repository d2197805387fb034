"""Rollouts that wait for a node that has fallen silent, and tokens for one job."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from rollyard_api.rollouts import heartbeats
from rollyard_api.settings import Settings
from rollyard_api.storage import schema
from rollyard_api.storage.database import Transaction
from rollyard_crds.names import NODE
from rollyard_crds.security.job_token import job_token
from rollyard_testing.api.plane import Worker, make_manifest, serving

SILENT = 60.0


@pytest.fixture
async def worker(served: Any) -> Any:
    await served.submit()
    return Worker(served.worker)


async def _silent(served: Any, seconds: float) -> int:
    """Return the rollouts that go back to Init so long after the last sign of their node."""
    return int(await served.later(seconds, lambda tx: heartbeats.give_up_silent(tx, SILENT)))


async def _queued(served: Any) -> dict[str, int]:
    counts = await served.counts()
    return {stage: counts[stage]["queued"] for stage in ("init", "run", "eval") if counts[stage]["queued"]}


async def test_what_waits_for_a_silent_node_begins_anew(served: Any, worker: Any) -> None:
    first, second = await worker.lease(init=2)
    await worker.complete(worker.result(first), worker.result(second))
    (run,) = await worker.lease(run=1)
    await worker.complete(worker.result(run))
    assert await _queued(served) == {"run": 1, "eval": 1}
    assert await Worker(served.worker, name="b", node="other").lease(run=4, eval=4) == []
    await worker.heartbeat()
    assert await _silent(served, SILENT - 5) == 0
    assert await _silent(served, SILENT + 10) == 2
    assert await _queued(served) == {"init": 2}
    again = await Worker(served.worker, name="b", node="other").lease(init=4)
    assert [one["attempt"] for one in again] == [0, 0], "no failure"
    assert await worker.complete(worker.result(run)) == ["repeated"]


async def test_a_node_that_speaks_keeps_what_waits_for_it(served: Any, worker: Any) -> None:
    (lease, _) = await worker.lease(init=2)
    await worker.complete(worker.result(lease))
    assert await _silent(served, 0.0) == 0, "it counts as heard of when it is first waited for"
    assert await _silent(served, SILENT / 2) == 0
    await worker.heartbeat()
    assert await _silent(served, SILENT / 2 + 10) == 0
    assert await _queued(served) == {"run": 1}


async def test_only_what_waits_for_the_silent_one_of_several_nodes_begins_anew(served: Any) -> None:
    tasks = {"inline": [{"id": f"t{number}", "prompt": "p"} for number in range(3)]}
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=tasks))
    workers = [Worker(served.worker, name=f"w{node}", node=node) for node in ("a", "b", "c")]
    for one in workers:
        (lease,) = await one.lease(init=1)
        await one.complete(one.result(lease))
        await one.heartbeat()

    def later(tx: Transaction) -> int:
        for node in ("a", "c"):
            heartbeats.heard(tx, node)
        return heartbeats.give_up_silent(tx, SILENT)

    assert await served.later(SILENT + 10, later) == 1
    first, silent, last = workers
    assert [len(await one.lease(run=3)) for one in (first, silent, last)] == [1, 0, 1]
    assert len(await silent.lease(init=3)) == 1


async def test_a_restart_gives_every_node_its_time(served: Any, worker: Any) -> None:
    (lease, _) = await worker.lease(init=2)
    await worker.complete(worker.result(lease))
    await worker.heartbeat()

    def late(tx: Transaction) -> int:
        heartbeats.grace(tx, 30.0)
        return heartbeats.give_up_silent(tx, SILENT)

    assert await served.later(10 * SILENT, late) == 0


async def test_pods_are_of_no_node(served: Any, worker: Any) -> None:
    of_pods = Worker(served.worker, name="p", node=NODE)
    (lease, _) = await of_pods.lease(init=2)
    await of_pods.complete(of_pods.result(lease))
    await of_pods.heartbeat()
    assert await _silent(served, 100 * SILENT) == 0
    assert await _queued(served) == {"run": 1}


async def test_sandboxes_that_end_with_their_worker(served: Any, worker: Any) -> None:
    first, second = await worker.lease(init=2)
    results = [worker.result(first), worker.result(second)]
    await worker.complete(*results)
    kept, ended = (result["sandbox"]["id"] for result in results)
    body = {"worker": "w", "node": "n", "leases": [], "sandboxes": [kept, ended], "ending": [ended]}
    told = (await served.worker.post("/v1/leases/heartbeat", json=body)).json()
    assert told["orphans"] == [ended], "it may be removed"
    assert await _queued(served) == {"init": 1, "run": 1}
    (run,) = await worker.lease(run=2)
    await worker.complete(worker.result(run))
    assert await _queued(served) == {"init": 1, "eval": 1}
    told = (await served.worker.post("/v1/leases/heartbeat", json=body | {"ending": [kept]})).json()
    assert (told["orphans"], await _queued(served)) == ([kept, ended], {"init": 2})


async def test_a_sandbox_that_another_worker_uses_is_not_removed(served: Any, worker: Any) -> None:
    (lease, _) = await worker.lease(init=2)
    result = worker.result(lease)
    await worker.complete(result)
    (run,) = await worker.lease(run=1)
    mine = result["sandbox"]["id"]
    body = {"worker": "v", "node": "n", "leases": [], "sandboxes": [mine], "ending": [mine]}
    told = (await served.worker.post("/v1/leases/heartbeat", json=body)).json()
    assert told["orphans"] == []
    assert await worker.complete(worker.result(run)) == ["accepted"]


async def test_silent_nodes_are_forgotten_at_last(served: Any, worker: Any) -> None:
    """A node for which a rollout waits is not, and neither is one that was heard a while ago."""
    await worker.heartbeat()
    waited_for = Worker(served.worker, node="waited for")
    (lease,) = await waited_for.lease(init=1)
    await waited_for.complete(waited_for.result(lease))
    await waited_for.heartbeat()

    def names(tx: Transaction) -> list[str]:
        return sorted(row.name for row in tx.conn.execute(sa.select(schema.nodes.c.name)))

    def op(tx: Transaction) -> tuple[list[str], list[str]]:
        before = names(tx)
        tx.now += 98 * SILENT
        heartbeats.heard(tx, "lately")
        tx.now += 2 * SILENT
        heartbeats.forget(tx, SILENT)
        return before, names(tx)

    assert await served.plane.database.write(op) == (["n", "waited for"], ["lately", "waited for"])


async def test_a_start_forgets_them(settings: Settings) -> None:
    """All other nodes count as heard now, which must not keep these."""

    def long_ago(tx: Transaction) -> None:
        tx.now -= 11 * SILENT
        heartbeats.heard(tx, "old")
        tx.now += 10 * SILENT
        heartbeats.heard(tx, "lately")

    async with serving(settings) as served:
        await served.plane.database.write(long_ago)
    async with serving(settings) as served:
        names = await served.plane.database.read(
            lambda conn: list(conn.scalars(sa.select(schema.nodes.c.name)))
        )
    assert names == ["lately"]


# Tokens for one job.


@pytest.mark.attack(
    "one job's workers speak for a node that is gone, so that another job's rollouts wait for it for ever",
    boundary="worker",
    surface="`/v1/leases/heartbeat`",
    stopped_by="they speak for their own job's rollouts alone",
)
async def test_workers_of_one_job_keep_no_other_job_waiting(served: Any, bound: Any) -> None:
    other = Worker(served.worker, name="o")
    (lease,) = await other.lease(init=1, job="other")
    await other.complete(other.result(lease))
    (mine,) = await bound.lease(init=1, job="job")
    await bound.complete(bound.result(mine))
    assert await _silent(served, 0.0) == 0, "both count as heard of when they are first waited for"

    def later(tx: Transaction) -> tuple[int, int]:
        tx.now += SILENT + 10
        job = tx.conn.execute(sa.select(schema.jobs.c.id).where(schema.jobs.c.name == "job")).scalar_one()
        for node in ("n", "a node of nobody"):
            heartbeats.heard(tx, node, job)
        count = tx.conn.execute(sa.select(sa.func.count()).select_from(schema.nodes)).scalar_one()
        return heartbeats.give_up_silent(tx, SILENT), count

    given_up, rows = await served.plane.database.write(later)
    assert given_up == 1, "the other job's rollout, though the first one's workers speak of the same node"
    assert rows == 2, "no row for a node that none of the job's rollouts has"
    assert (await served.counts("other"))["init"]["queued"] == 1
    assert (await served.counts("job"))["run"]["queued"] == 1
    await bound.heartbeat()


@pytest.mark.parametrize("speaks", ["a worker of the job", "a worker of every job"])
async def test_a_node_is_heard_through_either_kind_of_worker(served: Any, bound: Any, speaks: str) -> None:
    (mine,) = await bound.lease(init=1, job="job")
    await bound.complete(bound.result(mine))
    await bound.heartbeat()
    await Worker(served.worker, name="o").heartbeat()

    def later(tx: Transaction) -> int:
        tx.now += SILENT + 10
        job = tx.conn.execute(sa.select(schema.jobs.c.id).where(schema.jobs.c.name == "job")).scalar_one()
        heartbeats.heard(tx, "n", job if speaks == "a worker of the job" else None)
        return heartbeats.give_up_silent(tx, SILENT)

    assert await served.plane.database.write(later) == 0
    assert await _silent(served, 3 * SILENT) == 1


@pytest.mark.parametrize("leases", ["a worker of the job", "a worker of every job"])
async def test_a_node_that_was_silent_is_heard_again_with_its_first_lease(
    served: Any, bound: Any, leases: str
) -> None:
    """Its earlier workers were heard long ago, and the new one has sent no heartbeat since its lease."""

    def long_ago(tx: Transaction) -> None:
        tx.now -= 2 * SILENT
        heartbeats.heard(tx, "n")

    await served.plane.database.write(long_ago)
    worker = bound if leases == "a worker of the job" else Worker(served.worker)
    (mine,) = await worker.lease(init=1, job="job")
    await worker.complete(worker.result(mine))
    assert await _silent(served, 0.0) == 0
    assert (await served.counts())["run"]["queued"] == 1
    assert await _silent(served, SILENT + 10) == 1, "no other sign of it came"


@pytest.fixture
async def bound(served: Any) -> Any:
    """Return a worker with a token for the job `job`, beside another job."""
    for name in ("job", "other"):
        await served.submit(name, tasks={"inline": [{"id": "t0", "prompt": "p"}]})
    uid = (await served.admin.get("/v1/rolloutjobs/job")).json()["metadata"]["uid"]
    token = job_token(served.plane.tokens.current("worker"), "default", "job", uid)
    transport = httpx.ASGITransport(app=served.worker._transport.app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
        yield Worker(http)


async def test_a_bound_worker_works_for_its_job(bound: Any) -> None:
    (lease,) = await bound.lease(init=4, job="job")
    assert lease["job"] == "job"
    await bound.heartbeat(lease)
    assert await bound.complete(bound.result(lease)) == ["accepted"]
    (run,) = await bound.lease(run=4, job="job")
    assert await bound.fail(run) == "accepted"
    assert (await bound.http.get("/v1/leases/job", params={"name": "job"})).status_code == 200


async def test_what_a_bound_worker_lists_does_not_replace_the_list_of_others(served: Any, bound: Any) -> None:
    other = Worker(served.worker, name="o")
    (first,) = await other.lease(init=1, job="other")
    assert (await other.heartbeat(first, sandboxes=["sb-left"]))["orphans"] == []
    assert len(await bound.lease(init=1, job="job")) == 1
    assert (await bound.heartbeat(sandboxes=["sb-mine"]))["orphans"] == []
    assert await other.complete(other.result(first)) == ["accepted"]
    told = await other.heartbeat(sandboxes=["sb-left"])
    assert told["orphans"] == ["sb-left"], "it was listed before the Init that is left"
