"""The start of a sandbox, beside what none can do without."""

from __future__ import annotations

import subprocess
import time

from rollyard_bench.results import Measurement, Settings
from rollyard_bench.sandboxes import bubblewrap, cold_start

BWRAP_TRUE = (
    *("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/"),
    *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "true"),
)


def _bwrap_true() -> float:
    begin = time.perf_counter()
    subprocess.run(BWRAP_TRUE, check=True, stdin=subprocess.DEVNULL)
    return (time.perf_counter() - begin) * 1e3


async def measure(settings: Settings) -> list[Measurement]:
    """Measure starts of ours, of bare bwrap, and of an exec server alone."""
    samples = 10 if settings.quick else 30
    async with bubblewrap() as provider:
        name = "bare `bwrap --unshare-all … true`"
        return [await cold_start("sandbox_cold", provider, _bwrap_true, name, samples)]
