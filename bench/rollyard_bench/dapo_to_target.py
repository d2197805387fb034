"""The time to 32 informative groups, with dynamic sampling in the control plane and without it."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

from rollyard import AsyncClient

from rollyard_bench.harness import deployment, manifest
from rollyard_bench.processes import ProgramFailed
from rollyard_bench.results import Baseline, Measurement, Settings

TARGET = 32
SAMPLES = 8
IN_FLIGHT = 32
"""The groups in flight with dynamic sampling, and the groups of a batch without it."""
SLOTS = 64
MEDIAN_SECONDS, SIGMA = 0.5, 1.0
"""The lognormal seconds of a rollout's Run."""
UNINFORMATIVE = 0.6
TASKS = 320
JOB_SECONDS = 240.0


def tasks(seed: int, median_seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a seed, which are the same for every contestant."""
    draw = random.Random(seed)
    for number in count():
        latencies = [round(median_seconds * draw.lognormvariate(0.0, SIGMA), 4) for _ in range(SAMPLES)]
        same = draw.random() < UNINFORMATIVE
        rewards = [float(number % 2 if same else sample % 2) for sample in range(SAMPLES)]
        yield {
            "id": f"task-{number:04d}",
            "prompt": "Wait.",
            "solution": [{"name": "submit", "arguments": {}}],
            "metadata": {"latencies": latencies, "rewards": rewards},
        }


@dataclass(frozen=True, slots=True)
class Reached:
    """One contestant's way to the target: its seconds, and the groups that ended on the way."""

    seconds: float
    groups: int


class Contest:
    """The jobs of both contestants on one deployment."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._jobs = count()

    async def ours(self, source: Iterator[dict[str, Any]]) -> Reached:
        """Let the control plane refill, until it says that the target is met."""
        sampling = {"targetGroups": TARGET, "maxInFlightGroups": IN_FLIGHT}
        begin = time.time()
        name = await self._job(list(islice(source, TASKS)), dynamicSampling=sampling)
        informative = 0
        async for _ in self._client.groups(name, follow=True, informative=True):
            informative += 1
            if informative == TARGET:
                break
        met = time.time()
        if informative < TARGET:
            raise ProgramFailed(f"{name} ended with {informative} of {TARGET} informative groups")
        sampled = (await self._client.job(name)).status.dynamic_sampling
        assert sampled is not None
        async for _ in self._client.groups(name, follow=True):
            pass  # No driver writes a status here: the job is over when the control plane sends no more.
        return Reached(met - begin, sampled.uninformative_groups + informative)

    async def batches(self, source: Iterator[dict[str, Any]]) -> Reached:
        """Sample whole batches, each after the one before it has ended, until enough groups have a signal."""
        begin, informative, ended = time.time(), 0, 0
        while informative < TARGET:
            name = await self._job(list(islice(source, IN_FLIGHT)))
            async for group in self._client.groups(name, follow=True):
                informative += group.informative
                ended += 1
        return Reached(time.time() - begin, ended)

    async def _job(self, inline: list[dict[str, Any]], **spec: Any) -> str:
        job = manifest(
            f"dapo-{next(self._jobs)}",
            tasks={"inline": inline},
            handler="bench_dapo",
            samplesPerTask=SAMPLES,
            agent={"type": "oracle", "tools": ["submit"]},
            **spec,
        )
        return (await self._client.submit(job)).metadata.name


async def measure(settings: Settings) -> list[Measurement]:
    """Let both contestants play the same tasks, in an order that rotates from seed to seed."""
    seeds = range(1 if settings.quick else 3)
    ways: dict[str, list[Reached]] = {"ours": [], "batches": []}
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        places = {"init": 32, "run": SLOTS, "eval": 32}
        async with deployment(Path(name), places, handlers=True) as deployed:
            contest = Contest(deployed.client)
            contestants = {"ours": contest.ours, "batches": contest.batches}
            order = list(contestants)
            await contest.batches(tasks(99, 0.01))  # The worker's first imports are not measured.
            for seed in seeds:
                for kind in order:
                    async with asyncio.timeout(JOB_SECONDS):
                        ways[kind].append(await contestants[kind](tasks(seed, MEDIAN_SECONDS)))
                order = order[1:] + order[:1]
    seconds = {kind: median(way.seconds for way in reached) for kind, reached in ways.items()}
    groups = {kind: median(way.groups for way in reached) for kind, reached in ways.items()}
    how = (
        f"median of {len(seeds)} seeds; {SAMPLES} rollouts a group, Run takes lognormal seconds (median "
        f"{MEDIAN_SECONDS:g} s, sigma {SIGMA:g}), {UNINFORMATIVE:.0%} of the groups have no signal; {SLOTS} "
        f"places of Run, {IN_FLIGHT} groups in flight; a real control plane and worker, no sandboxes; the "
        f"last of {TARGET} informative groups delivered after {seconds['ours']:.1f} s "
        f"({groups['ours']:.0f} groups ended); whole batches of {IN_FLIGHT} groups, one after the other, "
        f"{seconds['batches']:.1f} s ({groups['batches']:.0f})"
    )
    baseline = Baseline("batch-by-batch resampling", seconds["batches"])
    return [Measurement("dapo_to_target", seconds["ours"], baseline, how)]
