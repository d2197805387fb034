"""The time to 32 informative groups, with dynamic sampling in the control plane and without it."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from rollyard_bench.harness import stage_worker
from rollyard_bench.memory import manifest, posted
from rollyard_bench.processes import Program, ProgramFailed, control_plane
from rollyard_bench.results import Baseline, Measurement, Settings

HERE = Path(__file__).resolve().parents[1]
TARGET = 32
SAMPLES = 8
IN_FLIGHT = 32
"""The groups in flight with dynamic sampling, and the groups of a batch without it."""
SLOTS = 64
SIGMA = 1.0
UNINFORMATIVE = 0.6
TASKS = 320
JOB_SECONDS = 240.0
WAIT = 20  # seconds of one long poll


def tasks(seed: int, median_seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a seed, which are the same for every contestant."""
    draw = random.Random(seed)
    for number in count():
        latencies = [round(median_seconds * draw.lognormvariate(0.0, SIGMA), 4) for _ in range(SAMPLES)]
        same = draw.random() < UNINFORMATIVE
        rewards = [float(number % 2 if same else sample % 2) for sample in range(SAMPLES)]
        yield {
            "id": f"task-{number:04d}", "prompt": "Wait.", "solution": [{"name": "submit", "arguments": {}}],
            "metadata": {"latencies": latencies, "rewards": rewards},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reached:
    """One contestant's way to the target: its seconds, and the groups that ended on the way."""

    seconds: float
    groups: int


class Yard:
    """A control plane with one worker, and the jobs of the contestants."""

    def __init__(self, client: httpx.AsyncClient, worker: Program) -> None:
        self._client = client
        self._worker = worker
        self._jobs = count()

    async def ours(self, source: Iterator[dict[str, Any]]) -> Reached:
        """Let the control plane refill, until it says that the target is met."""
        sampling = {"targetGroups": TARGET, "maxInFlightGroups": IN_FLIGHT}
        begin = time.time()
        name = await self._job(list(islice(source, TASKS)), dynamicSampling=sampling)
        found = await self._follow(name, TARGET, "true")
        met = time.time()
        answer = await self._client.get(f"/v1/rolloutjobs/{name}")
        status = answer.raise_for_status().json()["status"]["dynamicSampling"]
        await self._follow(name, None, "false")
        return Reached(met - begin, status["uninformativeGroups"] + len(found))

    async def batches(self, source: Iterator[dict[str, Any]]) -> Reached:
        """Sample whole batches, each after the one before it has ended, until enough groups have a signal."""
        begin, informative, ended = time.time(), 0, 0
        while informative < TARGET:
            name = await self._job(list(islice(source, IN_FLIGHT)))
            found = await self._follow(name, None, "false")
            informative += sum(group["informative"] for group in found)
            ended += len(found)
        return Reached(time.time() - begin, ended)

    async def _job(self, inline: list[dict[str, Any]] | None, **spec: Any) -> str:
        name = f"dapo-{next(self._jobs)}"
        job = manifest(
            name,
            tasks={"stream": True} if inline is None else {"inline": inline},
            handler="bench_dapo",
            samplesPerTask=SAMPLES,
            agent={"type": "oracle", "tools": ["submit"]},
            **spec,
        )
        await posted(self._client, "/v1/rolloutjobs", json=job)
        return name

    async def _push(self, name: str, more: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(task) + "\n" for task in more).encode()
        headers = {"Content-Type": "application/x-ndjson"}
        await posted(self._client, f"/v1/rolloutjobs/{name}/tasks", content=lines, headers=headers)

    async def _follow(self, name: str, enough: int | None, informative: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor, finished = "", False
        while not finished and (enough is None or len(found) < enough):
            page, cursor, finished = await self._page(name, cursor, informative)
            found += page
        if enough is not None and len(found) < enough:
            raise ProgramFailed(f"{name} ended with {len(found)} of {enough} informative groups")
        return found

    async def _page(self, name: str, cursor: str, informative: str) -> tuple[list[dict[str, Any]], str, bool]:
        self._worker.check("rollyard_pipeline")
        query = {"wait": str(WAIT), "limit": "64", "informative": informative}
        if cursor:
            query["cursor"] = cursor
        answer = await self._client.get(f"/v1/rolloutjobs/{name}/groups", params=query)
        answer.raise_for_status()
        groups = [json.loads(line) for line in answer.text.splitlines() if line]
        return groups, answer.headers["Rollyard-Cursor"], answer.headers["Rollyard-Finished"] == "true"


@asynccontextmanager
async def _yard(folder: Path) -> AsyncIterator[Yard]:
    environment = {"PYTHONPATH": str(HERE / "latency_handler")}
    async with (
        control_plane(folder, environment) as plane,
        plane.client() as client,
        stage_worker(plane, folder, {"init": 32, "run": SLOTS, "eval": 32}, environment) as worker,
    ):
        yield Yard(client, worker)


async def measure(settings: Settings) -> list[Measurement]:
    """Let both contestants play the same tasks, in an order that rotates from seed to seed."""
    seeds, middle = ((0,), 0.5) if settings.quick else ((0, 1, 2), 1.0)
    ways: dict[str, list[Reached]] = {"ours": [], "batches": []}
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        async with _yard(Path(name)) as yard:
            contestants = {"ours": yard.ours, "batches": yard.batches}
            order = list(contestants)
            await yard.batches(tasks(99, 0.01))  # The worker's first imports are not measured.
            for seed in seeds:
                for kind in order:
                    async with asyncio.timeout(JOB_SECONDS):
                        ways[kind].append(await contestants[kind](tasks(seed, middle)))
                order = order[1:] + order[:1]
    seconds = {kind: median(way.seconds for way in found) for kind, found in ways.items()}
    groups = {kind: median(way.groups for way in found) for kind, found in ways.items()}
    how = (
        f"median of {len(seeds)} seeds; {SAMPLES} rollouts a group, Run takes lognormal seconds (median "
        f"{middle:g} s, sigma {SIGMA:g}), {UNINFORMATIVE:.0%} of the groups have no signal; {SLOTS} places "
        f"of Run, {IN_FLIGHT} groups in flight; a real control plane and worker, no sandboxes; the last of "
        f"{TARGET} informative groups delivered after {seconds['ours']:.1f} s ({groups['ours']:.0f} groups "
        f"ended); whole batches of {IN_FLIGHT} groups, one after the other, {seconds['batches']:.1f} s "
        f"({groups['batches']:.0f})"
    )
    baseline = Baseline("batch-by-batch resampling", seconds["batches"])
    return [
        Measurement("dapo_to_target", seconds["ours"], baseline, how),
    ]
