"""Rollouts that pass Init in a second, through a real control plane and worker, without a model."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rollyard_bench.harness import Deployment, deployment, manifest
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.start import BWRAP_TRUE

CONCURRENCY = 8
WARM_UP = 8
ROUNDS = 3
JOB_SECONDS = 180.0
POLL_SECONDS = 0.05


def _job(name: str, rollouts: int) -> dict[str, Any]:
    solution = [{"name": "bash", "arguments": {"command": "true"}}]
    task = {"id": "t", "prompt": "Do nothing.", "test_script": "true", "solution": solution}
    return manifest(
        name,
        tasks={"inline": [task]},
        handler="shell",
        samplesPerTask=rollouts,
        agent={"type": "oracle", "tools": ["bash", "submit"]},
        sandbox={"warm": 0, "resources": {"memory": "256Mi", "disk": "32Mi"}},
        stages={"init": {"concurrency": CONCURRENCY}},
    )


async def _rate(deployed: Deployment, name: str, rollouts: int) -> float:
    """Return the rollouts per second from the submission of a job until all of it has passed Init.

    They then wait for a worker of Run, which never comes.
    """
    begin = time.perf_counter()
    await deployed.client.submit(_job(name, rollouts))
    async with asyncio.timeout(JOB_SECONDS):
        while (await deployed.client.job(name)).status.counts.run.queued < rollouts:
            deployed.worker.check("rollyard_pipeline")
            await asyncio.sleep(POLL_SECONDS)
    seconds = time.perf_counter() - begin
    await deployed.client.cancel(name)
    sandboxes = deployed.plane.tokens_file.parents[1] / "run" / "sandboxes"
    async with asyncio.timeout(JOB_SECONDS):
        while any(sandboxes.glob("*/sandbox.json")):  # noqa: ASYNC110 - a worker removes them
            await asyncio.sleep(POLL_SECONDS)
    return rollouts / seconds


async def _bare(count: int) -> float:
    """Return how often bare bwrap starts and ends in a second, two at a time."""
    begin = time.perf_counter()

    async def loop(times: int) -> None:
        for _ in range(times):
            process = await asyncio.create_subprocess_exec(*BWRAP_TRUE, stdin=subprocess.DEVNULL)
            await process.wait()

    await asyncio.gather(loop(count // 2), loop(count // 2))
    return count / (time.perf_counter() - begin)


async def measure(settings: Settings) -> list[Measurement]:
    """Measure both ways of starting in turns, with bare bwrap beside them."""
    rollouts = 96 if settings.quick else 160
    rates: dict[str, list[float]] = {"forked": [], "alone": [], "bare": []}
    places, limit = {"init": CONCURRENCY}, ("--max-sandboxes", "512")
    with tempfile.TemporaryDirectory(prefix="ryb-") as folder:
        async with (
            deployment(Path(folder) / "forked", places, *limit) as forked,
            deployment(Path(folder) / "alone", places, *limit, "--no-sandbox-templates") as alone,
        ):
            ways = {"forked": forked, "alone": alone}
            for kind, deployed in ways.items():
                await _rate(deployed, f"{kind}-warm", WARM_UP)
            for turn in range(ROUNDS):
                for kind in sorted(ways, reverse=turn % 2 == 1):
                    rates[kind].append(await _rate(ways[kind], f"{kind}-{turn}", rollouts))
                rates["bare"].append(await _bare(rollouts))
    ours, before, bare = (median(rates[kind]) for kind in ("forked", "alone", "bare"))
    spread = ", ".join(f"{value:.0f}" for value in rates["forked"])
    how = (
        f"{ROUNDS} jobs of {rollouts} oracle rollouts each way, in turns, {CONCURRENCY} places of Init, "
        f"no warm pool; submitted until all wait for Run; forked from a template {ours:.1f}/s ({spread}), "
        f"each started alone (`--no-sandbox-templates`) {before:.1f}/s; bare `bwrap --unshare-all … true`, "
        f"two at a time, {bare:.0f}/s"
    )
    return [Measurement("init_rate", ours, Baseline("started alone, as before", before), how)]
