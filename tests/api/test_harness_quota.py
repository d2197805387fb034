"""The quota of a namespace for rollouts of harnesses in Run."""

from __future__ import annotations

from typing import Any

import pytest
from rollyard_api.core import entrypoints
from rollyard_testing.api.plane import Worker, make_manifest, serving
from rollyard_testing.manifests import pool_manifest

pytestmark = pytest.mark.usefixtures("offered")
_TASKS = {"inline": [{"id": f"t{number}", "prompt": "p"} for number in range(4)]}


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take jobs whose harness need not be installed here, since no worker of these tests plays one."""
    monkeypatch.setattr(entrypoints, "problems", lambda spec, available: [])


async def _submit(served: Any, name: str, namespace: str = "default", *, harness: bool = True) -> Worker:
    """Submit a job of four rollouts, take all of them through Init, and return its worker."""
    agent = {"type": "harness", "harness": "command", "command": "play"} if harness else {}
    manifest = make_manifest(name, tasks=_TASKS, agent=agent, backendRef={"name": "pool"})
    manifest["metadata"]["namespace"] = namespace
    answer = await served.admin.post("/v1/rolloutjobs", json=manifest, params={"namespace": namespace})
    assert answer.status_code == 201, answer.text
    worker = Worker(served.worker, name=name)
    leases = await worker.lease(init=4, job=name)
    assert len(leases) == 4
    await worker.complete(*map(worker.result, leases))
    return worker


async def _pool(served: Any, namespace: str = "default") -> None:
    spec = {"model": "m", "engine": {"type": "external", "external": {"urls": [f"http://{namespace}:1"]}}}
    manifest = pool_manifest("pool", spec | {"maxActiveRollouts": 16}, namespace=namespace)
    answer = await served.admin.post("/v1/backendpools", json=manifest, params={"namespace": namespace})
    assert answer.status_code == 201, answer.text
    await served.plane.database.write(
        lambda tx: tx.conn.exec_driver_sql("UPDATE backends SET ready = true") and None
    )


async def _advice(served: Any, name: str) -> list[str]:
    document = (await served.viewer.get(f"/v1/rolloutjobs/{name}")).json()
    listed = (await served.viewer.get("/v1/rolloutjobs")).json()["items"]
    (same,) = (item for item in listed if item["metadata"]["name"] == name)
    assert same["status"].get("advice") == document["status"].get("advice")
    return [
        entry["message"]
        for entry in document["status"].get("advice", ())
        if entry["reason"] == "HarnessQuota"
    ]


@pytest.mark.attack(
    "a tenant plays so many rollouts of harnesses at once that no other finds a place at the gateways",
    boundary="tenants",
    surface="leases of Run",
    stopped_by="a quota of such rollouts in Run for each namespace; further ones wait in the queue",
)
async def test_a_namespace_has_only_so_many_rollouts_of_harnesses_in_run(settings: Any) -> None:
    async with serving(settings, max_harness_runs_per_namespace=3) as served:
        await _pool(served)
        await _pool(served, "other")
        one, two = await _submit(served, "one"), await _submit(served, "two")
        plain = await _submit(served, "plain", harness=False)
        elsewhere = await _submit(served, "elsewhere", "other")
        first = await one.lease(run=2, job="one")
        assert len(first) == 2
        assert await _advice(served, "one") == []
        second = await two.lease(run=4, job="two")
        assert len(second) == 1, "the quota is that of all jobs of the namespace"
        assert await one.lease(run=4, job="one") == []
        assert await _advice(served, "two") == [
            "rollouts that wait for Run: 3; harnesses have 3 rollouts in Run in this namespace, of all jobs, "
            "and may have 3 (--max-harness-runs-per-namespace)"
        ]
        assert len(await plain.lease(run=4, job="plain")) == 4, "other agents have no such quota"
        assert await _advice(served, "plain") == []
        body = {"worker": "w", "node": "n", "capacity": {"run": 4}, "namespace": "other", "job": "elsewhere"}
        there = (await served.worker.post("/v1/leases", json=body)).json()["leases"]
        assert len(there) == 3, "another namespace has a quota of its own"
        # A place is free once a Run is complete, or has failed.
        assert await one.complete(one.result(first[0])) == ["accepted"]
        assert len(await two.lease(run=4, job="two")) == 1
        await one.fail(first[1], "SandboxLost")
        left = await two.lease(run=4, job="two")
        assert len(left) == 1
        assert await one.lease(run=4, job="one") == []
        assert elsewhere.name == "elsewhere"


async def test_a_worker_of_all_jobs_gets_no_more(settings: Any) -> None:
    async with serving(settings, max_harness_runs_per_namespace=3) as served:
        await _pool(served)
        await _submit(served, "one")
        await _submit(served, "two")
        leases = await Worker(served.worker).lease(run=8)
        assert len(leases) == 3
        assert {lease["job"] for lease in leases} == {"one", "two"}, (
            "jobs share the quota as they share places"
        )


async def test_the_overview_says_which_job_waits_for_the_quota(settings: Any) -> None:
    async with serving(settings, max_harness_runs_per_namespace=3) as served:
        await _pool(served)
        one, _ = await _submit(served, "one"), await _submit(served, "two")
        await _submit(served, "plain", harness=False)
        assert len(await one.lease(run=4, job="one")) == 3
        jobs = (await served.viewer.get("/v1/jobs")).json()["items"]
        waiting = {job["name"]: job["waits_for"] for job in jobs}
        assert waiting["one"] is None, "it has rollouts in Run"
        (message,) = await _advice(served, "two")
        assert waiting["two"] == {"reason": "HarnessQuota", "message": message}
        assert waiting["plain"] is None or waiting["plain"]["reason"] != "HarnessQuota"
