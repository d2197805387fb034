"""The Slurm lab (`scripts/slurm-lab`), whose ordinary user root borrows: a group is then a program there."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import uvloop

from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "scripts" / "slurm-lab"

Measured = Callable[[Settings], Awaitable[list[Measurement]]]


class NotMeasured(RuntimeError):
    """What the figures need is not here; the text says what."""

    reason = "NotMeasured"


async def output(*command: str) -> str:
    """What a command prints.

    Raises:
        NotMeasured: it ended with another status than 0; the text holds its last words.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode != 0:
        words = " | ".join(errors.decode(errors="replace").strip().splitlines()[-5:])
        raise NotMeasured(f"{' '.join(command[:3])} …: exit status {process.returncode}: {words}")
    return out.decode()


async def as_user(
    module: str, settings: Settings, measured: Measured, *, nodes: int = 0
) -> list[Measurement]:
    """What `measured` gives as an ordinary user: here, or for root as the program `module` in the lab.

    Args:
        nodes: how many the lab is to have; 0: as it is. It has as many as before when this returns.
    """
    if os.geteuid() != 0:
        return list(await measured(settings))
    await _compiled()
    await output(str(LAB), "start")  # On a fresh machine this makes the lab's user and its nodes.
    before = len(json.loads(await output(str(LAB), "info"))["nodes"])
    if nodes:
        await output(str(LAB), "start", "--nodes", str(nodes))
    try:
        command = [str(LAB), "run", "--chdir", str(ROOT / "bench"), "--", sys.executable, "-m", module]
        entries = json.loads(
            (await output(*command, *(["--quick"] if settings.quick else []))).splitlines()[-1]
        )
    finally:
        if nodes:
            await output(str(LAB), "start", "--nodes", str(before))
    return [
        Measurement(
            entry["figure"],
            entry["value"],
            Baseline(**entry["baseline"]) if entry["baseline"] else None,
            entry["how"],
        )
        for entry in entries
    ]


async def _compiled() -> None:
    """As an installation does: the user may not write into this checkout, and would compile anew each time.

    The packages that Rollyard needs are compiled by `scripts/setup`.
    """
    await output(sys.executable, "-m", "compileall", "-q", *(str(path) for path in ROOT.glob("*/src")))
    for folder in ROOT.glob("*/src/**/__pycache__"):
        # A process of a stricter umask may have made it.
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)


def program(module: str, measured: Measured) -> None:
    """The program of a group: measures here, and prints the measurements as one line of JSON."""
    parse = argparse.ArgumentParser(prog=f"python -m {module}")
    parse.add_argument("--quick", action="store_true")
    settings = Settings(quick=parse.parse_args().quick)

    async def run() -> list[Measurement]:
        return list(await measured(settings))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run())
    print(json.dumps([asdict(one) for one in found]))


async def default_image() -> str:
    """The sandboxes' default SIF, built where there is none: that takes minutes the first time."""
    return (await output(str(ROOT / "scripts" / "sif"))).strip().splitlines()[-1]


def apptainer() -> str:
    """The program of that name, or of Singularity's.

    Raises:
        NotMeasured: there is none on the PATH.
    """
    found = shutil.which("apptainer") or shutil.which("singularity")
    if found is None:
        raise NotMeasured("neither apptainer nor singularity is on the PATH")
    return found
