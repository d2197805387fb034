"""How often the bridge asks Slurm: without jobs, with one, and with a hundred.

The calls are counted outside of it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rollyard_bench import lab
from rollyard_bench.bridge import Bridge, bridge, shared_folder, submitted
from rollyard_bench.memory import manifest
from rollyard_bench.processes import ProgramFailed
from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline

MODULE = "rollyard_bench.slurm_load"
COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "sacct", "sinfo")
JOBS = 100
NAIVE_SECONDS = 5.0
"""The pause of a poller that asks for each of its jobs, and for new ones."""
SUBMIT_SECONDS = 90.0
SETTLE_SECONDS = 12.0


@dataclass(frozen=True, slots=True)
class Window:
    """The commands that were run between two moments."""

    seconds: float
    runs: Counter[str]

    @property
    def per_minute(self) -> float:
        """Return the number of all commands together, per minute."""
        return 60.0 * self.runs.total() / self.seconds

    def text(self) -> str:
        """Return all of it for readers."""
        each = ", ".join(f"{name} {count}" for name, count in sorted(self.runs.items())) or "none"
        return f"{self.per_minute:.1f} a minute over {self.seconds:.0f} s ({each})"


class Counted:
    """Programs with the names of Slurm's, which write a line for each run and then execute Slurm's own."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self._log = folder / "runs"
        self.bin.mkdir()
        self._log.touch()
        for name in COMMANDS:
            if (real := shutil.which(name)) is not None:
                program = self.bin / name
                program.write_text(f'#!/bin/sh\necho {name} >> "{self._log}"\nexec {real} "$@"\n')
                program.chmod(0o755)

    def so_far(self) -> Counter[str]:
        """Return the runs so far by name."""
        return Counter(self._log.read_text().split())

    async def window(self, seconds: float) -> Window:
        """Return what is run within so many seconds from now."""
        before, begin = self.so_far(), time.monotonic()
        await asyncio.sleep(seconds)
        return Window(time.monotonic() - begin, self.so_far() - before)


def _job(name: str, image: str) -> dict[str, Any]:
    """Return a stream that stays open, so its worker has nothing to do."""
    stage = {"replicas": 1, "concurrency": 1}
    return manifest(
        name,
        tasks={"stream": True},
        handler="shell",
        samplesPerTask=1,
        agent={"type": "oracle", "tools": ["bash"]},
        sandbox={"image": image, "warm": 0},
        stages={"init": stage, "run": stage, "eval": stage},
    )


def _queued(state: str = "") -> int:
    """Return the number of this user's Slurm jobs of one state.

    Slurm's own program is asked, and not counted.
    """
    command = ["squeue", "--me", "--noheader", "-o", "%T", *(["-t", state] if state else [])]
    return len(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def remote_calls() -> int:
    """Return this user's calls that slurmctld has answered, by its own count (sdiag), without this one."""
    said = subprocess.run(["sdiag"], capture_output=True, text=True, check=True).stdout
    found = re.search(rf"\(\s*{os.getuid()}\)\s+count:(\d+)", said)
    return int(found[1]) if found else 0


async def _submitted(running: Bridge, client: httpx.AsyncClient, image: str, first: int, last: int) -> None:
    """Submit jobs from `first` on until before `last`, and return once Slurm has a worker of each."""
    for number in range(first, last):
        await submitted(client, _job(f"load-{number}", image))
    try:
        async with asyncio.timeout(SUBMIT_SECONDS):
            for _ in range(int(SUBMIT_SECONDS)):
                running.check()
                if await asyncio.to_thread(_queued) >= last:
                    return
                await asyncio.sleep(1.0)
    except TimeoutError:
        pass
    raise ProgramFailed(f"{_queued()} of {last} workers were submitted; {running.program.tail()}")


async def _measured(settings: Settings) -> list[Measurement]:
    image = await lab.default_image()
    profile = {"partition": "debug", "time_limit": "30", "workers": {"cpus": 1, "memory": "900M"}}
    # The pause between two polls grows to a minute within the first minute.
    ramp, window = (5.0, 20.0) if settings.quick else (64.0, 60.0)
    async with shared_folder() as folder:
        counted = Counted(folder)
        path = {"PATH": f"{counted.bin}:{os.environ['PATH']}"}
        options = ["--default-image", image, "--max-jobs", str(2 * JOBS)]
        async with bridge(folder, profile, options, path) as running, running.client() as client:
            await asyncio.sleep(ramp)
            idle = await counted.window(window)
            await _submitted(running, client, image, 0, 1)
            await asyncio.sleep(2 * SETTLE_SECONDS)
            one = await counted.window(window)
            before, begin = counted.so_far(), time.monotonic()
            await _submitted(running, client, image, 1, JOBS)
            submitting = Window(time.monotonic() - begin, counted.so_far() - before)
            # Workers that start are changes, which are polled for sooner.
            await asyncio.sleep(2 * SETTLE_SECONDS)
            runs = await asyncio.to_thread(_queued, "RUNNING")
            calls = remote_calls()
            many = await counted.window(window)
            calls = remote_calls() - calls
            all_runs = counted.so_far()
        last = (folder / "bridge.log").read_text(errors="replace")
    own = re.search(r"Slurm was asked (\d+) times.*", last)
    check = f"by the bridge's own count, its end included: {own[0] if own else 'not said'}; " if own else ""
    how = (
        f"each run of Slurm's commands by the bridge, counted by programs that stand before Slurm's on its "
        f"PATH ({all_runs.total()} until its end; {check}slurmctld counted {calls} calls of this user in the "
        f"window with {JOBS} jobs, one of them ours)"
    )
    busy = (
        f"{how}; {JOBS} RolloutJobs with a worker each, {runs} of them running, the others pending: "
        f"{many.text()}; while they were submitted: {submitting.text()}"
    )
    each = 60.0 / NAIVE_SECONDS
    return [
        _measurement("slurm_load_idle", idle, each, "a look for new jobs", f"{how}; no jobs: {idle.text()}"),
        _measurement(
            "slurm_load_one_job", one, each, "a squeue", f"{how}; one job, its worker running: {one.text()}"
        ),
        _measurement("slurm_load_100_jobs", many, JOBS * each, "a squeue for each job", busy),
    ]


def _measurement(figure: str, seen: Window, naive: float, what: str, how: str) -> Measurement:
    if not seen.runs:
        raise ProgramFailed(f"{figure}: Slurm was not asked at all within {seen.seconds:.0f} s")
    name = f"{what} every {NAIVE_SECONDS:g} s, computed"
    return Measurement(figure, seen.per_minute, Baseline(name, naive), how)


async def measure(settings: Settings) -> list[Measurement]:
    """Measure the calls as an ordinary user."""
    return await lab.on_slurm(MODULE, settings, _measured)


if __name__ == "__main__":
    lab.program(MODULE, _measured)
