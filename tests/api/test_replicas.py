"""Two control planes on one PostgreSQL database: neither loses nor doubles what the other does."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
import sqlalchemy as sa
from rollyard_api.settings import Settings
from rollyard_testing.api.plane import Worker, make_manifest, serving
from rollyard_testing.manifests import pool_manifest
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually


@pytest.fixture
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Settings, Settings]:
    database = request.getfixturevalue("fresh_postgres")
    common: dict[str, Any] = {"db": database, "sweep_seconds": 3600.0, "recheck_seconds": 0.1}
    store = str(tmp_path / "store")
    return (
        Settings(state_dir=tmp_path / "a", trajectories=store, **common),
        Settings(state_dir=tmp_path / "b", trajectories=store, **common),
    )


async def test_two_replicas(both: Any) -> None:
    async with serving(both[0]) as one, serving(both[1]) as two:
        tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(30)]}
        waiting = asyncio.create_task(Worker(two.worker, "w").lease(wait=60, init=1))
        manifest = make_manifest(tasks=tasks, samplesPerTask=2)
        assert (await one.admin.post("/v1/rolloutjobs", json=manifest)).status_code == 201
        assert (await two.admin.post("/v1/rolloutjobs", json=manifest)).status_code == 200
        (lease,) = await asyncio.wait_for(waiting, patience(20))
        workers = [Worker(replica.worker, f"w{i}") for i, replica in enumerate((one, two, one, two))]
        assert await workers[0].complete(workers[0].result(lease)) == ["accepted"]
        async with asyncio.TaskGroup() as group:
            done = [group.create_task(_work(worker)) for worker in workers]
        taken = [lease for task in done for lease in task.result()]
        assert len(taken) == len(set(taken)) == 3 * 60 - 1, "a stage was leased twice, or never"
        await one.until_stored()
        records = (await two.admin.get("/v1/rolloutjobs/job/trajectories", params={"limit": 1000})).content
        assert len({orjson.loads(line)["id"] for line in records.splitlines()}) == 60
        files = Path(both[0].trajectories).rglob("*.ndjson")
        stored_lines = [line for file in files for line in file.read_bytes().splitlines()]
        assert sorted(stored_lines) == sorted(records.splitlines())


async def _work(worker: Any) -> list[tuple[str, str]]:
    taken: list[tuple[str, str]] = []
    idle = 0
    while idle < 10:
        leases = await worker.lease(init=3, run=3, eval=3, wait=0.1)
        idle = 0 if leases else idle + 1
        taken += [(lease["rollout"], lease["stage"]) for lease in leases]
        if leases:
            assert set(await worker.complete(*[worker.result(lease) for lease in leases])) == {"accepted"}
    return taken


async def test_two_replicas_keep_the_limit_of_a_backend(both: Any) -> None:
    """Both count and give out at the same moment; together they give no more than there are places."""
    pool = pool_manifest(
        "pool",
        {
            "model": "tiny",
            "tokenizer": "byte",
            "engine": {"type": "embedded"},
            "maxActiveRollouts": 2,
        },
    )
    urls = ["http://a", "http://b"]
    async with serving(both[0]) as one, serving(both[1]) as two:
        assert (await one.admin.post("/v1/backendpools", json=pool)).status_code == 201
        report = {"backends": [{"url": url, "ready": True, "policyVersion": "v1"} for url in urls]}
        put = await one.admin.put("/v1/backendpools/pool/backends", json=report)
        assert put.status_code == 200, put.text
        tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(80)]}
        await one.submit(tasks=tasks, agent={"type": "tools"}, backendRef={"name": "pool"})
        workers = [Worker(replica.worker, f"w{i}") for i, replica in enumerate([one, two] * 4)]
        first = workers[0]
        while leases := await first.lease(init=64):
            await first.complete(*[first.result(lease) for lease in leases])
        for _ in range(12):
            given = await asyncio.gather(*[worker.lease(run=4) for worker in workers])
            taken = Counter(lease["backend"]["url"] for leases in given for lease in leases)
            assert taken == dict.fromkeys(urls, 2), "more rollouts than places, or places left empty"
            for worker, leases in zip(workers, given, strict=True):
                if leases:
                    await worker.complete(*[worker.result(lease) for lease in leases])


async def test_a_report_that_waits_for_a_backend_holds_no_job(both: Any) -> None:
    """Reports lock backends before jobs. One that did it the other way round could be in a deadlock with one
    of the other replica, of which another test would see nothing, because deadlocks are tried again."""
    pool = pool_manifest("pool", {"model": "tiny", "tokenizer": "byte", "engine": {"type": "embedded"}})
    async with serving(both[0]) as one:
        assert (await one.admin.post("/v1/backendpools", json=pool)).status_code == 201
        report = {"backends": [{"url": "http://a", "ready": True}]}
        assert (await one.driver.put("/v1/backendpools/pool/backends", json=report)).status_code == 200
        tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(3)]}
        await one.submit(tasks=tasks, agent={"type": "tools"}, backendRef={"name": "pool"})
        worker = Worker(one.worker)
        scored, ran, failed = await worker.reach("run", 3)
        await worker.complete(worker.result(scored))
        (scored,) = await worker.lease(eval=1)
        assert await worker.fail(failed, "BackendMismatch") == "accepted"
        engine = sa.create_engine(both[1].database_url, isolation_level="READ COMMITTED")
        with engine.connect() as other:
            other.execute(sa.text("SELECT 1 FROM backends FOR UPDATE"))
            reporting = asyncio.create_task(worker.complete(worker.result(scored), worker.result(ran)))

            async def waits() -> bool:
                query = "SELECT count(*) FROM pg_locks WHERE NOT granted"
                return bool(other.execute(sa.text(query)).scalar_one())

            await eventually(waits)
            other.execute(sa.text("SELECT 1 FROM jobs FOR UPDATE NOWAIT"))
            other.rollback()
        engine.dispose()
        assert await reporting == ["accepted"] * 2


async def test_two_replicas_and_one_claim(both: Any) -> None:
    """A claim that is filed at both at once is one claim; a client that waits at one gets what the other was
    sent.
    """
    shape = {"cpu": 1.0, "memory_bytes": 1 << 30, "disk_bytes": 1 << 30, "processes": 64}
    async with serving(both[0]) as one, serving(both[1]) as two:
        tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(16)]}
        assert (await one.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=tasks))).status_code == 201
        leases = await Worker(one.worker, node="kubernetes").lease(init=16)
        bodies = [{"rollout": x["rollout"], "token": x["token"], "shape": shape} for x in leases]
        filed = await asyncio.gather(
            *[replica.worker.post("/v1/claims", json=body) for body in bodies for replica in (one, two)]
        )
        assert {answer.status_code for answer in filed} == {200}
        ids = [answer.json()["id"] for answer in filed]
        assert ids[::2] == ids[1::2]
        assert len(set(ids)) == len(bodies)
        lists = [replica.driver.get("/v1/claims") for replica in (one, two)]
        first, second = [answer.json() for answer in await asyncio.gather(*lists)]
        assert first["revision"] == second["revision"], "the same list has the same revision everywhere"
        query = {"revision": first["revision"], "wait": 60}
        listing = asyncio.create_task(two.driver.get("/v1/claims", params=query))
        waiting = asyncio.create_task(two.worker.post("/v1/claims", json=bodies[0] | {"wait": 60}))
        await two.until_waiting(2)
        status = {"state": "Bound", "address": "tcp://10.0.0.7:7411", "secret": "s"}
        assert (await one.driver.put(f"/v1/claims/{ids[0]}/status", json=status)).status_code == 200
        assert (await asyncio.wait_for(waiting, patience(10))).json()["state"] == "Bound"
        assert (await asyncio.wait_for(listing, patience(10))).json()["revision"] != first["revision"]
        await asyncio.gather(one.plane.sweep(), two.plane.sweep())
        await one.admin.post("/v1/rolloutjobs/job/cancel", json={})
        await asyncio.gather(one.plane.sweep(), two.plane.sweep())
        left = (await two.driver.get("/v1/claims")).json()["claims"]
        assert {claim["state"] for claim in left} == {"Released"}


async def test_two_replicas_agree_on_dynamic_sampling(both: Any) -> None:
    """Four workers report to two replicas; the job ends once, and every group is started and counted once."""
    tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(60)]}
    sampling = {"targetGroups": 12, "maxInFlightGroups": 6}
    manifest = make_manifest(tasks=tasks, samplesPerTask=3, dynamicSampling=sampling)
    async with serving(both[0]) as one, serving(both[1]) as two:
        await one.admin.post("/v1/rolloutjobs", json=manifest)
        workers = [Worker(replica.worker, f"w{i}") for i, replica in enumerate((one, two, one, two))]
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(_sample(worker))
        await one.plane.sweep()
        job = (await two.admin.get("/v1/rolloutjobs/job")).json()
        assert job["metadata"]["annotations"]["rollyard.dev/cancel-reason"] == "TargetMet"
        told, counts = job["status"]["dynamicSampling"], job["status"]["counts"]
        assert "completionTime" in job["status"]
        assert told["informativeGroups"] >= 12
        assert told["inFlightGroups"] == told["droppedGroups"] == 0
        ended = sum(told[f"{kind}Groups"] for kind in ("informative", "uninformative", "surplus"))
        assert ended + told["waitingGroups"] == 60
        assert counts["total"] == 3 * ended == counts["succeeded"] + counts["cancelled"]
        assert counts["cancelled"] == told["surplusRollouts"]
        query = {"informative": True, "limit": 100}
        lines = (await two.admin.get("/v1/rolloutjobs/job/groups", params=query)).content.splitlines()
        found = [orjson.loads(line) for line in lines]
        assert len({group["group_id"] for group in found}) == len(found) == told["informativeGroups"]
        assert {len(group["trajectories"]) for group in found} == {3}


async def _sample(worker: Any) -> None:
    """Work until nothing is left; two of five tasks have a signal."""
    idle = 0
    while idle < 10:
        leases = await worker.lease(init=3, run=3, eval=3, wait=0.1)
        idle = 0 if leases else idle + 1
        results = []
        for lease in leases:
            signal = int(lease["group_id"][1:]) % 5 < 2
            reward = {"reward": float(signal and lease["sample_index"])} if lease["stage"] == "eval" else {}
            results.append(worker.result(lease, **reward))
        if results:
            assert set(await worker.complete(*results)) <= {"accepted", "cancelled"}
