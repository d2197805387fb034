"""Two backends, one of them four times slower: how near the makespan comes to the ideal split."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx

from rollyard_bench.harness import deliver, external_pool, stage_worker
from rollyard_bench.latency_model import MODEL
from rollyard_bench.memory import manifest, posted
from rollyard_bench.paced_model import MEAN_TOKENS
from rollyard_bench.processes import Program, ProgramFailed, answers, control_plane, port_of, program
from rollyard_bench.results import Baseline, Measurement, Settings

HERE = Path(__file__).resolve().parents[1]
FAST, SLOW = 0.03, 0.12
"""The seconds per sampled token of one request. A rollout takes 0.7 s on the fast backend, so what the
control plane and the worker do between two rollouts is little beside it, on a slow machine, too.
"""
LIMIT = 4  # One backend takes this many rollouts at once.
SAMPLES = 5
ROLLOUTS = 120
RUNS, QUICK_RUNS = 5, 3


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


def _job(name: str, pool: str, seed: int, rollouts: int) -> dict[str, Any]:
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
        backendRef={"name": pool},
        stages={"run": {"concurrency": 2 * LIMIT}},
    )


class Deployment:
    """A control plane and a worker that play jobs over the two backends."""

    def __init__(self, client: httpx.AsyncClient, worker: Program, folder: Path, urls: list[str]) -> None:
        self._client = client
        self._worker = worker
        self._tokenizer = folder / "fast-model"
        self._urls = urls
        self._number = 0

    async def play(self, rollouts: int) -> Run:
        """Submit a job, and return when all of its rollouts have been delivered.

        Each job has a pool of its own, which does not know yet how fast its servers are.
        """
        self._number += 1
        name = f"uneven-{self._number}"
        await external_pool(self._client, name, MODEL, self._tokenizer, self._urls, LIMIT)
        begin = time.perf_counter()
        await posted(self._client, "/v1/rolloutjobs", json=_job(name, name, self._number, rollouts))
        trajectories = await deliver(self._client, self._worker, name, rollouts)
        seconds = time.perf_counter() - begin
        bad = [item for item in trajectories if item["status"] != "succeeded"]
        if bad or len(trajectories) != rollouts:
            raise ProgramFailed(f"{len(bad)} of {rollouts} rollouts did not succeed: {bad[:1]}"[:900])
        return Run(
            seconds,
            sum(sum(sum(segment["loss_mask"]) for segment in item["segments"]) for item in trajectories),
            sum(item["backend"] == self._urls[0] for item in trajectories) / len(trajectories),
        )

    async def late(self) -> float:
        """Return by how many seconds the servers answered later than their paces say: p99 of all answers."""
        late: list[float] = []
        async with httpx.AsyncClient(timeout=30.0) as client:
            for url in self._urls:
                late += (await client.get(f"{url}/late")).raise_for_status().json()["seconds"]
        return quantiles(late, n=100, method="inclusive")[98]


@asynccontextmanager
async def _server(folder: Path, name: str, pace: float) -> AsyncIterator[str]:
    """Start a paced server, and yield its URL."""
    port_file = folder / f"{name}.port"
    command = [sys.executable, "-m", "rollyard_bench.paced_model", "--pace", str(pace)]
    command += ["--folder", str(folder / f"{name}-model"), "--port-file", str(port_file)]
    async with program(command, folder / f"{name}.log", {"PYTHONPATH": str(HERE)}) as running:
        url = f"http://127.0.0.1:{await port_of(running, 'the paced server', port_file)}"
        await answers(running, "the paced server", f"{url}/health")
        yield url


async def _measure(folder: Path, runs: int) -> tuple[list[Run], float]:
    os.chmod(folder, 0o700)
    async with (
        _server(folder, "fast", FAST) as fast,
        _server(folder, "slow", SLOW) as slow,
        control_plane(folder) as plane,
        plane.client() as client,
        stage_worker(plane, folder, {"init": 8, "run": 2 * LIMIT, "eval": 2}) as worker,
    ):
        deployment = Deployment(client, worker, folder, [fast, slow])
        await deployment.play(2 * SAMPLES)  # The worker's first imports are not measured.
        ours = [await deployment.play(ROLLOUTS) for _ in range(runs)]
        return ours, await deployment.late()


async def measure(settings: Settings) -> list[Measurement]:
    """Measure jobs over both backends."""
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        ours, late = await _measure(Path(name), QUICK_RUNS if settings.quick else RUNS)
    ratios = sorted(job.seconds / job.ideal for job in ours)
    # The run whose ratio is the median stands for all: its seconds and its ideal belong together.
    middle = min(ours, key=lambda job: abs(job.seconds / job.ideal - median(ratios)))
    busy = os.getloadavg()[0]
    found = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    how = (
        f"the median of {len(ours)} runs by their ratio ({found}), each of {ROLLOUTS} rollouts of one turn "
        f"through the real control plane and worker, in a pool that does not know yet how fast its servers "
        f"are; two servers that take {FAST * 1e3:g} and {SLOW * 1e3:g} ms a token and no core, answers of "
        f"{MEAN_TOKENS:g} tokens in the mean, p99 of their lateness {late * 1e3:.1f} ms; at most {LIMIT} "
        f"rollouts on each; ideal: {middle.tokens:,} tokens at those paces, all places busy until the last "
        f"token, nothing of Init, Eval and delivery; {middle.share:.0%} of the rollouts on the fast one; "
        f"load {busy:.1f} on {os.cpu_count()} cores"
    )
    return [
        Measurement("uneven_makespan", middle.seconds, Baseline("ideal split", middle.ideal), how),
    ]
