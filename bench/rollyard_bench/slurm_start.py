"""From the submission of a job to its first rollout's first command, beside bare sbatch and Apptainer."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

from rollyard_bench import lab
from rollyard_bench.bridge import Bridge, bridge, finished, shared_folder, submitted, trajectories
from rollyard_bench.memory import manifest
from rollyard_bench.processes import ProgramFailed
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.stats import Contestant, Sample, interleave

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


def first_command(found: dict[str, Any]) -> float:
    """Return when the first command of a trajectory ran, according to its output."""
    said = [message["content"] for message in found["messages"] if message["role"] == "tool"]
    try:
        return float(str(said[0]).split()[0])
    except (IndexError, ValueError) as error:
        raise ProgramFailed(f"the first command did not say the time: {found['reason']} {said}") from error


async def _ours(running: Bridge, image: str, number: int, parts: dict[str, list[float]]) -> float:
    """Return the milliseconds from the submission to the first command."""
    name = f"first-{number}"
    async with running.client() as client:
        begin = time.time()
        await submitted(client, job(name, image))
        await finished(client, name, LONGEST_SECONDS)
        found = await trajectories(client, name)
    if [one["status"] for one in found] != ["succeeded"]:
        raise ProgramFailed(f"{name}: {[(one['status'], one['reason'], one['message']) for one in found]}")
    for part, when in _moments(running.home, begin).items():
        parts.setdefault(part, []).append((when - begin) * 1e3)
    return (first_command(found[0]) - begin) * 1e3


def _moments(home: Path, begin: float) -> dict[str, float]:
    """Return when the worker's own log of this job was begun, which is the batch script's start."""
    logs = [path.stat() for path in (home / "logs").glob("*worker*.log")]
    return {"batch script": min((one.st_ctime for one in logs if one.st_ctime >= begin), default=begin)}


async def _bare(program: str, image: str, folder: Path, number: int) -> float:
    """Return the same for a batch job that starts an instance and executes the command in it."""
    stamp = folder / f"bare-{number}"
    script = "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --nodes=1 --ntasks=1 --cpus-per-task={CPUS} --mem={MEMORY} --output={stamp}.log",
            "export APPTAINER_CONFIGDIR=$(mktemp -d)",
            f"{program} -s instance start {image} bare{number}",
            f"{program} -s exec --pwd / instance://bare{number} {CLOCK} > {stamp}",
            f"{program} -s instance stop -t 1 bare{number}",
            "rm -rf $APPTAINER_CONFIGDIR",
        ]
    )
    begin = time.time()
    done = await asyncio.create_subprocess_exec(
        "sbatch", "--parsable", "--wait", "--partition", "debug", stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    async with asyncio.timeout(LONGEST_SECONDS):
        await done.communicate(script.encode())
    try:
        return (float(stamp.read_text()) - begin) * 1e3
    except (OSError, ValueError) as error:
        log = stamp.with_name(f"{stamp.name}.log")
        said = log.read_text(errors="replace")[-600:] if log.exists() else "nothing"
        raise ProgramFailed(f"the bare batch job printed no time: {error}; its log says {said!r}") from error


async def _measured(settings: Settings) -> list[Measurement]:
    rounds = 4 if settings.quick else 12
    async with shared_folder() as folder:
        return [await _first_rollout(folder, rounds)]


async def _first_rollout(folder: Path, rounds: int) -> Measurement:
    """Measure the bridge's worker and the bare batch job in turns, on the same cluster."""
    program, image = lab.apptainer(), await lab.default_image()
    profile = {"partition": "debug", "workers": {"cpus": CPUS, "memory": MEMORY}}
    ours: list[float] = []
    bare: list[float] = []
    parts: dict[str, list[float]] = {}
    numbers = itertools.count()
    rng = random.Random(0)

    def pause() -> float:
        return PAUSE_SECONDS + rng.uniform(0.0, TICK_SECONDS)

    async with bridge(folder, profile, ["--default-image", image]) as running:

        async def step_ours() -> None:
            await asyncio.sleep(pause())
            ours.append(await _ours(running, image, next(numbers), parts))

        async def step_bare() -> None:
            await asyncio.sleep(pause())
            bare.append(await _bare(program, image, folder, next(numbers)))

        contestants = {
            "bare": Contestant(step_bare, rounds, warm_up=1),
            "ours": Contestant(step_ours, rounds, warm_up=1),
        }
        await interleave(contestants, rounds)
    return _measurement(Sample(tuple(ours[1:])), parts, Sample(tuple(bare[1:])))


def _measurement(mine: Sample, parts: dict[str, list[float]], theirs: Sample) -> Measurement:
    moments = ", ".join(f"{part} begins after {median(taken[1:]):.0f} ms" for part, taken in parts.items())
    return Measurement(
        "slurm_first_rollout",
        mine.p50,
        Baseline("sbatch + apptainer instance start + exec, bare", theirs.p50),
        f"POST of a RolloutJob of one rollout until its first command runs in its Apptainer sandbox, "
        f"the worker a batch job of its own {mine.text()} ({moments}); `sbatch` of a script that starts "
        f"an instance of the same SIF and executes the same command in it {theirs.text()}",
    )


async def measure(settings: Settings) -> list[Measurement]:
    """Measure as an ordinary user."""
    return await lab.on_slurm(MODULE, settings, _measured)


if __name__ == "__main__":
    lab.program(MODULE, _measured)
