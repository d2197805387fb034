"""Two backends, one of them four times slower: how near the makespan comes to the ideal split."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx

from rollyard_bench.harness import Deployment, deployment, manifest
from rollyard_bench.model_servers import MEAN_TOKENS, MODEL, model_server
from rollyard_bench.processes import ProgramFailed
from rollyard_bench.results import Baseline, Measurement, Settings

FAST, SLOW = 0.03, 0.12
"""The seconds per sampled token of one request. A rollout takes 0.7 s on the fast backend, so what the
control plane and the worker do between two rollouts is little beside it, on a slow machine, too.
"""
LIMIT = 4  # One backend takes this many rollouts at once.
SAMPLES = 5
ROLLOUTS = 120
RUNS, QUICK_RUNS = 3, 1
LONGEST_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one job."""

    seconds: float
    """The seconds from the submission until the last trajectory was delivered."""
    tokens: int
    """The number of sampled tokens."""
    share: float
    """The share of the rollouts that ran on the fast backend."""

    @property
    def ideal(self) -> float:
        """Return the seconds that the tokens take with all places of both backends busy until the end."""
        return self.tokens / (LIMIT / FAST + LIMIT / SLOW)


def _job(name: str, seed: int, rollouts: int) -> dict[str, Any]:
    tasks = [
        {
            "id": f"task-{number:03d}",
            "prompt": f"How much is {number} plus {number}?",
            "answer": str(2 * number),
        }
        for number in range(rollouts // SAMPLES)
    ]
    return manifest(
        name,
        tasks={"inline": tasks},
        handler="math",
        samplesPerTask=SAMPLES,
        agent={"type": "single_turn"},
        sampling={"maxTokens": 200, "seed": seed},
        backendRef={"name": name},
        stages={"run": {"concurrency": 2 * LIMIT}},
    )


async def _play(deployed: Deployment, tokenizer: Path, urls: list[str], seed: int, rollouts: int) -> Run:
    """Submit a job, and return when all of its rollouts have been delivered.

    Each job has a pool of its own, which does not know yet how fast its servers are.
    """
    name = f"uneven-{seed}"
    await deployed.external_pool(name, MODEL, tokenizer, urls, LIMIT)
    begin = time.perf_counter()
    await deployed.client.submit(_job(name, seed, rollouts))
    delivered = await deployed.deliver(name, rollouts, LONGEST_SECONDS)
    seconds = time.perf_counter() - begin
    bad = [one.reason for one in delivered if one.status != "succeeded"]
    if bad or len(delivered) != rollouts:
        raise ProgramFailed(f"{len(bad)} of {rollouts} rollouts did not succeed: {bad[:1]}")
    tokens = sum(one.sampled_tokens for one in delivered)
    return Run(seconds, tokens, sum(one.backend == urls[0] for one in delivered) / rollouts)


async def _late(urls: list[str]) -> float:
    """Return by how many seconds the servers answered later than their paces say: p99 of all answers."""
    late: list[float] = []
    async with httpx.AsyncClient(timeout=30.0) as client:
        for url in urls:
            late += (await client.get(f"{url}/late")).raise_for_status().json()["seconds"]
    return quantiles(late, n=100, method="inclusive")[98]


async def _measure(folder: Path, runs: int) -> tuple[list[Run], float]:
    async with (
        model_server("paced", folder, "fast", FAST) as fast,
        model_server("paced", folder, "slow", SLOW) as slow,
        deployment(folder, {"init": 8, "run": 2 * LIMIT, "eval": 2}) as deployed,
    ):
        play = partial(_play, deployed, folder / "fast", [fast, slow])
        await play(0, 2 * SAMPLES)  # The worker's first imports are not measured.
        ours = [await play(1 + number, ROLLOUTS) for number in range(runs)]
        return ours, await _late([fast, slow])


async def measure(settings: Settings) -> list[Measurement]:
    """Measure jobs over both backends."""
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        ours, late = await _measure(Path(name), QUICK_RUNS if settings.quick else RUNS)
    ratios = sorted(job.seconds / job.ideal for job in ours)
    # The run whose ratio is the median stands for all: its seconds and its ideal belong together.
    middle = min(ours, key=lambda job: abs(job.seconds / job.ideal - median(ratios)))
    busy = os.getloadavg()[0]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    how = (
        f"the median of {len(ours)} runs by their ratio ({each}), each of {ROLLOUTS} rollouts of one turn "
        f"through the real control plane and worker, in a pool that does not know yet how fast its servers "
        f"are; two servers that take {FAST * 1e3:g} and {SLOW * 1e3:g} ms a token and no core, answers of "
        f"{MEAN_TOKENS:g} tokens in the mean, p99 of their lateness {late * 1e3:.1f} ms; at most {LIMIT} "
        f"rollouts on each; ideal: {middle.tokens:,} tokens at those paces, all places busy until the last "
        f"token, nothing of Init, Eval and delivery; {middle.share:.0%} of the rollouts on the fast one; "
        f"load {busy:.1f} on {os.cpu_count()} cores"
    )
    return [Measurement("uneven_makespan", middle.seconds, Baseline("ideal split", middle.ideal), how)]
