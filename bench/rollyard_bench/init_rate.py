"""Rollouts that pass Init in a second, through a real control plane and worker, without a model."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from rollyard_bench.harness import stage_worker
from rollyard_bench.memory import counts, manifest, posted
from rollyard_bench.processes import Program, control_plane
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.start import BWRAP_TRUE

CONCURRENCY = 8
WARM_UP = 8
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


class _Yard:
    """A control plane with a worker of Init. Its rollouts wait for a Run worker, which never comes."""

    def __init__(self, client: httpx.AsyncClient, worker: Program, folder: Path, name: str) -> None:
        self._client = client
        self._folder = folder / "run" / "sandboxes"
        self._worker = worker
        self._name = name
        self._jobs = 0

    async def rate(self, rollouts: int) -> float:
        """Return the rollouts per second from the submission of a job until all of it has passed Init."""
        self._jobs += 1
        job = f"{self._name}-{self._jobs}"
        begin = time.perf_counter()
        await posted(self._client, "/v1/rolloutjobs", json=_job(job, rollouts))
        async with asyncio.timeout(JOB_SECONDS):
            while (await counts(self._client, job))["run"]["queued"] < rollouts:
                self._worker.check("rollyard_pipeline")
                await asyncio.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - begin
        await posted(self._client, f"/v1/rolloutjobs/{job}/cancel")
        async with asyncio.timeout(JOB_SECONDS):
            while any(self._folder.glob("*/sandbox.json")):  # noqa: ASYNC110 - a worker removes them
                await asyncio.sleep(POLL_SECONDS)
        return rollouts / seconds


@asynccontextmanager
async def _yard(folder: Path, name: str, further: list[str]) -> AsyncIterator[_Yard]:
    own = folder / name
    own.mkdir(mode=0o700)
    async with (
        control_plane(own) as plane,
        plane.client() as client,
        stage_worker(
            plane, own, {"init": CONCURRENCY}, further=[*further, "--max-sandboxes", "512"]
        ) as worker,
    ):
        yield _Yard(client, worker, own, name)


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
    rollouts, rounds = (96, 3) if settings.quick else (160, 5)
    found: dict[str, list[float]] = {"forked": [], "alone": [], "bare": []}
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        async with AsyncExitStack() as stack:
            yards = {
                "forked": await stack.enter_async_context(_yard(Path(name), "forked", [])),
                "alone": await stack.enter_async_context(
                    _yard(Path(name), "alone", ["--no-sandbox-templates"])
                ),
            }
            for yard in yards.values():
                await yard.rate(WARM_UP)
            for turn in range(rounds):
                for kind in sorted(yards, reverse=turn % 2 == 1):
                    found[kind].append(await yards[kind].rate(rollouts))
                found["bare"].append(await _bare(rollouts))
    ours, before, bare = (median(found[kind]) for kind in ("forked", "alone", "bare"))
    spread = ", ".join(f"{value:.0f}" for value in found["forked"])
    how = (
        f"{rounds} jobs of {rollouts} oracle rollouts each way, in turns, {CONCURRENCY} places of Init, "
        f"no warm pool; submitted until all wait for Run; forked from a template {ours:.1f}/s ({spread}), "
        f"each started alone (`--no-sandbox-templates`) {before:.1f}/s; bare `bwrap --unshare-all … true`, "
        f"two at a time, {bare:.0f}/s"
    )
    return [Measurement("init_rate", ours, Baseline("started alone, as before", before), how)]
