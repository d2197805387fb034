"""A run of examples/grpo/train.py whose processes are killed: it belongs to one Rollyard on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollyard_testing.faults.yard import ROOT, Yard
from rollyard_testing.pace import patience

ENVIRONMENT_SECONDS = 900.0
EXAMPLE = ROOT / "examples" / "grpo"
LAUNCHER = Path(__file__).with_name("deadly_launcher.py")
PACKAGES = ("cli/src", "client/src", "crds/src", "drivers/src", "process/src")


class TrainerMissing(Exception):
    """There is no environment with torch; the message says why."""


def train_python() -> Path:
    """Return the Python of `scripts/train-env`, which is made at the first call on a machine.

    Raises:
        TrainerMissing: It cannot be made.
    """
    try:
        done = subprocess.run(
            [str(ROOT / "scripts/train-env")],
            capture_output=True,
            text=True,
            timeout=patience(ENVIRONMENT_SECONDS),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TrainerMissing(f"scripts/train-env: {error}") from error
    if done.returncode != 0:
        raise TrainerMissing(f"scripts/train-env failed: {done.stderr.strip()[-1000:]}")
    return Path(done.stdout.strip().splitlines()[-1])


@dataclass
class KilledRun:
    """A run that is started again and again. Each start is a process of its own."""

    out: Path
    log: Path
    arguments: list[str]
    launcher: subprocess.Popen[str]
    points: list[str] = field(default_factory=list)
    """The points at which its processes died, in their order."""

    def begin(self, spared: list[str] | None) -> int:
        """Start the trainer, and return its process id."""
        order = {"argv": [f"--out={self.out}", *self.arguments], "spared": spared, "log": str(self.log)}
        assert self.launcher.stdin is not None
        self.launcher.stdin.write(json.dumps(order) + "\n")
        self.launcher.stdin.flush()
        return int(self._answer()["pid"])

    def end(self) -> int:
        """Wait until the trainer has ended, and return its status; a signal is negative."""
        answer = self._answer()
        if answer["point"] is not None:
            self.points.append(answer["point"])
        return int(answer["status"])

    def _answer(self) -> dict[str, Any]:
        assert self.launcher.stdout is not None
        line = self.launcher.stdout.readline()
        if not line:
            raise AssertionError(f"the launcher has ended\n{self.words()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def words(self) -> str:
        """Return the end of what the trainers have printed."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def updates(self) -> list[tuple[int, str]]:
        """Return the step and the digest of the weights of each update that was computed, in their order."""
        lines = self.log.with_suffix(".updates").read_text().splitlines()
        return [(line["step"], line["digest"]) for line in map(json.loads, lines)]

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the run's checkpoints."""
        return self.out / "checkpoints"


@contextmanager
def a_killed_run(yard: Yard, python: Path, name: str, *arguments: str) -> Iterator[KilledRun]:
    """Yield a run of the example on a Rollyard that runs."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ROLLYARD_")}
    environment |= {
        "ROLLYARD_HOME": str(yard.home),
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in PACKAGES),
    }
    errors = yard.folder / f"{name}.launcher.log"
    with errors.open("wb") as said:
        launcher = subprocess.Popen(
            [str(python), str(LAUNCHER), str(EXAMPLE)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
        )  # fmt: skip
    try:
        yield KilledRun(
            yard.folder / name, yard.folder / f"{name}.log", [f"--run={name}", *arguments], launcher
        )
    finally:
        launcher.kill()
        launcher.communicate()
