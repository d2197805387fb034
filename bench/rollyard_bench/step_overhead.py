"""The wall time of a training step through Rollyard, beside a loop that plays its rollouts itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rollyard_testing.faults.yard import Yard
from rollyard_testing.trainer.killed_run import TrainerMissing, train_python

from rollyard_bench.processes import Missing, ProgramFailed, needed
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.stats import pairs_median

READY_SECONDS = 180.0
STEP_SECONDS = 300.0
STOP_SECONDS = 30.0
SIDES = ("rollyard", "in-process")

Step = Mapping[str, float]


class StepProgram:
    """A running `step_trainer`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def answer(self, seconds: float) -> Any:
        """Return its next line.

        Raises:
            ProgramFailed: It ended, or took too long.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
            return json.loads(line)
        except (TimeoutError, ValueError) as error:
            raise ProgramFailed(f"{error!r}: {self._log.read_text(errors='replace')[-1500:]}") from error

    async def step(self, number: int) -> Step:
        """Let it take a step, and return what that took."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n".encode())
        taken: Step = await self.answer(STEP_SECONDS)
        return taken


def torch_folder() -> Path:
    """Return the folder of the packages of scripts/train-env, which is made at the first call on a machine.

    Raises:
        Missing: It cannot be made, or it is of another Python than this one.
    """
    try:
        python = train_python()
    except TrainerMissing as error:
        reason = str(error).splitlines()[-1]
        raise Missing(f"no torch: scripts/train-env makes it, or TRAIN_PYTHON names it; {reason}") from error
    code = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_paths()['purelib'])"
    major, minor, folder = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    if (int(major), int(minor)) != sys.version_info[:2]:
        raise Missing(f"the trainers' environment has Python {major}.{minor}; make it with this one")
    return Path(folder)


@asynccontextmanager
async def step_program(side: str, folder: Path, further: Mapping[str, str]) -> AsyncIterator[StepProgram]:
    """Start a trainer of one side, and yield it once it can take steps."""
    folder.mkdir()
    log = folder / "log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollyard_bench.step_trainer", side, str(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**os.environ, **further},
        )
    try:
        running = StepProgram(process, log)
        await running.answer(READY_SECONDS)
        yield running
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _sum(steps: list[Step], side: str) -> str:
    parts = ", ".join(
        f"{what} {median(one[what] for one in steps):.2f} s" for what in ("rollouts", "update", "push")
    )
    sampled, tokens = (sum(one[name] for one in steps) for name in ("sampled", "tokens"))
    return (
        f"{side} {median(one['seconds'] for one in steps):.2f} s ({parts}; {sampled:.0f} sampled tokens of "
        f"{tokens:.0f} in {sum(one['count'] for one in steps):.0f} rollouts)"
    )


async def measure(settings: Settings) -> list[Measurement]:
    """Let both sides take the same steps in turns."""
    pairs = 2 if settings.quick else 3
    needed("bwrap", "bubblewrap")
    packages = await asyncio.to_thread(torch_folder)
    steps: dict[str, list[Step]] = {side: [] for side in SIDES}
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        yard = Yard(Path(name))
        await asyncio.to_thread(yard.start)
        environment = {
            "ROLLYARD_HOME": str(yard.home),
            "ROLLYARD_BENCH_TORCH": str(packages),
            "HF_HUB_OFFLINE": "1",
        }
        try:
            async with (
                step_program("rollyard", Path(name) / "a", environment) as ours,
                step_program("in-process", Path(name) / "b", environment) as theirs,
            ):
                both = {"rollyard": ours, "in-process": theirs}
                for number in range(pairs + 1):
                    for side in SIDES if number % 2 else reversed(SIDES):
                        taken = await both[side].step(number + 1)
                        if number:  # The first step of both is not counted.
                            steps[side].append(taken)
        finally:
            await asyncio.to_thread(yard.stop)
    through, within = ([one["seconds"] for one in steps[side]] for side in SIDES)
    value, baseline = pairs_median(through, within)
    how = (
        f"{pairs} pairs of steps with the same tasks, in turns; the pair with the median ratio counts, of "
        f"({', '.join(f'{a / b:.2f}' for a, b in zip(through, within, strict=True))}); medians: "
        f"{_sum(steps[SIDES[0]], 'through Rollyard')}; {_sum(steps[SIDES[1]], 'in process')}; both: the "
        "embedded engine with the tiny policy, 16 groups of 8 rollouts, 32 at once, bubblewrap sandboxes, "
        "examples/grpo's update in one thread of torch, and an ONNX checkpoint; through "
        "Rollyard the update of the weights is verified, too"
    )
    return [Measurement("step_overhead", value, Baseline("in-process loop", baseline), how)]
