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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rollyard_crds.token_arrays import PackedSegment

from rollyard_bench.processes import control_plane
from rollyard_bench.results import Baseline, Measurement, Settings

CONNECTIONS = 8
BATCH = 8
TOKENS = 512


@dataclass(frozen=True, slots=True)
class Server:
    """A running control plane process."""

    pid: int
    port: int
    token: str


class Connection:
    """One keep-alive HTTP/1.1 connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {server.token}\r\n"

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._server.port)
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


def _trajectory(lease: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": lease["rollout"],
        "job": lease["job"],
        "task_id": lease["task"]["id"],
        "group_id": lease["group_id"],
        "sample_index": lease["sample_index"],
    }


def _result(lease: dict[str, Any]) -> dict[str, Any]:
    item = {key: lease[key] for key in ("rollout", "token", "stage")}
    if lease["stage"] == "init":
        item["sandbox"] = {
            "provider": "none",
            "id": f"{lease['rollout']}-{lease['token']}",
            "node": "bench",
            "address": "unix:/none",
        }
    elif lease["stage"] == "run":
        item["trajectory"] = _trajectory(lease)
        item["segments"] = [_SEGMENT]
    else:
        item["reward"] = 1.0
    return item


async def _drive(server: Server, latencies: list[float]) -> int:
    cycles = 0
    ask = orjson.dumps(
        {"worker": "bench", "node": "bench", "capacity": {"init": BATCH, "run": 0, "eval": 0}, "wait": 0}
    )
    asks = [ask.replace(b'"init":8,"run":0,"eval":0', caps) for caps in _CAPACITIES]
    async with Connection(server) as connection:
        idle = 0
        turn = 0
        while idle < len(asks):
            leases = (await connection.call("POST", "/v1/leases", asks[turn % len(asks)]))["leases"]
            turn += 1
            if not leases:
                idle += 1
                continue
            idle = 0
            body = orjson.dumps({"worker": "bench", "results": [_result(lease) for lease in leases]})
            began = time.perf_counter()
            answer = await connection.call("POST", "/v1/leases/complete", body)
            latencies.append(time.perf_counter() - began)
            cycles += sum(item["outcome"] == "accepted" for item in answer["outcomes"])
    return cycles


_CAPACITIES = (b'"eval":8', b'"run":8', b'"init":8')


async def _measure(server: Server, rollouts: int) -> dict[str, float]:
    samples = 8
    manifest = {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "bench"},
        "spec": {
            "tasks": {"inline": [{"id": f"t{i}", "prompt": "x" * 400} for i in range(rollouts // samples)]},
            "handler": "shell",
            "agent": {"type": "oracle"},
            "samplesPerTask": samples,
        },
    }
    async with Connection(server) as connection:
        await connection.call("POST", "/v1/rolloutjobs", orjson.dumps(manifest))
    latencies: list[float] = []
    cpu, began = _cpu_seconds(server.pid), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_drive(server, latencies)) for _ in range(CONNECTIONS)]
    seconds = time.perf_counter() - began
    cpu = _cpu_seconds(server.pid) - cpu
    cycles = sum(task.result() for task in tasks)
    async with Connection(server) as connection:
        counts = (await connection.call("GET", "/v1/rolloutjobs/bench"))["status"]["counts"]
    if counts["succeeded"] != counts["total"] or cycles != 3 * counts["total"]:
        raise RuntimeError(f"{cycles} cycles were accepted, and the job says {counts}")
    latencies.sort()
    return {
        "cycles_per_second": cycles / seconds,
        "rollouts_per_second": counts["total"] / seconds,
        "complete_p50_ms": 1e3 * latencies[len(latencies) // 2],
        "server_cpu_ms_per_cycle": 1e3 * cpu / cycles,
    }


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0  # USER_HZ is 100 on every Linux.


async def measure(settings: Settings) -> list[Measurement]:
    """Run all rollouts of a job through a fresh control plane, and count the cycles."""
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        async with control_plane(Path(name)) as plane:
            port = int(plane.url.rpartition(":")[2])
            server = Server(plane.program.process.pid, port, plane.tokens["admin"])
            found = await _measure(server, 800 if settings.quick else 2000)
    rate = found["cycles_per_second"]
    # This is what one core could do if the client cost nothing: it shows how far the server is from its own
    # bound.
    bound = Baseline("server's CPU bound, one core", 1e3 / found["server_cpu_ms_per_cycle"])
    latency, cpu = found["complete_p50_ms"], found["server_cpu_ms_per_cycle"]
    how = (
        f"{CONNECTIONS} connections lease and complete up to {BATCH} rollouts a request, "
        f"through all three stages, Run with a trajectory of {TOKENS} tokens; each answer comes after "
        f"the commit; {found['rollouts_per_second']:.0f} whole rollouts/s, a completion of {BATCH} "
        f"takes {latency:.1f} ms (p50), {cpu:.2f} ms of server CPU a cycle"
    )
    return [Measurement("lease_cycles", rate, bound, how)]
