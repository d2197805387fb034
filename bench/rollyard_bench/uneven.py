"""Two backends, one of them four times slower: how near the makespan comes to the ideal split."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rollyard_bench.harness import deliver, external_pool, stage_worker
from rollyard_bench.memory import manifest, posted
from rollyard_bench.overhead import relay
from rollyard_bench.processes import Program, ProgramFailed, control_plane
from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline
from rollyard_bench.vllm import MODEL, Server, vllm_servers

FAST, SLOW = 0.006, 0.024
"""The seconds per sampled token of one request, several times what the real servers take: one backend is four
times slower, and other work on these two cores slows neither.
"""
LIMIT = 4  # rollouts that one backend takes at once
SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Jobs:
    """The figures of one run of jobs."""

    seconds: float
    """The seconds from the submission until the last trajectory was delivered."""
    tokens: int
    """The number of sampled tokens."""
    share: float
    """The share of the rollouts that ran on the fast backend."""


def _job(name: str, pool: str, first: int, rollouts: int) -> dict[str, Any]:
    tasks = [
        {
            "id": f"task-{number:03d}",
            "prompt": f"How much is {number} plus {number}?",
            "answer": str(2 * number),
        }
        for number in range(first, first + rollouts // SAMPLES)
    ]
    return manifest(
        name,
        tasks={"inline": tasks},
        handler="math",
        samplesPerTask=SAMPLES,
        agent={"type": "single_turn"},
        sampling={"temperature": 1.5, "maxTokens": 200},
        backendRef={"name": pool},
        stages={"run": {"concurrency": 2 * LIMIT}},
    )


class Deployment:
    """A control plane and a worker that play jobs over the two backends."""

    def __init__(self, client: httpx.AsyncClient, worker: Program, fast: str) -> None:
        self._client = client
        self._worker = worker
        self._fast = fast
        self._number = 0

    async def play(self, *parts: tuple[str, int]) -> Jobs:
        """Submit a job for each (pool, rollouts) at once, and return when the last has delivered all."""
        jobs = []
        for pool, rollouts in parts:
            self._number += 1
            # Each job has prompts of its own, so no prefix is in a cache already.
            jobs.append((_job(f"uneven-{self._number}", pool, 1000 * self._number, rollouts), rollouts))
        begin = time.perf_counter()
        for job, _ in jobs:
            await posted(self._client, "/v1/rolloutjobs", json=job)
        async with asyncio.TaskGroup() as group:
            following = [
                group.create_task(deliver(self._client, self._worker, job["metadata"]["name"], rollouts))
                for job, rollouts in jobs
            ]
        seconds = time.perf_counter() - begin
        found = [item for task in following for item in task.result()]
        bad = [item for item in found if item["status"] != "succeeded"]
        if bad or len(found) != sum(rollouts for _, rollouts in parts):
            raise ProgramFailed(f"{len(bad)} of {len(found)} rollouts did not succeed: {bad[:1]}"[:900])
        return Jobs(
            seconds,
            sum(sum(sum(segment["loss_mask"]) for segment in item["segments"]) for item in found),
            sum(item["backend"] == self._fast for item in found) / len(found),
        )


async def _measure(folder: Path, servers: list[Server], rollouts: int) -> dict[str, Jobs]:
    os.chmod(folder, 0o700)
    async with (
        relay(folder, "fast", servers[0].url, pace=FAST) as fast,
        relay(folder, "slow", servers[1].url, pace=SLOW) as slow,
        control_plane(folder) as plane,
        plane.client() as client,
        stage_worker(plane, folder, {"init": 8, "run": 2 * LIMIT, "eval": 2}) as worker,
    ):
        for pool, urls in (("fast", [fast]), ("slow", [slow]), ("both", [fast, slow])):
            await external_pool(client, pool, MODEL, servers[0].model, urls, LIMIT)
        deployment = Deployment(client, worker, fast)
        await deployment.play(("both", 2 * SAMPLES))  # The first jobs measure what the servers can do.
        return {
            "ours": await deployment.play(("both", rollouts)),
            "round-robin": await deployment.play(("fast", rollouts // 2), ("slow", rollouts // 2)),
        }


async def measure(settings: Settings) -> list[Measurement]:
    """Measure one job over both backends, then the same rollouts dealt out in turns."""
    rollouts = 60 if settings.quick else 120
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        folder = Path(name)
        async with vllm_servers(folder, 2) as servers:
            found = await _measure(folder, servers, rollouts)
    ours, robin = found["ours"], found["round-robin"]
    ideal = ours.tokens / (LIMIT / FAST + LIMIT / SLOW)
    how = (
        f"{rollouts} rollouts of one turn through the real control plane and worker; two vLLM servers whose "
        f"answers are held back to {FAST * 1e3:g} and {SLOW * 1e3:g} ms a token; at most {LIMIT} rollouts on "
        f"each; ideal: {ours.tokens:,} tokens at those paces, all places busy until the last token, nothing "
        f"of Init, Eval and delivery; {ours.share:.0%} of the rollouts went to the fast one; round-robin: "
        f"every other rollout to every other backend, the same limits, {robin.seconds:.1f} s"
    )
    return [
        Measurement("uneven_makespan", ours.seconds, Baseline("ideal split", ideal), how),
        Measurement("uneven_vs_round_robin", ours.seconds, Baseline("round-robin", robin.seconds), how),
    ]
