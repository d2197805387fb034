"""A run of examples/trl on a Rollyard of its own, with the real TRL of scripts/train-env."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from rollyard_testing.faults.yard import ROOT, Yard
from rollyard_testing.pace import patience

ENVIRONMENT_SECONDS = 900.0
RUN_SECONDS = 1200.0
PACKAGES = ("crds/src", "process/src", "tasks/src", "client/src", "cli/src", "drivers/src")
"""The folders of the packages that a trainer imports."""


class TrlMissing(Exception):
    """There is no environment with TRL; the message says why."""


class RunFailed(Exception):
    """The run failed; the message has its last words."""


def trl_python() -> Path:
    """Return the Python of an environment with TRL, which is made at the first call on a machine.

    Raises:
        TrlMissing: It cannot be made.
    """
    try:
        done = subprocess.run(
            [str(ROOT / "scripts/train-env"), "trl"],
            capture_output=True,
            text=True,
            timeout=patience(ENVIRONMENT_SECONDS),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TrlMissing(f"scripts/train-env trl: {error}") from error
    if done.returncode != 0:
        raise TrlMissing(f"scripts/train-env trl failed: {done.stderr.strip()[-1000:]}")
    return Path(done.stdout.strip().splitlines()[-1])


def trained_with_trl(python: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """Start a Rollyard, run `examples/trl/train.py` on it, and return its summary.

    Args:
        python: The Python with TRL.
        folder: An empty folder for both.
        arguments: Further arguments of the example.

    Raises:
        RunFailed: The example ended with an error, or took too long.
    """
    yard = Yard(folder)
    yard.start()
    try:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLYARD_")}
        environment |= {
            "ROLLYARD_HOME": str(yard.home),
            "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in PACKAGES),
        }
        command = [str(python), str(ROOT / "examples/trl/train.py"), "--out", str(folder / "out"), *arguments]
        with (folder / "train.log").open("wb") as log:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                timeout=patience(RUN_SECONDS),
            )  # fmt: skip
        if done.returncode != 0:
            raise RunFailed((folder / "train.log").read_text(errors="replace")[-3000:] + yard.words())
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"{error}\n{(folder / 'train.log').read_text(errors='replace')[-3000:]}") from error
    finally:
        if yard.running():
            yard.stop()
    found: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    return found
