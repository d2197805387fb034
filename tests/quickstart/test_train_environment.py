"""The environment of the trainer in examples/grpo."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[2]


def test_the_environment_has_what_the_light_client_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = set(re.findall(r'"([^"\s]+>=[^"\s]+)"', (ROOT / "scripts/train-env").read_text()))
    assert set(project["dependencies"]) <= listed


def test_an_environment_without_torch_is_refused() -> None:
    done = subprocess.run(
        [ROOT / "scripts/train-env"], env={"TRAIN_PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=patience(60),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "lacks a package" in done.stderr


def test_an_unknown_extra_is_refused() -> None:
    done = subprocess.run(
        [ROOT / "scripts/train-env", "all"], capture_output=True, text=True, timeout=patience(60)
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage" in done.stderr
