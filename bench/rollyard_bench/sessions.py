"""Sixteen sessions at once, driven by one asyncio program as one stage worker would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from rollyard_sandbox.client import ExecClient

from rollyard_bench.echo import ECHO, WrongOutput, ours
from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline
from rollyard_bench.sandboxes import COMMAND_SECONDS, bubblewrap, claimed
from rollyard_bench.stats import Contestant, Sample, interleave

SESSIONS = 16

Step = Callable[[], Awaitable[None]]


async def _together(steps: Sequence[Step], samples: int) -> Sample:
    """Run all steps at once in loops of `samples` each, and return the durations of all of them."""
    taken: list[float] = []

    async def loop(step: Step) -> None:
        for _ in range(samples):
            begin = time.perf_counter()
            await step()
            taken.append((time.perf_counter() - begin) * 1e3)

    for step in steps:
        await step()
    async with asyncio.TaskGroup() as group:
        for step in steps:
            group.create_task(loop(step))
    return Sample(tuple(taken))


def _session(client: ExecClient, name: str) -> Step:
    async def step() -> None:
        result = await client.bash(ECHO, session=name, timeout=COMMAND_SECONDS)
        if result.exit_code != 0 or result.output.strip() != b"hi":
            raise WrongOutput(f"{ECHO!r} in session {name}: {result.exit_code}, {result.output[:200]!r}")

    return step


async def measure(settings: Settings) -> list[Measurement]:
    """Measure 16 sandboxes with a session each, and 16 sessions of one sandbox."""
    samples = 50 if settings.quick else 200
    async with bubblewrap() as provider, claimed(provider, SESSIONS) as sandboxes:
        steps = [ours(sandbox.client, ECHO, 3) for sandbox in sandboxes]
        alone = (await interleave({"one": Contestant(steps[0], 300, warm_up=20)}, rounds=1))["one"]
        many = await _together(steps, samples)
        client = sandboxes[0].client
        inside = await _together([_session(client, f"s{number}") for number in range(SESSIONS)], samples)
    baseline = Baseline("one session alone", alone.p50)
    how = f"all loop at once from one asyncio program; {{}}; one session alone {alone.text()}"
    return [
        Measurement(
            "sessions_16_sandboxes",
            many.p50,
            baseline,
            how.format(f"16 sandboxes, a session each: {many.text()}"),
        ),
        Measurement(
            "sessions_16_one_sandbox",
            inside.p50,
            baseline,
            how.format(f"16 sessions of one sandbox: {inside.text()}"),
        ),
    ]
