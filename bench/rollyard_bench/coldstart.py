"""Sandbox starts of one provider: cold, beside what no cold start can do without."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rollyard_pipeline.sandboxes.interface import SandboxProvider

from rollyard_bench.sandboxes import OWNER, REQUEST
from rollyard_bench.servers import exec_server
from rollyard_bench.stats import Contestant, Sample, interleave

ROUNDS = 5
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Cold:
    """The times of cold acquires, bare starts, and exec server starts without a sandbox, taken in turns."""

    ours: Sample
    bare: Sample
    server: Sample


async def acquire(provider: SandboxProvider) -> float:
    """Return the milliseconds of one acquire. The sandbox is released after the clock has stopped."""
    begin = time.perf_counter()
    sandbox = await provider.acquire(REQUEST, OWNER)
    took = (time.perf_counter() - begin) * 1e3
    await sandbox.close()
    await provider.release(sandbox.handle)
    return took


async def cold(provider: SandboxProvider, bare: Callable[[], float], samples: int) -> Cold:
    """Time acquires with an empty pool beside their two parts. Stopping the sandboxes is not timed.

    Args:
        bare: A function that starts the same kind of sandbox without anything of ours and returns its
            milliseconds.
    """
    taken: dict[str, list[float]] = {"ours": [], "bare": [], "server": []}

    async def ours_once() -> None:
        taken["ours"].append(await acquire(provider))

    def bare_once() -> None:
        taken["bare"].append(bare())

    async def server_once() -> None:
        begin = time.perf_counter()
        async with exec_server():
            taken["server"].append((time.perf_counter() - begin) * 1e3)

    contestants = {
        "bare": Contestant(bare_once, samples, warm_up=WARM_UP),
        "server": Contestant(server_once, samples, warm_up=WARM_UP),
        "ours": Contestant(ours_once, samples, warm_up=WARM_UP),
    }
    # The interleaved times include releases and stops; the steps' own clocks do not.
    await interleave(contestants, ROUNDS)
    return Cold(**{name: Sample(tuple(values[WARM_UP:])) for name, values in taken.items()})
