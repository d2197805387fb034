"""Apptainer sandboxes for an ordinary user: cold beside a bare instance."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.interface import SandboxProvider

from rollyard_bench import coldstart, lab
from rollyard_bench.results import Baseline, Measurement, Settings

MODULE = "rollyard_bench.apptainer"


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


async def _measured(settings: Settings) -> list[Measurement]:
    program, image = lab.apptainer(), await lab.default_image()
    scale = 1 if settings.quick else 3
    with _bare(program, image) as bare:
        async with _provider(image) as provider:
            cold = await coldstart.cold(provider, bare, 10 * scale)
    return [
        Measurement(
            "apptainer_cold",
            cold.ours.p50,
            Baseline("apptainer instance start + exec server start, bare", cold.bare.p50 + cold.server.p50),
            f"acquire with an empty pool until the client is connected {cold.ours.text()}; "
            f"`apptainer instance start` of the same SIF without options {cold.bare.text()}; "
            f"exec server outside of a sandbox, until a client is connected {cold.server.text()}",
        ),
    ]


async def measure(settings: Settings) -> list[Measurement]:
    """Measure as an ordinary user."""
    return await lab.as_user(MODULE, settings, _measured)


if __name__ == "__main__":
    lab.program(MODULE, _measured)
