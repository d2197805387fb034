"""The start of a sandbox, beside what none can do without."""

from __future__ import annotations

import subprocess
import time

from rollyard_bench import coldstart
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.sandboxes import bubblewrap

BWRAP_TRUE = (
    "bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
    "--tmpfs", "/tmp", "true",
)  # fmt: skip


def _bwrap_true() -> float:
    begin = time.perf_counter()
    subprocess.run(BWRAP_TRUE, check=True, stdin=subprocess.DEVNULL)
    return (time.perf_counter() - begin) * 1e3


async def measure(settings: Settings) -> list[Measurement]:
    """Measure starts of ours, of bare bwrap, and of an exec server alone."""
    samples = 10 if settings.quick else 30
    async with bubblewrap() as provider:
        cold = await coldstart.cold(provider, _bwrap_true, samples)
    how_cold = (
        f"acquire until the client is connected {cold.ours.text()}; "
        f"`{' '.join(BWRAP_TRUE)}` {cold.bare.text()}; exec server outside of a sandbox, until a client is "
        f"connected {cold.server.text()}"
    )
    bare = Baseline("bwrap true + exec server start, bare", cold.bare.p50 + cold.server.p50)
    return [Measurement("sandbox_cold", cold.ours.p50, bare, how_cold)]
