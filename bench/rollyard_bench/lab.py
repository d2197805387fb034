"""The Slurm lab (`scripts/slurm-lab`).

Root borrows its ordinary user, and a group then runs as a program there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import uvloop

from rollyard_bench.processes import ROOT, Missing, ProgramFailed, needed, output, unwind
from rollyard_bench.results import Baseline, Measurement, Settings

LAB = ROOT / "scripts" / "slurm-lab"
SINFO_SECONDS = 30.0

Measured = Callable[[Settings], Awaitable[list[Measurement]]]


async def as_user(module: str, settings: Settings, measured: Measured) -> list[Measurement]:
    """Run `measured` as an ordinary user: here, or for root as the program `module` in the lab.

    Raises:
        Missing: The lab cannot be had on this machine, or `measured` misses something.
    """
    if os.geteuid() != 0:
        return list(await measured(settings))
    await output(str(LAB), "start")  # On a fresh machine this makes the lab's user and its nodes.
    await _compiled()
    command = [str(LAB), "run", "--chdir", str(ROOT / "bench"), "--", sys.executable, "-m", module]
    entries = json.loads((await output(*command, *(["--quick"] if settings.quick else []))).splitlines()[-1])
    return [
        Measurement(**{**entry, "baseline": Baseline(**entry["baseline"]) if entry["baseline"] else None})
        for entry in entries
    ]


async def on_slurm(module: str, settings: Settings, measured: Measured) -> list[Measurement]:
    """Run `measured` as `as_user` does, with a Slurm: the lab's for root, and otherwise the user's own.

    Raises:
        Missing: There is none, or what `as_user` says.
    """
    if os.geteuid() != 0:
        needed("sinfo", "slurm-client")
        try:
            partitions = await output("sinfo", "-h", "-p", "debug", "-o", "%P", seconds=SINFO_SECONDS)
        except ProgramFailed as error:
            raise Missing(f"no Slurm answers, and only root can start scripts/slurm-lab: {error}") from error
        if not partitions.strip():
            raise Missing("this Slurm has no partition `debug`")
    return await as_user(module, settings, measured)


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

    # A terminal's Ctrl-C comes here, too, but the benchmark ends this program itself, by SIGTERM. A second
    # signal would keep what unwinds from stopping bridges and their jobs.
    signal.signal(signal.SIGINT, lambda signum, frame: None)
    signal.signal(signal.SIGTERM, unwind)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            measurements = runner.run(run())
        except Missing as error:
            # `output` makes a Missing of this again, on the other side.
            print(" ".join(str(error).split()), file=sys.stderr)
            sys.exit(os.EX_UNAVAILABLE)
    print(json.dumps([asdict(one) for one in measurements]))


async def default_image() -> str:
    """Return the sandboxes' default SIF. Where it does not exist it is built, which takes minutes.

    Raises:
        Missing: It cannot be built or mounted on this machine.
    """
    if not Path("/dev/fuse").exists():
        raise Missing("there is no /dev/fuse, without which no SIF is mounted (modprobe fuse)")
    return (await output(str(ROOT / "scripts" / "sif"))).strip().splitlines()[-1]


def apptainer() -> str:
    """Return the path of Apptainer, or of Singularity.

    Raises:
        Missing: Neither of them is on the PATH.
    """
    path = shutil.which("apptainer") or shutil.which("singularity")
    if path is None:
        raise Missing("neither apptainer nor singularity is on the PATH")
    return path
