"""Wire bytes per CPU second of server and client together, from the trajectory store to numpy arrays."""

from __future__ import annotations

import asyncio
import io
import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import orjson
import psutil
import pyarrow.parquet as pq
from rollyard_client.training.packed import ARRAYS, trajectories
from rollyard_crds.token_arrays import PackedSegment
from rollyard_testing.waiting import until

from rollyard_bench.harness import manifest
from rollyard_bench.leases import NODE, stage_result
from rollyard_bench.processes import ControlPlane, ProgramFailed, control_plane
from rollyard_bench.results import Baseline, Measurement, Settings

ROLLOUTS, PROMPT, RESPONSE = 2048, 1000, 7000
PATH = "/v1/rolloutjobs/delivery/trajectories"
SAMPLES = 16
STORED_SECONDS = 600.0
WARM_UP = 64
"""Rollouts that are read before the clock runs."""
NDJSON, PARQUET, MSGPACK = "application/x-ndjson", "application/vnd.apache.parquet", "application/msgpack"

Decode = Callable[[bytes], int]
"""A function that turns a page into arrays and returns the number of rollouts."""


def _arrays(segment: dict[str, Any]) -> int:
    """Return the number of tokens of a segment whose lists were made into arrays."""
    ids = np.array(segment["prompt_ids"], np.int32), np.array(segment["response_ids"], np.int32)
    mask, logprobs = np.array(segment["loss_mask"], np.int8), np.array(segment["logprobs"], np.float32)
    assert len(mask) == len(logprobs) == len(ids[1]) == RESPONSE
    return len(ids[0]) + len(ids[1])


def ndjson(page: bytes) -> int:
    """Make arrays of a page of JSON lines."""
    lines = page.splitlines()
    for line in lines:
        (segment,) = orjson.loads(line)["segments"]
        assert _arrays(segment) == PROMPT + RESPONSE
    return len(lines)


def packed(page: bytes) -> int:
    """Make arrays of a page in msgpack."""
    records = msgpack.unpackb(page)
    for record in records:
        (segment,) = record["segments"]
        assert _arrays(segment) == PROMPT + RESPONSE
    return len(records)


def parquet(page: bytes) -> int:
    """Make arrays of a Parquet file, without a copy of its columns."""
    segments = pq.read_table(io.BytesIO(page), columns=["segments"])["segments"].combine_chunks().flatten()
    for name, tokens in (("prompt_ids", PROMPT), ("response_ids", RESPONSE), ("logprobs", RESPONSE)):
        column = segments.field(name)
        assert len(column.flatten().to_numpy(zero_copy_only=False)) == tokens * len(segments)
    return len(segments)


def arrays(page: bytes) -> int:
    """Look at the arrays of a page with raw arrays, as `Client.array_pages` does."""
    records = trajectories(page, ARRAYS)
    for one in records:
        (segment,) = one.segments
        assert len(segment.prompt_ids) == PROMPT
        assert len(segment.response_ids) == len(segment.loss_mask) == len(segment.logprobs) == RESPONSE
    return len(records)


FORMATS: dict[str, tuple[str, Decode]] = {
    "NDJSON": (NDJSON, ndjson),
    "msgpack": (MSGPACK, packed),
    "msgpack with raw arrays": (ARRAYS, arrays),
    "Parquet": (PARQUET, parquet),
}


@dataclass(frozen=True, slots=True)
class Rate:
    """What the delivery of a step took in one format."""

    rollouts: int
    megabytes: float
    server: float
    """The seconds of CPU time of the server."""
    client: float
    """The seconds of CPU time of the client."""

    @property
    def value(self) -> float:
        """The wire bytes per CPU second of both, in MB/s."""
        return self.megabytes / (self.server + self.client)

    def __str__(self) -> str:
        tokens = self.rollouts * (PROMPT + RESPONSE) / (self.server + self.client) / 1e6
        return (
            f"{self.value:.0f} MB/s ({self.megabytes:.0f} MB; server {self.server:.2f} s, "
            f"client {self.client:.2f} s; {tokens:.1f} million tokens/s)"
        )


def _segment(rng: np.random.Generator) -> dict[str, Any]:
    mask = np.repeat(rng.integers(0, 2, RESPONSE // 100), 100)
    logprobs = (-rng.exponential(0.5, RESPONSE)).astype(np.float32) * mask
    return {
        "prompt_ids": rng.integers(0, 150_000, PROMPT).tolist(),
        "response_ids": rng.integers(0, 150_000, RESPONSE).tolist(),
        "loss_mask": mask.tolist(),
        "logprobs": [float(value) or 0.0 for value in logprobs],
        "policy_versions": ["step-120" if sampled else "" for sampled in mask],
    }


def _fill(http: httpx.Client, rollouts: int) -> None:
    """Make a job whose rollouts have all ended and are in the trajectory store."""
    tasks = [{"id": f"t{n}", "prompt": "p"} for n in range(rollouts // SAMPLES)]
    agent = {"type": "oracle"}
    job = manifest("delivery", tasks={"inline": tasks}, handler="shell", samplesPerTask=SAMPLES, agent=agent)
    http.post("/v1/rolloutjobs", json=job).raise_for_status()
    rng = np.random.default_rng(7)

    def result(lease: dict[str, Any]) -> dict[str, Any]:
        packed = PackedSegment.of(**_segment(rng)).model_dump(mode="json") if lease["stage"] == "run" else {}
        return stage_result(lease, packed)

    ask = {"worker": "w", "node": NODE, "capacity": {"init": 16, "run": 16, "eval": 16}}
    while leases := http.post("/v1/leases", json=ask).raise_for_status().json()["leases"]:
        body = orjson.dumps({"worker": "w", "results": [result(lease) for lease in leases]})
        headers = {"Content-Type": "application/json"}
        http.post("/v1/leases/complete", content=body, headers=headers).raise_for_status()

    def stored() -> bool:
        lines = http.get("/metrics").raise_for_status().text.splitlines()
        (waiting,) = [line for line in lines if line.startswith("rollyard_trajectories_unstored ")]
        return float(waiting.split()[1]) == 0

    until(stored, STORED_SECONDS, "the last record in the trajectory store", 0.2)


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _read(http: httpx.Client, server: psutil.Process, accept: str, decode: Decode, rollouts: int) -> Rate:
    """Read all rollouts page by page, and return what that took."""
    cursor, got, size = "", 0, 0
    before = _own_seconds(), sum(server.cpu_times()[:2])
    while got < rollouts:
        query: dict[str, str | int] = {"cursor": cursor, "limit": 1000}
        answer = http.get(PATH, params=query, headers={"Accept": accept}).raise_for_status()
        records = decode(answer.content)
        if not records:
            raise ProgramFailed(f"{got} of {rollouts} rollouts were delivered, and no more come")
        got += records
        size += len(answer.content)
        cursor = answer.headers["rollyard-cursor"]
    return Rate(got, size / 1e6, sum(server.cpu_times()[:2]) - before[1], _own_seconds() - before[0])


def deliver(plane: ControlPlane, rollouts: int, rounds: int) -> dict[str, list[Rate]]:
    """Return the rates of each format, measured in turns."""
    rates: dict[str, list[Rate]] = {name: [] for name in FORMATS}
    server = psutil.Process(plane.program.process.pid)
    headers = {"Authorization": f"Bearer {plane.tokens['admin']}"}
    with httpx.Client(base_url=plane.url, headers=headers, timeout=600, trust_env=False) as http:
        _fill(http, rollouts)
        for accept, decode in FORMATS.values():
            decode(http.get(PATH, params={"limit": WARM_UP}, headers={"Accept": accept}).content)
        for _ in range(rounds):
            for name, (accept, decode) in FORMATS.items():
                rates[name].append(_read(http, server, accept, decode, rollouts))
    return rates


async def measure(settings: Settings) -> list[Measurement]:
    """Measure every format, and report the best one beside the NDJSON of the same run."""
    rollouts, rounds = (512, 1) if settings.quick else (ROLLOUTS, 3)
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        async with control_plane(Path(name)) as plane:
            rates = await asyncio.to_thread(deliver, plane, rollouts, rounds)
    medians = {name: sorted(some, key=lambda rate: rate.value)[rounds // 2] for name, some in rates.items()}
    best = max(medians, key=lambda name: medians[name].value)
    each = "; ".join(f"{name} {rate}" for name, rate in medians.items())
    how = f"{rollouts} rollouts of {PROMPT + RESPONSE} tokens, {rounds} rounds; the best is {best}; {each}"
    baseline = Baseline("NDJSON", medians["NDJSON"].value)
    return [Measurement("delivery_rate", medians[best].value, baseline, how)]
