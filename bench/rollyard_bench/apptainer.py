"""Apptainer sandboxes for an ordinary user: cold beside a bare instance, warm, and a command inside."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_sandbox.client import ExecClient

from rollyard_bench import coldstart, lab
from rollyard_bench.processes import ProgramFailed
from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline
from rollyard_bench.sandboxes import COMMAND_SECONDS, bubblewrap, claimed
from rollyard_bench.stats import Contestant, Sample, interleave

MODULE = "rollyard_bench.apptainer"
ROUNDS = 5
REFILL_SECONDS = 1.0


@asynccontextmanager
async def _provider(image: str) -> AsyncIterator[SandboxProvider]:
    """Yield a started provider, which leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="ryb-") as folder:
        options = ApptainerOptions(default_image=image)
        provider = open_provider("apptainer", run_dir=Path(folder), node="bench", apptainer=options)
        await provider.start()
        try:
            yield provider
        finally:
            for left in provider.claimed():
                await provider.release(left)
            await provider.aclose()


@contextmanager
def _bare(program: str, image: str) -> Iterator[Callable[[], float]]:
    """Yield a function that starts an instance without options. Its end is not timed."""
    numbers = itertools.count()
    with tempfile.TemporaryDirectory(prefix="ryb-") as config:
        env = {**os.environ, "APPTAINER_CONFIGDIR": config}

        def call(*arguments: str) -> None:
            subprocess.run(
                [program, "-s", "instance", *arguments],
                env=env, cwd="/", check=True, stdin=subprocess.DEVNULL, timeout=60,
            )  # fmt: skip

        def start() -> float:
            name = f"bare{next(numbers)}"
            begin = time.perf_counter()
            call("start", image, name)
            took = (time.perf_counter() - begin) * 1e3
            call("stop", "-t", "1", name)
            return took

        yield start


async def _echo(image: str, samples: int) -> tuple[Sample, Sample | None]:
    """Time `echo hi` in an Apptainer sandbox, and in a bubblewrap sandbox where there is one, in turns."""

    async def step(client: ExecClient) -> None:
        result = await client.bash("echo hi", timeout=COMMAND_SECONDS)
        if result.exit_code != 0 or result.text().strip() != "hi":
            raise ProgramFailed(f"`echo hi` gave {result.text()!r}, exit status {result.exit_code}")

    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(_provider(image))
        (ours,) = await stack.enter_async_context(claimed(provider))
        contestants = {"ours": Contestant(lambda: step(ours.client), samples)}
        if shutil.which("bwrap") is not None:
            other = await stack.enter_async_context(bubblewrap())
            (theirs,) = await stack.enter_async_context(claimed(other))
            contestants["bubblewrap"] = Contestant(lambda: step(theirs.client), samples)
        times = await interleave(contestants, ROUNDS)
    return times["ours"], times.get("bubblewrap")


async def _measured(settings: Settings) -> list[Measurement]:
    program, image = lab.apptainer(), await lab.default_image()
    scale = 1 if settings.quick else 3
    with _bare(program, image) as bare:
        async with _provider(image) as provider:
            cold = await coldstart.cold(provider, bare, 10 * scale)
            warm = await coldstart.warm(provider, 10 * scale, REFILL_SECONDS)
    echo, other = await _echo(image, 300 * scale)
    beside = Baseline("the same in a bubblewrap sandbox", other.p50) if other is not None else None
    return [
        Measurement(
            "apptainer_cold",
            cold.ours.p50,
            Baseline("apptainer instance start + exec server start, bare", cold.bare.p50 + cold.server.p50),
            f"acquire with an empty pool until the client is connected {cold.ours.text()}; "
            f"`apptainer instance start` of the same SIF without options {cold.bare.text()}; "
            f"exec server outside of a sandbox, until a client is connected {cold.server.text()}",
        ),
        Measurement(
            "apptainer_warm",
            warm.p50,
            Baseline("cold start", cold.ours.p50),
            f"acquire until the client is connected; warm {warm.text()}",
        ),
        Measurement("apptainer_echo_p50", echo.p50, beside, f"`echo hi` through the client {echo.text()}"),
    ]


async def measure(settings: Settings) -> list[Measurement]:
    """Measure all figures as an ordinary user."""
    return await lab.as_user(MODULE, settings, _measured)


if __name__ == "__main__":
    lab.program(MODULE, _measured)
