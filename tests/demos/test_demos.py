"""The demos that `make` offers, at a small size: each is run, and what it says and leaves is checked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from rollyard_testing.pace import patience

pytestmark = [pytest.mark.demos, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--tasks", "8", "--samples", "4")
DEMO_SECONDS = patience(580.0)


def run(*command: str, **environment: str) -> None:
    python = () if command[0] in ("scripts/demo-vllm", "scripts/test-grpo") else (sys.executable,)
    done = subprocess.run(
        [*python, *command],
        cwd=ROOT,
        env={**os.environ, "VENV": sys.prefix, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEMO_SECONDS,
    )
    assert done.returncode == 0, done.stdout


def test_two_vllm_servers_get_new_weights_in_the_middle(tmp_path: Path) -> None:
    run("scripts/demo-vllm", str(tmp_path), *SMALL)
    run("scripts/check-demo", "vllm", str(tmp_path))


def test_a_model_learns(tmp_path: Path) -> None:
    size = ("--steps", "2", "--groups", "16", "--learning-rate", "1e-3", "--held-out-samples", "4")
    run("scripts/demo-train", str(tmp_path), *size)
    run("scripts/check-demo", "train", str(tmp_path), "--rise", "4")


def test_the_trainers_own_tests_pass() -> None:
    run("scripts/test-grpo")


def test_kubernetes(tmp_path: Path, images: str) -> None:
    run("scripts/demo-kubernetes", str(tmp_path), *SMALL, "--tag", images)
    run("scripts/check-demo", "kubernetes", str(tmp_path), "8", "4", "--vllm")


def test_slurm(tmp_path: Path, missing: Callable[[str], NoReturn]) -> None:
    if os.geteuid() != 0:
        missing("there is no Slurm: scripts/slurm-lab needs root")
    run("scripts/demo-slurm", str(tmp_path), *SMALL)
    run("scripts/check-demo", "slurm", str(tmp_path), "8", "4", "4", "--vllm")
