"""Getting a sandbox: from the warm pool, and cold beside what a cold start cannot do without."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time

from rollyard_pipeline.sandboxes.interface import SandboxProvider

from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline
from rollyard_bench.sandboxes import OWNER, REQUEST, bubblewrap
from rollyard_bench.servers import exec_server
from rollyard_bench.stats import Contestant, Sample, interleave

BWRAP_TRUE = (
    "bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
    "--tmpfs", "/tmp", "true",
)  # fmt: skip
WARM = 2
REFILL_SECONDS = 0.6
"""Untimed pause in which the warm pool starts the next sandbox: a rollout's own work takes longer."""
ROUNDS = 5


async def _acquire(provider: SandboxProvider) -> float:
    """Milliseconds of one acquire; the sandbox is released after the clock has stopped."""
    begin = time.perf_counter()
    sandbox = await provider.acquire(REQUEST, OWNER)
    took = (time.perf_counter() - begin) * 1e3
    await sandbox.close()
    await provider.release(sandbox.handle)
    return took


async def _warm(samples: int) -> Sample:
    async with bubblewrap() as provider:
        await provider.warm(REQUEST, WARM)
        taken: list[float] = []
        for _ in range(samples + WARM):
            await asyncio.sleep(REFILL_SECONDS)
            taken.append(await _acquire(provider))
        await provider.warm(REQUEST, 0)
    # The first ones may have met a pool that was still being filled.
    return Sample(tuple(taken[WARM:]))


async def _cold(samples: int) -> tuple[Sample, Sample, Sample]:
    """Cold acquires, `bwrap true`, and exec server starts, in turns."""
    cold: list[float] = []
    server: list[float] = []

    def bwrap_true() -> None:
        subprocess.run(BWRAP_TRUE, check=True, stdin=subprocess.DEVNULL)

    async with bubblewrap() as provider:

        async def acquire() -> None:
            cold.append(await _acquire(provider))

        async def serve() -> None:
            begin = time.perf_counter()
            async with exec_server("unix"):
                server.append((time.perf_counter() - begin) * 1e3)

        contestants = {
            "bwrap": Contestant(bwrap_true, samples, warm_up=2),
            "server": Contestant(serve, samples, warm_up=2),
            "ours": Contestant(acquire, samples, warm_up=2),
        }
        bwrap = (await interleave(contestants, ROUNDS))["bwrap"]
    # Of these two the interleaved times include the release and the stop; their own clocks do not.
    return Sample(tuple(cold[2:])), bwrap, Sample(tuple(server[2:]))


async def measure(settings: Settings) -> list[Measurement]:
    """Both starts."""
    samples = 10 if settings.quick else 30
    if shutil.which("bwrap") is None:
        raise FileNotFoundError("bwrap is not installed (Debian package bubblewrap)")
    cold, bwrap, server = await _cold(samples)
    warm = await _warm(samples)
    how_warm = f"acquire until the client is connected; warm {warm.text()}; cold {cold.text()}"
    how_cold = (
        f"acquire with an empty pool until the client is connected {cold.text()}; `{' '.join(BWRAP_TRUE)}` "
        f"{bwrap.text()}; exec server outside of a sandbox, until a client is connected {server.text()}"
    )
    bare = Baseline("bwrap true + exec server start, bare", bwrap.p50 + server.p50)
    return [
        Measurement("sandbox_warm", warm.p50, Baseline("cold start", cold.p50), how_warm),
        Measurement("sandbox_cold", cold.p50, bare, how_cold),
    ]
