"""Jobs over REST: submit, streams, cancel, delete, deadlines, status, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from rollyard_api.jobs import jobs
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_testing.api.plane import Worker, make_manifest, serving


async def _post(served: Any, manifest: Any) -> Any:
    return await served.admin.post("/v1/rolloutjobs", json=manifest)


async def _job(served: Any, name: str = "job") -> dict[str, Any]:
    answer = await served.admin.get(f"/v1/rolloutjobs/{name}")
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


async def test_submitting_twice_is_the_same_as_once(served: Any) -> None:
    first = await _post(served, make_manifest())
    again = await _post(served, make_manifest())
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["metadata"]["uid"] == again.json()["metadata"]["uid"]
    other = await _post(served, make_manifest(samplesPerTask=2))
    assert other.status_code == 409
    assert other.headers["content-type"] == "application/problem+json"
    assert other.json()["reason"] == "AlreadyExists"
    assert other.json()["type"] == "https://rollyard.dev/docs/reference/reasons.html#alreadyexists"


async def test_same_name_in_another_namespace(served: Any) -> None:
    await _post(served, make_manifest())
    answer = await served.admin.post("/v1/rolloutjobs?namespace=team", json=make_manifest(samplesPerTask=2))
    assert answer.status_code == 201
    assert answer.json()["metadata"]["namespace"] == "team"
    listed = (await served.admin.get("/v1/rolloutjobs", params={"limit": 1})).json()
    rest = await served.admin.get("/v1/rolloutjobs", params={"continue": listed["metadata"]["continue"]})
    namespaces = [item["metadata"]["namespace"] for item in listed["items"] + rest.json()["items"]]
    assert namespaces == ["default", "team"]


@pytest.mark.parametrize(
    ("change", "field", "right"),
    [
        ({"colour": "red"}, "spec.colour", "unknown field"),
        ({"samplesPerTask": "many"}, "spec.samplesPerTask", "whole number"),
        ({"handler": "nobody"}, "spec.handler", "offered: code, harbor, math, mixed, shell, stem"),
        (
            {"agent": {"type": "oracle", "tools": ["bash", "hammer"]}},
            "spec.agent.tools[1]",
            "offered: bash",
        ),
        (
            {"agent": {"type": "psychic"}, "backendRef": {"name": "p"}},
            "spec.agent.type",
            "no agent 'psychic'",
        ),
        ({"tasks": {"inline": []}}, "spec.tasks", "at least one task"),
        ({"tasks": {"stream": True, "url": "file:///x"}}, "spec.tasks", "exactly one of"),
        (
            {"tasks": {"inline": [{"id": "a", "prompt": "p"}] * 2}},
            "spec.tasks.inline[1].id",
            "stands already",
        ),
        (
            {"tasks": {"url": "file:///nowhere/tasks.jsonl"}},
            "spec.tasks.url",
            "cannot be used: the installer does not",
        ),
        ({"agent": {"type": "tools"}}, "spec", "'backendRef' is required"),
    ],
)
async def test_refused_by_field(served: Any, change: Any, field: str, right: str) -> None:
    answer = await _post(served, make_manifest(**change))
    assert answer.status_code == 422, answer.text
    (line,) = [line for line in answer.json()["errors"] if line.startswith(field)]
    assert right in line
    assert (await served.admin.get("/v1/rolloutjobs/job")).status_code == 404


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("GET /v1/rolloutjobs?limt=1", "limt: unknown query parameter; did you mean 'limit'?"),
        (
            "POST /v1/rolloutjobs?namespac=team",
            "namespac: unknown query parameter; did you mean 'namespace'?",
        ),
        ("GET /v1/rolloutjobs/job?wait=1", "wait: unknown query parameter; known: namespace"),
        ("POST /v1/leases?wait=1", "wait: unknown query parameter; known: none"),
    ],
)
async def test_unknown_query_parameters_are_refused(served: Any, call: str, said: str) -> None:
    method, path = call.split()
    answer = await served.admin.request(method, path, json=make_manifest() if method == "POST" else None)
    assert (answer.status_code, answer.json()["errors"]) == (422, [said])
    assert (await served.admin.get("/v1/rolloutjobs")).json()["items"] == []


async def test_body_that_is_no_json(served: Any) -> None:
    answer = await served.admin.post("/v1/rolloutjobs", content=b"{")
    assert (answer.status_code, answer.json()["reason"]) == (400, "MalformedBody")


async def test_body_too_long(settings: Any) -> None:
    async with serving(settings, max_body_bytes=1000) as served:
        answer = await served.admin.post("/v1/rolloutjobs", content=b" " * 1001)
        assert (answer.status_code, answer.json()["reason"]) == (413, "BodyTooLarge")


def _write_tasks(path: Path, broken: dict[int, str] | None = None) -> None:
    lines = [json.dumps({"id": f"t{i}", "prompt": "p"}) for i in range(1, 10_001)]
    for number, line in (broken or {}).items():
        lines[number - 1] = line
    text = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


async def test_broken_line_refuses_the_whole_list(settings: Any, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("data") / "tasks.jsonl"
    _write_tasks(file, {7312: '{"id": "t7312", "prompt": 5}'})
    async with serving(settings, allow_tasks_from=(f"file://{file.parent}",)) as served:
        answer = await _post(served, make_manifest(tasks={"url": f"file://{file}"}))
        assert answer.status_code == 422
        assert answer.json()["errors"] == [
            f"spec.tasks.url: file://{file}: line 7312: prompt: must be a string"
        ]
        assert "line 7312" in answer.json()["detail"]
        assert (await served.admin.get("/v1/rolloutjobs")).json()["items"] == []


async def test_ten_thousand_tasks_from_a_compressed_file(settings: Any, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("data") / "tasks.jsonl.gz"
    _write_tasks(file)
    async with serving(settings, allow_tasks_from=(f"file://{file.parent}",)) as served:
        answer = await _post(served, make_manifest(tasks={"url": f"file://{file}"}))
        assert answer.status_code == 201, answer.text
        assert answer.json()["status"]["counts"]["init"] == {"queued": 10_000, "active": 0}
        file.unlink()
        assert (await _post(served, make_manifest(tasks={"url": f"file://{file}"}))).status_code == 200


async def test_stream(served: Any) -> None:
    await _post(served, make_manifest(tasks={"stream": True}))
    assert "rollyard.dev/closed" not in (await _job(served))["metadata"]["annotations"]
    push = "/v1/rolloutjobs/job/tasks"
    one, two = ({"id": name, "prompt": "p"} for name in ("a", "b"))
    assert (await served.admin.post(push, json={"tasks": [one]})).json() == {"accepted": 1, "repeated": 0}
    body = f"{json.dumps(one)}\n{json.dumps(two)}\n"
    headers = {"Content-Type": "application/x-ndjson"}
    answer = await served.admin.post(push, content=body, headers=headers)
    assert answer.json() == {"accepted": 1, "repeated": 1}
    broken = await served.admin.post(push, content=body + '{"id": 3}\n', headers=headers)
    assert broken.status_code == 422
    assert broken.json()["errors"][0].startswith("line 3: id:")
    assert await Worker(served.worker).finish_all() == 2
    assert "completionTime" not in (await _job(served))["status"]
    await served.admin.post("/v1/rolloutjobs/job/close")
    closed = await _job(served)
    assert "completionTime" in closed["status"]
    assert closed["metadata"]["annotations"]["rollyard.dev/closed"] == "true"
    late = await served.admin.post(push, json={"tasks": [{"id": "c", "prompt": "p"}]})
    assert (late.status_code, late.json()["reason"]) == (409, "JobClosed")


async def test_streams_have_tasks_of_their_own(served: Any) -> None:
    for name in ("job", "other"):
        await _post(served, make_manifest(name, tasks={"stream": True}))
        push = f"/v1/rolloutjobs/{name}/tasks"
        tasks = [{"id": one, "prompt": name} for one in ("a", "b")]
        assert (await served.admin.post(push, json={"tasks": tasks})).json() == {"accepted": 2, "repeated": 0}
        found = await served.admin.get(push, params={"id": ["b", "nobody", "a"]})
        read = [json.loads(line) for line in found.content.splitlines()]
        assert [(one["id"], one["prompt"]) for one in read] == [("b", name), ("a", name)]
    assert await Worker(served.worker).finish_all() == 4


async def test_full_queue_answers_429(settings: Any) -> None:
    async with serving(settings, max_queued=3) as served:
        assert (await _post(served, make_manifest())).status_code == 201
        answer = await _post(served, make_manifest("other"))
        assert (answer.status_code, answer.json()["reason"]) == (429, "QueueFull")
        assert int(answer.headers["retry-after"]) > 0
        assert (await served.admin.get("/v1/rolloutjobs/other")).status_code == 404


async def test_cancel_a_job(served: Any) -> None:
    await _post(served, make_manifest(samplesPerTask=2))
    worker = Worker(served.worker)
    (lease, *_) = await worker.lease(init=2)
    answer = await served.admin.post("/v1/rolloutjobs/job/cancel", json={})
    assert answer.json()["status"]["counts"]["cancelled"] == 4
    assert answer.json()["metadata"]["annotations"]["rollyard.dev/cancel-reason"] == "Cancelled"
    assert await worker.complete(worker.result(lease)) == ["cancelled"]
    records = [
        json.loads(line) for line in (await served.admin.get("/v1/rolloutjobs/job/trajectories")).iter_lines()
    ]
    assert {(r["status"], r["reason"], r["reward"]) for r in records} == {("cancelled", "Cancelled", None)}


async def test_cancel_a_group(served: Any) -> None:
    await _post(served, make_manifest(samplesPerTask=2))
    await _post(served, make_manifest("other", samplesPerTask=2))
    cancel = "/v1/rolloutjobs/job/cancel"
    answer = await served.admin.post(cancel, json={"group": "t1"})
    counts = answer.json()["status"]["counts"]
    assert (counts["cancelled"], counts["init"]["queued"]) == (2, 2)
    items = (await served.admin.get("/v1/rolloutjobs/job/rollouts")).json()["items"]
    assert {(one["group_id"], one["status"]) for one in items} == {("t0", "queued"), ("t1", "cancelled")}
    assert (await served.admin.post(cancel, json={"group": "t9"})).json()["reason"] == "GroupNotFound"
    foreign = (await served.admin.get("/v1/rolloutjobs/other/rollouts")).json()["items"][0]["id"]
    for rollout in ("r", foreign):
        refused = await served.admin.post(cancel, json={"rollout": rollout})
        assert (refused.status_code, refused.json()["reason"]) == (404, "RolloutNotFound")
    assert (await _job(served, "other"))["status"]["counts"]["cancelled"] == 0
    assert (await served.admin.post(cancel, json={"grup": "t1"})).status_code == 422


async def test_delete_frees_the_name_and_removes_the_rows(served: Any) -> None:
    await _post(served, make_manifest())
    worker = Worker(served.worker)
    (lease,) = await worker.lease(init=1)
    assert (await served.admin.delete("/v1/rolloutjobs/job")).status_code == 202
    assert (await served.admin.get("/v1/rolloutjobs/job")).status_code == 404
    assert (await _post(served, make_manifest(samplesPerTask=3))).status_code == 201
    assert (await worker.heartbeat(lease))["cancelled"] == [{"rollout": lease["rollout"], "token": 1}]

    await served.until_stored()
    await served.plane.sweep()
    assert (await worker.heartbeat(lease))["lost"] == [{"rollout": lease["rollout"], "token": 1}]
    assert (await _job(served))["status"]["counts"]["total"] == 6
    assert await worker.finish_all() == 6, "nothing of the new job was removed"


def _enforce(tx: Transaction) -> list[int]:
    """End what is over, and return the jobs whose rollouts are to be cancelled."""
    jobs.enforce(tx)
    return job_rows.cancelling(tx.conn)


async def test_the_deadline_of_a_suspended_job_does_not_run(served: Any) -> None:
    await _post(served, make_manifest(activeDeadlineSeconds=60))

    await served.admin.patch("/v1/rolloutjobs/job", json={"suspend": True})
    assert "startTime" not in (await _job(served))["status"]
    assert await served.later(1000, _enforce) == []
    await served.admin.patch("/v1/rolloutjobs/job", json={"suspend": False, "priority": 2})
    assert "startTime" in (await _job(served))["status"]
    assert await served.later(50, _enforce) == []
    assert len(await served.later(70, _enforce)) == 1


async def test_deadlines_and_times_to_live_are_those_of_each_job(served: Any) -> None:
    for name, seconds in (("a", 600), ("b", 60), ("c", 600), ("never", None)):
        limits = {} if seconds is None else {"ttlSecondsAfterFinished": seconds}
        await _post(served, make_manifest(name, **limits))
    await Worker(served.worker).finish_all()
    for name, seconds in (("late", 60), ("later", 600), ("unbounded", None)):
        limits = {} if seconds is None else {"activeDeadlineSeconds": seconds}
        await _post(served, make_manifest(name, **limits))
    await served.plane.sweep()

    async def left() -> list[str]:
        items = (await served.admin.get("/v1/rolloutjobs")).json()["items"]
        return [item["metadata"]["name"] for item in items]

    (ended,) = await served.later(120, _enforce)
    await served.plane.cancel_rest(ended)
    late = await _job(served, "late")
    assert late["metadata"]["annotations"]["rollyard.dev/cancel-reason"] == "DeadlineExceeded"
    assert late["status"]["counts"]["cancelled"] == 2
    assert await left() == ["a", "c", "never", "late", "later", "unbounded"]
    assert len(await served.later(1200, _enforce)) == 1
    assert await left() == ["never", "late", "later", "unbounded"]


async def test_suspend_and_priority(served: Any) -> None:
    await _post(served, make_manifest())
    await _post(served, make_manifest("other"))
    worker = Worker(served.worker)
    patched = await served.admin.patch("/v1/rolloutjobs/job", json={"suspend": True})
    assert patched.json()["spec"]["suspend"] is True
    assert patched.json()["metadata"]["generation"] == 2
    assert {lease["job"] for lease in await worker.lease(init=1)} == {"other"}
    await served.admin.patch("/v1/rolloutjobs/job", json={"suspend": False, "priority": 5})
    assert [lease["job"] for lease in await worker.lease(init=2)] == ["job", "job"]
    assert (await _post(served, make_manifest())).status_code == 200


async def test_status_of_the_driver(served: Any) -> None:
    await _post(served, make_manifest())

    def condition(status: str, when: str) -> dict[str, Any]:
        return {"type": "Running", "status": status, "reason": "Workers", "lastTransitionTime": when}

    async def put(phase: str, status: str, when: str) -> dict[str, Any]:
        body = {"phase": phase, "conditions": [condition(status, when)], "observedGeneration": 1}
        answer = await served.driver.put("/v1/rolloutjobs/job/status", json=body)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()["status"]
        return told

    first = await put("Init", "False", "2026-01-01T00:00:00Z")
    same = await put("Run", "False", "2026-01-01T00:00:09Z")
    assert same["phase"] == "Run"
    assert same["conditions"][0]["lastTransitionTime"] == first["conditions"][0]["lastTransitionTime"]
    flipped = await put("Run", "True", "2026-01-01T00:00:10Z")
    assert flipped["conditions"][0]["lastTransitionTime"] == "2026-01-01T00:00:10Z"
    assert flipped["counts"]["total"] == 2


async def test_roles(served: Any) -> None:
    path = "/v1/rolloutjobs"
    assert (await served.anonymous.get(path)).status_code == 401
    wrong = await served.anonymous.get(path, headers={"Authorization": "Bearer x"})
    assert (wrong.status_code, wrong.json()["reason"]) == (401, "Unauthorized")
    assert (await served.worker.get(path)).status_code == 403
    assert (await served.driver.get(path)).status_code == 200
    assert (await served.driver.post(path, json=make_manifest())).json()["reason"] == "Forbidden"
    assert (await served.anonymous.get("/healthz")).text == "ok"
    assert (await served.anonymous.get("/readyz")).text == "ok"
    assert b"rollyard_leases_granted_total" in (await served.admin.get("/metrics")).content
    assert (await served.admin.get("/v1/nothing")).json()["reason"] == "NotFound"
    assert "/v1/leases" in (await served.admin.get("/openapi.json")).json()["paths"]
