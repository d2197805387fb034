"""The Slurm lab (`scripts/slurm-lab`).

Root borrows its ordinary user, and a group then runs as a program there.
"""

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
    """Something that the figures need is missing; the text says what."""

    reason = "NotMeasured"


async def output(*command: str) -> str:
    """Run a command and return what it prints.

    Raises:
        NotMeasured: The command ended with another status than 0; the text holds the end of its output.
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
    """Run `measured` as an ordinary user: here, or for root as the program `module` in the lab.

    Args:
        nodes: The number of nodes that the lab is to have; 0 leaves the number as it is. The lab has its
            former number of nodes when this returns.
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
    """Compile the checkout, as an installation does. The user may not write into it and would compile it on
    every run.

    The packages that Rollyard needs are compiled by `scripts/setup`.
    """
    await output(sys.executable, "-m", "compileall", "-q", *(str(path) for path in ROOT.glob("*/src")))
    for folder in ROOT.glob("*/src/**/__pycache__"):
        # A process with a stricter umask may have made it.
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)


def program(module: str, measured: Measured) -> None:
    """Run a group as a program: measure here, and print the measurements as one line of JSON."""
    parse = argparse.ArgumentParser(prog=f"python -m {module}")
    parse.add_argument("--quick", action="store_true")
    settings = Settings(quick=parse.parse_args().quick)

    async def run() -> list[Measurement]:
        return list(await measured(settings))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run())
    print(json.dumps([asdict(one) for one in found]))


async def default_image() -> str:
    """Return the sandboxes' default SIF. Where it does not exist it is built, which takes minutes."""
    return (await output(str(ROOT / "scripts" / "sif"))).strip().splitlines()[-1]


def apptainer() -> str:
    """Return the path of Apptainer, or of Singularity.

    Raises:
        NotMeasured: Neither of them is on the PATH.
    """
    found = shutil.which("apptainer") or shutil.which("singularity")
    if found is None:
        raise NotMeasured("neither apptainer nor singularity is on the PATH")
    return found
