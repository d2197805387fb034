"""The commands that the scripts of examples/trainers would run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rollyard_testing.checkout import ROOT

TRAINERS = ROOT / "examples" / "trainers"
_PRINT = """#!/bin/sh
printf '%s\\0' "$(basename "$0")" "$@" >> "$COMMANDS"
printf '\\n' >> "$COMMANDS"
"""


def commands(trainer: str, folder: Path, **variables: str) -> list[list[str]]:
    """Run a trainer's train.sh with programs that only note their arguments, and return what it ran.

    Args:
        trainer: The name of a folder of examples/trainers.
        folder: An empty folder for the programs.
        variables: Further variables of its environment.
    """
    noted = folder / "commands"
    noted.touch()
    for name in ("python", "ray", "uv"):
        program = folder / name
        program.write_text(_PRINT)
        program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "COMMANDS": str(noted),
        **variables,
    }
    script = str(TRAINERS / trainer / "train.sh")
    subprocess.run(["bash", script], env=environment, check=True, timeout=60)
    return [line.rstrip("\0").split("\0") for line in noted.read_text().splitlines()]
