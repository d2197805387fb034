"""Lease → complete cycles a second through HTTP, of a real control plane on SQLite."""

from __future__ import annotations

import asyncio
import importlib

from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline


async def measure(settings: Settings) -> list[Measurement]:
    """Run `bench/lease_cycles.py`. Its client runs in a thread with an event loop of its own."""
    cycles = importlib.import_module("lease_cycles")
    found: dict[str, float] = await asyncio.to_thread(cycles.measure, 800 if settings.quick else 2000)
    rate = found["cycles_per_second"]
    # This is what one core could do if the client cost nothing: it shows how far the server is from its own
    # bound.
    bound = Baseline("server's CPU bound, one core", 1e3 / found["server_cpu_ms_per_cycle"])
    latency, cpu = found["complete_p50_ms"], found["server_cpu_ms_per_cycle"]
    how = (
        f"{cycles.CONNECTIONS} connections lease and complete up to {cycles.BATCH} rollouts a request, "
        f"through all three stages, Run with a trajectory of {cycles.TOKENS} tokens; each answer comes after "
        f"the commit; {found['rollouts_per_second']:.0f} whole rollouts/s, a completion of {cycles.BATCH} "
        f"takes {latency:.1f} ms (p50), {cpu:.2f} ms of server CPU a cycle"
    )
    return [Measurement("lease_cycles", rate, bound, how)]
