"""From the submission of a job to its first rollout's first command, beside bare sbatch and Apptainer."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rollyard_crds import Trajectory

from rollyard_bench import lab
from rollyard_bench.harness import manifest
from rollyard_bench.processes import ControlPlane, ProgramFailed, program
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.stats import in_turns

MODULE = "rollyard_bench.slurm_start"
CPUS, MEMORY = 2, "1500M"
"""The resources of the bare job and of the worker's alike."""
CLOCK = "date +%s.%N"
"""The first command prints the time at which it runs. All clocks here are of one machine."""
LONGEST_SECONDS = 60.0
PAUSE_SECONDS = 1.5
"""The pause after each run: the last one's sandboxes and processes have ended, and the scheduler is idle."""
TICK_SECONDS = 1.0
"""slurmctld starts batch jobs once in a second. With a pause of always the same length, each contestant would
always begin at the same distance from that moment."""
READY_SECONDS = 60.0
STOP_SECONDS = 90.0
"""The longest wait for the end: the workers hand over what they hold, then Slurm ends them."""


@asynccontextmanager
async def bridge(home: Path, image: str) -> AsyncIterator[ControlPlane]:
    """Yield the control plane of a ready bridge. At the end the bridge ends its Slurm jobs and itself.

    Raises:
        ProgramFailed: The bridge did not become ready.
    """
    file, log = home.with_suffix(".yaml"), home.with_suffix(".log")
    profile = {"partition": "debug", "workers": {"cpus": CPUS, "memory": MEMORY}}
    file.write_text(yaml.safe_dump(profile))
    command = [sys.executable, "-m", "rollyard", "slurm-bridge", "up", "--home", str(home)]
    command += ["--profile", str(file), "--default-image", image]
    async with program(command, log, stop=signal.SIGINT, stop_seconds=STOP_SECONDS) as running:
        try:
            async with asyncio.timeout(READY_SECONDS):
                while _read(home / "bridge.json").get("pid") != running.process.pid:
                    running.check("slurm-bridge")
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise ProgramFailed(f"the bridge is not ready: {running.tail()}") from error
        url, tokens_file = str(_read(home / "context.json")["url"]), home / "state" / "tokens.json"
        yield ControlPlane(running, url, _read(tokens_file), tokens_file)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def job(name: str, image: str) -> dict[str, Any]:
    """Return a job with one rollout of one command, whose output is the time of day."""
    task = {
        "id": "clock",
        "prompt": "What time is it?",
        "test_script": "true",
        "solution": [{"name": "bash", "arguments": {"command": CLOCK}}],
    }
    stage = {"replicas": 1, "concurrency": 8}
    return manifest(
        name,
        tasks={"inline": [task]},
        handler="shell",
        samplesPerTask=1,
        agent={"type": "oracle", "tools": ["bash"]},
        sandbox={"image": image, "resources": {"memory": "256Mi", "disk": "64Mi"}},
        stages={"init": stage, "run": stage, "eval": stage},
    )


def first_command(trajectory: Trajectory) -> float:
    """Return when the first command of a trajectory ran, according to its output."""
    outputs = [message.content for message in trajectory.messages if message.role == "tool"]
    try:
        return float(str(outputs[0]).split()[0])
    except (IndexError, ValueError) as error:
        text = f"the first command did not say the time: {trajectory.reason} {outputs}"
        raise ProgramFailed(text) from error


async def _ours(plane: ControlPlane, home: Path, image: str, number: int, scripts: list[float]) -> float:
    """Return the milliseconds from the submission to the first command."""
    name = f"first-{number}"
    async with plane.client() as client:
        begin = time.time()
        await client.submit(job(name, image))
        await client.wait(name, LONGEST_SECONDS)
        ended = [one async for one in client.trajectories(name)]
    if [one.status for one in ended] != ["succeeded"]:
        raise ProgramFailed(f"{name}: {[(one.status, one.reason, one.message) for one in ended]}")
    # The worker's own log of this job is begun when the batch script starts.
    logs = [path.stat().st_ctime for path in (home / "logs").glob("*worker*.log")]
    scripts.append((min((at for at in logs if at >= begin), default=begin) - begin) * 1e3)
    return (first_command(ended[0]) - begin) * 1e3


async def _bare(apptainer: str, image: str, folder: Path, number: int) -> float:
    """Return the same for a batch job that starts an instance and executes the command in it."""
    stamp = folder / f"bare-{number}"
    script = "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --nodes=1 --ntasks=1 --cpus-per-task={CPUS} --mem={MEMORY} --output={stamp}.log",
            "export APPTAINER_CONFIGDIR=$(mktemp -d)",
            f"{apptainer} -s instance start {image} bare{number}",
            f"{apptainer} -s exec --pwd / instance://bare{number} {CLOCK} > {stamp}",
            f"{apptainer} -s instance stop -t 1 bare{number}",
            "rm -rf $APPTAINER_CONFIGDIR",
        ]
    )
    begin = time.time()
    command = ("sbatch", "--parsable", "--wait", "--partition", "debug")
    done = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    async with asyncio.timeout(LONGEST_SECONDS):
        await done.communicate(script.encode())
    try:
        return (float(stamp.read_text()) - begin) * 1e3
    except (OSError, ValueError) as error:
        log = stamp.with_name(f"{stamp.name}.log")
        words = log.read_text(errors="replace")[-600:] if log.exists() else "nothing"
        raise ProgramFailed(f"the bare batch job printed no time: {error}; its log says {words!r}") from error


async def _measured(settings: Settings) -> list[Measurement]:
    """Measure the bridge's worker and the bare batch job in turns, on the same cluster."""
    rounds = 4 if settings.quick else 12
    apptainer, image = lab.apptainer(), await lab.default_image()
    scripts: list[float] = []
    numbers = itertools.count()
    rng = random.Random(0)

    # The nodes see the folder, too, because it is below the user's home.
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-", dir=Path.home()) as name:
        folder = Path(name)
        async with bridge(folder / "home", image) as plane:

            async def ours() -> float:
                await asyncio.sleep(PAUSE_SECONDS + rng.uniform(0.0, TICK_SECONDS))
                return await _ours(plane, folder / "home", image, next(numbers), scripts)

            async def bare() -> float:
                await asyncio.sleep(PAUSE_SECONDS + rng.uniform(0.0, TICK_SECONDS))
                return await _bare(apptainer, image, folder, next(numbers))

            times, bare_times = await in_turns(ours, bare, rounds)
    how = (
        f"POST of a RolloutJob of one rollout until its first command runs in its Apptainer sandbox, "
        f"the worker a batch job of its own {times.text()} (batch script begins after "
        f"{median(scripts[1:]):.0f} ms); `sbatch` of a script that starts an instance of the same SIF and "
        f"executes the same command in it {bare_times.text()}"
    )
    baseline = Baseline("sbatch + apptainer instance start + exec, bare", bare_times.p50)
    return [Measurement("slurm_first_rollout", times.p50, baseline, how)]


async def measure(settings: Settings) -> list[Measurement]:
    """Measure as an ordinary user."""
    return await lab.on_slurm(MODULE, settings, _measured)


if __name__ == "__main__":
    lab.program(MODULE, _measured)
