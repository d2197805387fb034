"""Lease → complete cycles a second, through HTTP, of a real control plane process on SQLite.

Eight connections each ask for up to 8 rollouts of any stage and complete them in one request, until every
rollout of a job has been through Init, Run and Eval. A cycle is one rollout leased and completed in one
stage. Every completion of a Run carries a trajectory of 512 tokens. The control plane commits before it
answers. Client and server share the machine; the client writes HTTP/1.1 by hand, because the server is what
is measured.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import psutil
from rollyard_crds.token_arrays import PackedSegment

from rollyard_bench.harness import manifest
from rollyard_bench.processes import ControlPlane, control_plane
from rollyard_bench.results import Baseline, Measurement, Settings

CONNECTIONS = 8
NODE = "bench"
"""The node of the workers, and of their sandboxes, which do not exist."""
BATCH = 8
TOKENS = 512


class Connection:
    """One keep-alive HTTP/1.1 connection."""

    def __init__(self, plane: ControlPlane) -> None:
        self._port = int(plane.url.rpartition(":")[2])
        self._head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {plane.tokens['admin']}\r\n"

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def call(self, method: str, path: str, body: bytes = b"") -> Any:
        """Return the decoded JSON answer, or raise RuntimeError for any status but 200 and 201."""
        head = f"{method} {path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(headers.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        answer = await self._reader.readexactly(length)
        if headers.split(b" ", 2)[1] not in (b"200", b"201"):
            raise RuntimeError(answer.decode(errors="replace"))
        return orjson.loads(answer)


_SEGMENT = PackedSegment.of(
    prompt_ids=list(range(64)),
    response_ids=list(range(TOKENS)),
    loss_mask=[1] * TOKENS,
    logprobs=[-0.123456] * TOKENS,
    policy_versions=["v1"] * TOKENS,
).model_dump(mode="json")


def stage_result(lease: dict[str, Any], segment: dict[str, Any]) -> dict[str, Any]:
    """Return what a worker reports that has completed the stage of a lease, which is JSON.

    Every second sample has the reward 1.
    """
    result: dict[str, Any] = {key: lease[key] for key in ("rollout", "token", "stage")}
    if lease["stage"] == "init":
        sandbox = f"{lease['rollout']}-{lease['token']}"
        result["sandbox"] = {"provider": "none", "id": sandbox, "node": NODE, "address": "unix:/none"}
    elif lease["stage"] == "run":
        run = {key: lease[key] for key in ("job", "group_id", "sample_index")}
        result["trajectory"] = {**run, "id": lease["rollout"], "task_id": lease["task"]["id"]}
        result["segments"] = [segment]
    else:
        result["reward"] = float(lease["sample_index"] % 2)
    return result


async def _drive(plane: ControlPlane, latencies: list[float]) -> int:
    cycles = 0
    asks = [
        orjson.dumps({"worker": "bench", "node": NODE, "capacity": {stage: BATCH}, "wait": 0})
        for stage in ("eval", "run", "init")
    ]
    async with Connection(plane) as connection:
        idle = turn = 0
        while idle < len(asks):
            leases = (await connection.call("POST", "/v1/leases", asks[turn % len(asks)]))["leases"]
            turn += 1
            if not leases:
                idle += 1
                continue
            idle = 0
            body = orjson.dumps(
                {"worker": "bench", "results": [stage_result(lease, _SEGMENT) for lease in leases]}
            )
            began = time.perf_counter()
            answer = await connection.call("POST", "/v1/leases/complete", body)
            latencies.append(time.perf_counter() - began)
            cycles += sum(item["outcome"] == "accepted" for item in answer["outcomes"])
    return cycles


async def _measure(plane: ControlPlane, rollouts: int) -> Measurement:
    samples = 8
    job = manifest(
        "bench",
        tasks={"inline": [{"id": f"t{i}", "prompt": "x" * 400} for i in range(rollouts // samples)]},
        handler="shell",
        agent={"type": "oracle"},
        samplesPerTask=samples,
    )
    async with Connection(plane) as connection:
        await connection.call("POST", "/v1/rolloutjobs", orjson.dumps(job))
    latencies: list[float] = []
    process = psutil.Process(plane.program.process.pid)
    cpu, began = sum(process.cpu_times()[:2]), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_drive(plane, latencies)) for _ in range(CONNECTIONS)]
    seconds = time.perf_counter() - began
    cpu = sum(process.cpu_times()[:2]) - cpu
    cycles = sum(task.result() for task in tasks)
    async with Connection(plane) as connection:
        counts = (await connection.call("GET", "/v1/rolloutjobs/bench"))["status"]["counts"]
    if counts["succeeded"] != counts["total"] or cycles != 3 * counts["total"]:
        raise RuntimeError(f"{cycles} cycles were accepted, and the job says {counts}")
    # This is what one core could do if the client cost nothing: it shows how far the server is from its own
    # bound.
    bound = Baseline("server's CPU bound, one core", cycles / cpu)
    how = (
        f"{CONNECTIONS} connections lease and complete up to {BATCH} rollouts a request, "
        f"through all three stages, Run with a trajectory of {TOKENS} tokens; each answer comes after "
        f"the commit; {counts['total'] / seconds:.0f} whole rollouts/s, a completion of {BATCH} "
        f"takes {median(latencies) * 1e3:.1f} ms (p50), {cpu / cycles * 1e3:.2f} ms of server CPU a cycle"
    )
    return Measurement("lease_cycles", cycles / seconds, bound, how)


async def measure(settings: Settings) -> list[Measurement]:
    """Run all rollouts of a job through a fresh control plane, and count the cycles."""
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        async with control_plane(Path(name)) as plane:
            return [await _measure(plane, 800 if settings.quick else 2000)]
