"""Both distributions of this tree, built once, and a quick installer for empty environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[2]
Install = Callable[..., Path]


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both distributions, built from this tree."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=patience(100))
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    """Return the path of the built wheel."""
    (path,) = dist.glob("*.whl")
    return path


def _pip_setting(name: str) -> str:
    """Return a setting of this machine's pip, or an empty text."""
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    return found.stdout.strip() if found.returncode == 0 else ""


@pytest.fixture(scope="session")
def install(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory, missing: Callable[[str], NoReturn]
) -> Install:
    """Return a function that makes an empty environment with the wheel and some extras.

    The function takes extras, and optionally the Python to use. It returns the folder of the environment's
    programs. Packages come from where the pip of this machine gets them.
    """
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        missing("uv is not installed: run `make setup`")
    env = {**os.environ, "UV_NO_CONFIG": "1", "UV_NO_PROGRESS": "1", "UV_INDEX_STRATEGY": "unsafe-best-match"}
    for option, variable in (
        ("index-url", "UV_DEFAULT_INDEX"),
        ("extra-index-url", "UV_INDEX"),
        ("find-links", "UV_FIND_LINKS"),
        ("cert", "SSL_CERT_FILE"),
    ):
        found = _pip_setting(option)
        if found and variable not in env:
            env[variable] = found
    env.pop("VIRTUAL_ENV", None)

    def make(extras: str = "", python: str = sys.executable) -> Path:
        folder = tmp_path_factory.mktemp(extras.replace(",", "-") or "base") / "env"
        wanted = f"rollyard[{extras}] @ {wheel.as_uri()}" if extras else str(wheel)
        for command in (
            ["venv", "--quiet", "--python", python, str(folder)],
            ["pip", "install", "--quiet", "--python", str(folder / "bin/python"), wanted],
        ):
            done = subprocess.run(
                [uv, *command], env=env, capture_output=True, text=True, timeout=patience(240)
            )
            assert done.returncode == 0, done.stderr
        return folder / "bin"

    return make
