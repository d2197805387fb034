"""Apptainer sandboxes for an ordinary user: cold beside a bare instance."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions

from rollyard_bench import lab
from rollyard_bench.results import Measurement, Settings
from rollyard_bench.sandboxes import cold_start, started

MODULE = "rollyard_bench.apptainer"


@contextmanager
def _bare(program: str, image: str) -> Iterator[Callable[[], float]]:
    """Yield a function that starts an instance without options. Its end is not timed."""
    numbers = itertools.count()
    with tempfile.TemporaryDirectory(prefix="ryb-") as config:
        env = {**os.environ, "APPTAINER_CONFIGDIR": config}

        def call(*arguments: str) -> None:
            command = [program, "-s", "instance", *arguments]
            subprocess.run(command, env=env, cwd="/", check=True, stdin=subprocess.DEVNULL, timeout=60)

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
    options = ApptainerOptions(default_image=image)
    with _bare(program, image) as bare, tempfile.TemporaryDirectory(prefix="ryb-") as folder:
        async with started("apptainer", Path(folder), apptainer=options) as provider:
            name = "bare `apptainer instance start` of the same SIF"
            return [await cold_start("apptainer_cold", provider, bare, name, 10 if settings.quick else 15)]


async def measure(settings: Settings) -> list[Measurement]:
    """Measure as an ordinary user."""
    return await lab.as_user(MODULE, settings, _measured)


if __name__ == "__main__":
    lab.program(MODULE, _measured)
