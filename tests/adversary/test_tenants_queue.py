"""What waits in the database: no namespace takes the room of all others for rollouts and claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_testing.adversary.restplane import Yard, control_plane
from rollyard_testing.manifests import job_manifest

pytestmark = pytest.mark.attack(boundary="tenants", surface="queue of rollouts")


SHAPE = {"image": "busybox", "cpu": 1.0, "memory_bytes": 1 << 28, "disk_bytes": 1 << 28, "processes": 64}
SAMPLING = {"targetGroups": 1, "maxInFlightGroups": 1}


async def submit(yard: Yard, namespace: str, name: str, count: int, **spec: Any) -> httpx.Response:
    """Submit a job of so many rollouts, and return the answer."""
    inline = [{"id": f"t{i}", "prompt": "p"} for i in range(count)]
    manifest = job_manifest(
        name,
        {"tasks": {"inline": inline}, "handler": "shell", "agent": {"type": "oracle"}, **spec},
        namespace=namespace,
    )
    return await yard.admin.post("/v1/rolloutjobs", json=manifest)


FULL_QUEUE = pytest.mark.attack(
    "one namespace submits or pushes so many that nobody else's job is taken, also as groups that wait",
    stopped_by="a bound for each namespace, a quarter of that of all",
)


@FULL_QUEUE
async def test_one_namespace_does_not_fill_the_queue_of_all(tmp_path: Path) -> None:
    async with control_plane(tmp_path, max_queued=30, max_queued_per_namespace=10) as yard:
        for turn in range(4):
            answer = await submit(yard, "greedy", f"job-{turn}", 4)
            assert answer.status_code == (201 if turn < 2 else 429), answer.text
        assert answer.json()["reason"] == "QueueFull"
        assert "namespace 'greedy' has 8 unfinished rollouts" in answer.json()["detail"]
        assert int(answer.headers["retry-after"]) > 0
        stream = await submit(yard, "greedy", "stream", 2)
        assert stream.status_code == 201, "what still fits is taken"
        assert (await submit(yard, "modest", "job", 10)).status_code == 201
        # All of them together have a bound, too.
        assert (await submit(yard, "third", "job", 10)).status_code == 201
        last = await submit(yard, "fourth", "job", 1)
        assert (last.status_code, last.json()["reason"]) == (429, "QueueFull")
        assert "there are 30 unfinished rollouts" in last.json()["detail"]


@FULL_QUEUE
async def test_groups_that_wait_take_the_room_of_their_own_namespace(tmp_path: Path) -> None:
    async with control_plane(tmp_path, max_queued=30, max_queued_per_namespace=10) as yard:
        sampled = {"samplesPerTask": 2, "dynamicSampling": SAMPLING}
        assert (await submit(yard, "greedy", "job", 5, **sampled)).status_code == 201
        assert (await submit(yard, "greedy", "other", 1)).status_code == 429
        assert (await submit(yard, "modest", "job", 10)).status_code == 201


@FULL_QUEUE
async def test_a_push_to_a_stream_is_bounded_too(tmp_path: Path) -> None:
    async with control_plane(tmp_path, max_queued=30, max_queued_per_namespace=10) as yard:
        assert (await submit(yard, "greedy", "job", 0, tasks={"stream": True})).status_code == 201
        path, whose = "/v1/rolloutjobs/job/tasks", {"namespace": "greedy"}
        tasks = [{"id": f"t{i}", "prompt": "p"} for i in range(11)]
        refused = await yard.admin.post(path, params=whose, json={"tasks": tasks})
        assert (refused.status_code, refused.json()["reason"]) == (429, "QueueFull")
        taken = await yard.admin.post(path, params=whose, json={"tasks": tasks[:10]})
        assert taken.json()["accepted"] == 10


@pytest.mark.attack(
    "one namespace's claims, which nobody fulfils, take the room of all",
    surface="`/v1/claims`",
    stopped_by="a bound for each namespace, a quarter of that of all",
)
@pytest.mark.parametrize(("total", "each", "most"), [(40, 8, 7), (8, 40, 7)])
async def test_claims_of_one_namespace_leave_room_for_those_of_others(
    tmp_path: Path, total: int, each: int, most: int
) -> None:
    """One claim in eight is for Eval, of a namespace's as of all."""
    async with control_plane(tmp_path, max_claims=total, max_claims_per_namespace=each) as yard:
        await yard.submit("greedy", tasks=12)
        assert (await submit(yard, "modest", "job", 1)).status_code == 201

        async def file(lease: dict[str, Any]) -> int:
            asked = {"rollout": lease["rollout"], "token": lease["token"], "shape": SHAPE}
            return (await yard.worker.post("/v1/claims", json=asked)).status_code

        leases = await yard.lease(yard.worker, "greedy", init=12)
        assert [await file(lease) for lease in leases] == [200] * most + [429] * (12 - most)
        body = {"worker": "w", "node": "n", "capacity": {"init": 1}, "job": "job", "namespace": "modest"}
        (lease,) = (await yard.worker.post("/v1/leases", json=body)).json()["leases"]
        assert await file(lease) == (200 if each < total else 429)
