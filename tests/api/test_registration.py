"""Jobs and pools that a driver registers: made, kept, changed, replaced, refused; and what is to be warm."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from rollyard_api.jobs import manifests
from rollyard_api.jobs.jobs import enforce
from rollyard_api.storage.schema import jobs, pools, weight_updates
from rollyard_crds.base import IMMUTABLE
from rollyard_crds.claims import ClaimList
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.unfinished import UnfinishedJobs
from rollyard_testing.api.plane import Worker, listed, make_manifest, serving
from rollyard_testing.manifests import pool_manifest
from rollyard_testing.pace import patience

UID = "rollyard.dev/object-uid"
TASKS = [{"id": "a", "prompt": "p"}, {"id": "b", "prompt": "p"}]


def _object(manifest: dict[str, Any], uid: str | None = "u1", **meta: Any) -> dict[str, Any]:
    annotations = {} if uid is None else {UID: uid}
    return manifest | {"metadata": manifest["metadata"] | {"annotations": annotations} | meta}


async def _put(served: Any, manifest: dict[str, Any], **body: Any) -> Any:
    name = manifest["metadata"]["name"]
    return await served.driver.put(f"/v1/rolloutjobs/{name}", json={"manifest": manifest, **body})


async def _job(served: Any, name: str = "job") -> dict[str, Any]:
    answer = await served.driver.get(f"/v1/rolloutjobs/{name}")
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


async def _admit(served: Any, status: str = "True", name: str = "job") -> None:
    when = "2026-01-01T00:00:00Z"
    condition = {"type": "Admitted", "status": status, "reason": "Told", "lastTransitionTime": when}
    body = {"phase": "Pending", "conditions": [condition], "observedGeneration": 1}
    answer = await served.driver.put(f"/v1/rolloutjobs/{name}/status", json=body)
    assert answer.status_code == 200, answer.text


async def _warm(served: Any, **query: Any) -> ClaimList:
    answer = await served.driver.get("/v1/claims", params=query)
    assert answer.status_code == 200, answer.text
    return ClaimList.model_validate(answer.json())


async def test_registering_again_is_the_same_as_once(served: Any) -> None:
    first = await _put(served, _object(make_manifest(samplesPerTask=2), labels={"team": "a"}))
    assert first.status_code == 201, first.text
    made = first.json()
    assert made["status"]["counts"]["total"] == 4
    assert made["spec"]["tasks"] == {"stream": True}, "inline tasks are left out of the answer"
    assert len((await _job(served))["spec"]["tasks"]["inline"]) == 2
    for _ in range(2):
        again = await _put(served, _object(make_manifest(samplesPerTask=2), labels={"team": "a"}))
        assert again.status_code == 200
        assert again.json() == made
    posted = await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=2))
    assert posted.status_code == 200, "the same job, submitted over REST"


async def test_what_may_change_is_brought_up_to_date(served: Any) -> None:
    await _put(served, _object(make_manifest()))
    spec = {
        "stages": {"init": {"maxAttempts": 1, "replicas": 2, "maxReplicas": 5}},
        "priority": 7,
        "failurePolicy": {"maxFailedFraction": 0.5},
        "activeDeadlineSeconds": 60,
        "ttlSecondsAfterFinished": 9,
        "maxPolicyLag": 3,
        "staleRollouts": "Cancel",
        "backoffLimit": 4,
    }
    changed = await _put(served, _object(make_manifest(**spec), labels={"team": "b"}))
    assert changed.status_code == 200, changed.text
    told = changed.json()
    assert told["metadata"]["generation"] == 2
    assert told["metadata"]["labels"] == {"team": "b"}
    for name in spec.keys() - {"stages"}:
        assert told["spec"][name] == spec[name]
    assert told["spec"]["stages"]["init"]["maxReplicas"] == 5
    same = await _put(served, _object(make_manifest(**spec), labels={"team": "c"}))
    assert same.json()["metadata"]["generation"] == 2, "labels are not the spec"
    assert same.json()["metadata"]["labels"] == {"team": "c"}

    worker = Worker(served.worker)
    (lease, _) = await worker.lease(init=2)
    await worker.fail(lease, "Broken")
    assert (await _job(served))["status"]["counts"]["failed"] == 1, "one attempt, as the new spec says"


async def test_suspending_by_the_object(served: Any) -> None:
    worker = Worker(served.worker)
    await _put(served, _object(make_manifest()))
    deadline = {"activeDeadlineSeconds": 60}
    suspended = await _put(served, _object(make_manifest(suspend=True, **deadline)))
    assert "startTime" not in suspended.json()["status"]
    assert await worker.lease(init=1) == []
    waiting = asyncio.create_task(worker.lease(init=1, wait=60))
    await served.until_waiting()
    resumed = await _put(served, _object(make_manifest(**deadline)))
    assert len(await asyncio.wait_for(waiting, patience(10))) == 1
    assert "startTime" in resumed.json()["status"]

    def deadline_of(conn: Any) -> float:
        row = conn.execute(sa.select(jobs.c.deadline_at, jobs.c.started_at)).one()
        left: float = row.deadline_at - row.started_at
        return left

    assert await served.plane.database.read(deadline_of) == 60


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"samplesPerTask": 3}, "spec.samplesPerTask"),
        ({"handler": "math"}, "spec.handler"),
        ({"tasks": {"inline": TASKS}}, "spec.tasks"),
        ({"sandbox": {"warm": 1}}, "spec.sandbox"),
        ({"placement": "local"}, "spec.placement"),
        ({"agent": {"type": "oracle", "maxTurns": 3}, "priority": 3}, "spec.agent"),
    ],
)
@pytest.mark.parametrize(("old", "new"), [("u1", "u1"), (None, "u1"), ("u1", None)])
async def test_another_job_conflicts(
    served: Any, change: Any, field: str, old: str | None, new: str | None
) -> None:
    before = (await _put(served, _object(make_manifest(), old))).json()
    answer = await _put(served, _object(make_manifest(**change), new))
    assert (answer.status_code, answer.json()["reason"]) == (409, "AlreadyExists")
    assert [line.split(":")[0] for line in answer.json()["errors"]] == [field]
    after = await _job(served)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert (after["metadata"]["generation"], after["spec"]["priority"]) == (1, 0), "nothing was changed"


async def test_an_object_made_anew_replaces_the_job(served: Any) -> None:
    first = (await _put(served, _object(make_manifest()))).json()
    worker = Worker(served.worker, node="kubernetes")
    (lease, _) = await worker.lease(init=2)
    shape = {"cpu": 1.0, "memory_bytes": 1, "disk_bytes": 1, "processes": 16}
    body = {"rollout": lease["rollout"], "token": lease["token"], "shape": shape}
    assert (await served.worker.post("/v1/claims", json=body)).status_code == 200
    made = await _put(served, _object(make_manifest(samplesPerTask=3), "u2"))
    assert made.status_code == 201, made.text
    assert made.json()["metadata"]["uid"] != first["metadata"]["uid"]
    assert made.json()["metadata"]["annotations"][UID] == "u2"
    assert made.json()["status"]["counts"]["init"]["queued"] == 6
    assert (await worker.heartbeat(lease))["cancelled"] != []
    assert [claim.state for claim in (await _warm(served)).claims] == ["Released"]
    again = await _put(served, _object(make_manifest(samplesPerTask=3), "u2"))
    assert (again.status_code, again.json()["metadata"]["uid"]) == (200, made.json()["metadata"]["uid"])


async def _unfinished(served: Any) -> dict[str, str | None]:
    """Return name and cancel reason of each job that a driver still has to end."""
    items = (await served.driver.get("/v1/rolloutjobs", params={"finished": False})).json()["items"]
    reason = "rollyard.dev/cancel-reason"
    return {item["metadata"]["name"]: item["metadata"]["annotations"].get(reason) for item in items}


@pytest.mark.parametrize("before", ["running", "cancelled", "succeeded"])
async def test_deleting_the_job_of_an_object_is_its_drivers_business(served: Any, before: str) -> None:
    await _put(served, _object(make_manifest()))
    if before == "cancelled":
        await served.admin.post("/v1/rolloutjobs/job/cancel", json={})
    elif before == "succeeded":
        await Worker(served.worker).finish_all()
    for _ in range(2):
        asked = await served.admin.delete("/v1/rolloutjobs/job")
        assert (asked.status_code, asked.json()["deleted"]) == (202, False)
        assert await _unfinished(served) == {"job": "Deleted"}
    counts = (await _job(served))["status"]["counts"]
    assert counts["succeeded" if before == "succeeded" else "cancelled"] == 2
    kept = await _put(served, _object(make_manifest()))
    assert kept.status_code == 200, "the driver may register it once more before it looks"
    assert kept.json()["metadata"]["annotations"]["rollyard.dev/cancel-reason"] == "Deleted"
    done = await served.driver.delete("/v1/rolloutjobs/job")
    assert (done.status_code, done.json()["deleted"]) == (202, True)
    assert await _unfinished(served) == {}
    assert (await served.admin.get("/v1/rolloutjobs/job")).status_code == 404


async def test_the_time_to_live_of_an_objects_job(served: Any) -> None:
    await _put(served, _object(make_manifest(ttlSecondsAfterFinished=600)))
    await Worker(served.worker).finish_all()
    await served.plane.sweep()

    def later(tx: Any) -> None:
        tx.now += 300
        enforce(tx)

    await served.plane.database.write(later)
    assert await _unfinished(served) == {}
    await _put(served, _object(make_manifest(ttlSecondsAfterFinished=60)))
    for _ in range(2):
        await served.plane.database.write(later)
        assert await _unfinished(served) == {"job": "Deleted"}, "its driver removes object and job"


async def test_the_object_of_a_submitted_job(served: Any) -> None:
    forged = _object(make_manifest())
    await served.admin.post("/v1/rolloutjobs", json=forged)
    assert UID not in (await _job(served))["metadata"]["annotations"], "only registering counts"
    adopted = await _put(served, _object(make_manifest(), "u5"))
    assert adopted.status_code == 200
    assert adopted.json()["metadata"]["annotations"][UID] == "u5"
    kept = await _put(served, _object(make_manifest(), None))
    assert kept.json()["metadata"]["annotations"][UID] == "u5"


async def test_what_of_an_object_is_kept(served: Any) -> None:
    manifest = _object(
        make_manifest(),
        uid="object",
        generation=12,
        resourceVersion="5",
        managedFields=[{"manager": "kubectl"}],
        labels={"a": "b"},
    )
    manifest["metadata"]["annotations"] = {
        UID: "u1",
        "kubectl.kubernetes.io/last-applied-configuration": "{}",
        "rollyard.dev/closed": "true",
        "rollyard.dev/cancel-reason": "Cancelled",
        "note": "x",
    }
    manifest["spec"]["tasks"] = {"stream": True}
    manifest["status"] = {"phase": "Run"}
    told = (await _put(served, manifest)).json()
    assert told["metadata"].keys() == {
        "name", "namespace", "labels", "annotations", "uid", "generation", "creationTimestamp",
    }  # fmt: skip
    assert told["metadata"]["annotations"] == {UID: "u1", "note": "x"}
    assert (told["metadata"]["generation"], told["status"]["phase"]) == (1, "Pending")


async def test_tasks_of_a_config_map(served: Any) -> None:
    manifest = make_manifest(tasks={"configMapRef": {"name": "tasks"}})
    posted = await served.admin.post("/v1/rolloutjobs", json=manifest)
    assert posted.status_code == 422
    assert posted.json()["errors"][0].startswith("spec.tasks.configMapRef: only a driver on Kubernetes")
    missing = await _put(served, _object(manifest))
    assert missing.status_code == 422
    assert missing.json()["errors"][0].startswith("tasks: is required")
    broken = await _put(served, _object(manifest), tasks=[TASKS[0], {"id": "b"}])
    assert broken.status_code == 422
    assert broken.json()["errors"][0].startswith("tasks[1]")
    assert (await served.admin.get("/v1/rolloutjobs/job")).status_code == 404
    made = await _put(served, _object(manifest), tasks=TASKS)
    assert made.status_code == 201, made.text
    assert made.json()["spec"]["tasks"]["configMapRef"] == {"name": "tasks", "key": "tasks.jsonl"}
    for tasks in ({"tasks": TASKS}, {}):
        assert (await _put(served, _object(manifest), **tasks)).status_code == 200
    assert (await _job(served))["status"]["counts"]["total"] == 2
    assert (await served.admin.post("/v1/rolloutjobs", json=manifest)).status_code == 200, "it is there"
    assert await Worker(served.worker).finish_all() == 2
    other = await _put(served, _object(make_manifest("other")), tasks=TASKS)
    assert other.json()["errors"] == ["tasks: belong to a job whose spec.tasks is a configMapRef"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/rolloutjobs/other", {"name": "job"}, "metadata.name"),
        ("/v1/rolloutjobs/job?namespace=team", {"name": "job", "namespace": "else"}, "metadata.namespace"),
        ("/v1/rolloutjobs/job", {"name": "job", "annotations": {UID: "u" * 129}}, "metadata.annotations"),
    ],
)
async def test_refused_by_field(served: Any, path: str, body: Any, field: str) -> None:
    manifest = make_manifest() | {"metadata": body}
    answer = await served.driver.put(path, json={"manifest": manifest})
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0].startswith(field)
    for wrong, name in (({}, "manifest"), ({"manifest": manifest, "task": []}, "task")):
        refused = await served.driver.put(path, json=wrong)
        assert refused.json()["errors"][0].startswith(name)
    handler = await served.driver.put("/v1/rolloutjobs/job", json={"manifest": make_manifest(handler="no")})
    assert (handler.status_code, handler.json()["reason"]) == (422, "NotInstalled")


async def test_namespaces_and_roles(served: Any) -> None:
    body = {"manifest": make_manifest()}
    assert (await served.worker.put("/v1/rolloutjobs/job", json=body)).status_code == 403
    assert (await served.worker.delete("/v1/rolloutjobs/job")).status_code == 403
    team = await served.driver.put("/v1/rolloutjobs/job?namespace=team", json={"manifest": make_manifest()})
    assert (team.status_code, team.json()["metadata"]["namespace"]) == (201, "team")
    assert (await served.admin.put("/v1/rolloutjobs/job", json=body)).status_code == 201
    assert (await served.driver.delete("/v1/rolloutjobs/job?namespace=team")).status_code == 202
    assert (await served.driver.get("/v1/rolloutjobs/job?namespace=team")).status_code == 404
    assert (await served.driver.get("/v1/rolloutjobs/job")).status_code == 200


async def test_full_queue(settings: Any) -> None:
    async with serving(settings, max_queued=2) as served:
        assert (await _put(served, _object(make_manifest()))).status_code == 201
        full = await _put(served, _object(make_manifest("other")))
        assert (full.status_code, full.json()["reason"]) == (429, "QueueFull")


async def test_only_unfinished_jobs(served: Any) -> None:
    for name in ("one", "two", "three"):
        await _put(served, _object(make_manifest(name)))
    await served.driver.post("/v1/rolloutjobs/two/cancel", json={})

    async def names(**query: Any) -> list[str]:
        items = await listed(served.driver, "/v1/rolloutjobs", omit="tasks", limit=1, **query)
        return [item["metadata"]["name"] for item in items]

    assert await names(finished=False) == ["one", "three"]
    assert await names(finished=True) == ["two"]
    assert await names() == ["one", "two", "three"]


async def test_unfinished_jobs_are_waited_on(served: Any) -> None:
    async def look(revision: int | None = None, wait: float = 0.0) -> UnfinishedJobs:
        params = {"wait": wait} if revision is None else {"wait": wait, "revision": revision}
        answer = await served.driver.get("/v1/unfinished", params=params)
        assert answer.status_code == 200, answer.text
        return UnfinishedJobs.model_validate_json(answer.content)

    async def after(change: Any) -> UnfinishedJobs:
        before = await look()
        waiting = asyncio.create_task(look(before.revision, 60))
        await served.until_waiting()
        assert (await change).status_code < 300
        return await asyncio.wait_for(waiting, patience(10))

    (one,) = (await after(_put(served, _object(make_manifest("one"))))).jobs
    assert (one.namespace, one.name, one.generation, one.cancel_reason) == ("default", "one", 1, "")
    two = (await after(_put(served, _object(make_manifest("two"))))).jobs[1]
    assert (two.name, two.uid) == ("two", (await _job(served, "two"))["metadata"]["uid"])
    changed = await after(served.admin.patch("/v1/rolloutjobs/one", json={"suspend": True}))
    assert [job.generation for job in changed.jobs] == [2, 1]
    ended = await after(served.admin.post("/v1/rolloutjobs/one/cancel", json={}))
    assert "one" not in {job.name for job in ended.jobs if not job.cancel_reason}
    unchanged = await look()
    assert await look(unchanged.revision, 0.05) == unchanged
    refused = await served.worker.get("/v1/unfinished")
    assert refused.status_code == 403


async def test_warm_sandboxes(served: Any) -> None:
    sandbox = {"image": "docker://busybox", "warm": 3, "resources": {"cpu": "500m", "memory": "2Gi"}}
    manifest = make_manifest(sandbox=sandbox)
    await served.admin.post("/v1/rolloutjobs", json=manifest)
    await _admit(served)
    start = await _warm(served)
    assert start.warm == [], "no object, no sandboxes"
    following = asyncio.create_task(_warm(served, revision=start.revision, wait=60))
    await served.until_waiting()
    await _put(served, _object(manifest))
    (want,) = (await asyncio.wait_for(following, patience(10))).warm
    assert (want.namespace, want.job, want.count) == ("default", "job", 3)
    assert want.job_uid == (await _job(served))["metadata"]["uid"]
    assert (want.shape.image, want.shape.cpu, want.shape.memory_bytes) == ("busybox", 0.5, 2 << 30)
    assert (await _warm(served, namespace="team")).warm == []

    async def after(change: Any) -> ClaimList:
        before = await _warm(served)
        waiting = asyncio.create_task(_warm(served, revision=before.revision, wait=60))
        await served.until_waiting()
        await change
        return await asyncio.wait_for(waiting, patience(10))

    assert (await after(_admit(served, "False"))).warm == []
    assert len((await after(_admit(served))).warm) == 1
    assert (
        await after(_put(served, _object(manifest | {"spec": manifest["spec"] | {"suspend": True}})))
    ).warm == []
    assert len((await after(_put(served, _object(manifest)))).warm) == 1
    assert (await after(Worker(served.worker).finish_all())).warm == []


@pytest.mark.parametrize("end", ["cancel", "delete"])
async def test_no_warm_sandboxes_for_a_job_that_is_over(served: Any, end: str) -> None:
    await _put(served, _object(make_manifest()))
    await _admit(served)
    before = await _warm(served)
    assert before.warm[0].count == 4
    waiting = asyncio.create_task(_warm(served, revision=before.revision, wait=60))
    await served.until_waiting()
    if end == "cancel":
        await served.driver.post("/v1/rolloutjobs/job/cancel", json={})
    else:
        await served.driver.delete("/v1/rolloutjobs/job")
    assert (await asyncio.wait_for(waiting, patience(10))).warm == []


@pytest.mark.parametrize(
    "spec",
    [
        {"placement": "slurm"},
        {"placement": "local"},
        {"sandbox": {"warm": 0}},
        # Neither the agent nor the handler needs a sandbox before Eval.
        {"handler": "math", "agent": {"type": "oracle", "tools": ["submit"]}},
        {"handler": "code", "agent": {"type": "single_turn"}, "backendRef": {"name": "p"}},
    ],
)
async def test_no_warm_sandboxes_where_none_are_wanted(served: Any, spec: Any) -> None:
    await _put(served, _object(make_manifest(**spec)))
    await _admit(served)
    assert (await _warm(served)).warm == []


def _pool(uid: str | None = "u1", **spec: Any) -> dict[str, Any]:
    return pool_manifest("pool", {"model": "tiny", **spec}, annotations={} if uid is None else {UID: uid})


async def _put_pool(served: Any, pool: dict[str, Any]) -> Any:
    return await served.driver.put("/v1/backendpools/pool", json=pool)


def test_what_the_schema_calls_immutable_is_fixed() -> None:
    properties = RolloutJobSpec.model_json_schema()["properties"]
    rule = IMMUTABLE["x-kubernetes-validations"]
    immutable = {
        name
        for name, schema in properties.items()
        if any(part.get("x-kubernetes-validations") == rule for part in (schema, *schema.get("anyOf", ())))
    }
    assert "sandbox" in immutable
    assert "placement" in immutable
    assert immutable == manifests._FIXED


async def test_registering_a_pool(served: Any) -> None:
    made = await _put_pool(served, _pool())
    assert made.status_code == 201, made.text
    for _ in range(2):
        again = await _put_pool(served, _pool())
        assert (again.status_code, again.json()) == (200, made.json())
    changed = (await _put_pool(served, _pool(replicas=3, maxActiveRollouts=5))).json()
    assert (changed["metadata"]["generation"], changed["spec"]["replicas"]) == (2, 3)
    kept = (await _put_pool(served, _pool(None, replicas=3, maxActiveRollouts=5))).json()
    assert kept["metadata"]["annotations"] == {UID: "u1"}
    assert kept["metadata"]["generation"] == 2
    for spec in ({"model": "other"}, {"engine": {"type": "vllm"}}):
        other = await _put_pool(served, _pool(**spec))
        assert (other.status_code, other.json()["reason"]) == (409, "AlreadyExists")
        assert "cannot be changed" in other.json()["errors"][0]
    wrong = await served.driver.put("/v1/backendpools/else", json=_pool())
    assert wrong.json()["errors"][0].startswith("metadata.name: must be 'else'")


async def test_deleting_the_pool_of_an_object_is_its_drivers_business(served: Any) -> None:
    await _put_pool(served, _pool())
    request = "rollyard.dev/delete-requested"
    for _ in range(2):
        asked = await served.admin.delete("/v1/backendpools/pool")
        assert (asked.status_code, asked.json()["deleted"]) == (200, False)
        told = (await _put_pool(served, _pool(replicas=2))).json()
        assert told["metadata"]["annotations"] == {UID: "u1", request: "true"}
    done = await served.driver.delete("/v1/backendpools/pool")
    assert (done.status_code, done.json()["deleted"]) == (200, True)
    forged = _pool()
    forged["metadata"]["annotations"][request] = "true"
    assert (await _put_pool(served, forged)).json()["metadata"]["annotations"] == {UID: "u1"}


async def test_a_pool_made_anew_replaces_the_old_one(served: Any) -> None:
    first = (await _put_pool(served, _pool())).json()
    report = {"backends": [{"url": "http://a", "ready": True}]}
    assert (await served.driver.put("/v1/backendpools/pool/backends", json=report)).status_code == 200

    def past_update(tx: Any) -> None:
        number = tx.conn.execute(sa.select(pools.c.id)).scalar_one()
        tx.conn.execute(
            sa.insert(weight_updates).values(
                pool_id=number, policy_version="v1", policy_index=1, request=b"{}", state="Succeeded",
                verified=True, verified_by="label", message="", progress=b"{}", created_at=tx.now,
            )
        )  # fmt: skip

    await served.plane.database.write(past_update)
    made = await _put_pool(served, _pool("u2", model="other"))
    assert made.status_code == 201, made.text
    assert made.json()["metadata"]["uid"] != first["metadata"]["uid"]
    assert made.json()["status"]["backends"] == []


async def test_an_external_pool_follows_its_object(served: Any) -> None:
    def external(*urls: str) -> dict[str, Any]:
        return _pool(engine={"type": "external", "external": {"urls": list(urls)}})

    await _put_pool(served, external("http://a"))
    told = (await _put_pool(served, external("http://a", "http://b"))).json()
    assert [backend["url"] for backend in told["status"]["backends"]] == ["http://a", "http://b"]
