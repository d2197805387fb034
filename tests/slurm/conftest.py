"""A real Slurm of four nodes with real rootless Apptainer, used as an ordinary user: scripts/slurm-lab's.

It is one for all processes of a machine, which `shared_lab` starts and ends.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from rollyard_testing.kubernetes.kubelab import cluster, images
from rollyard_testing.pace import patience
from rollyard_testing.sharedlab import NotStarted, shared_lab
from rollyard_testing.slurm.slurmlab import (
    IN_USE,
    LAB,
    START_SECONDS,
    CommandFailed,
    Slurm,
    lab_command,
)

__all__ = ["cluster", "images"]


@pytest.fixture(scope="session")
def slurm_lab(missing: Callable[[str], NoReturn]) -> Iterator[Slurm]:
    """Yield the running lab."""
    if os.geteuid() != 0:
        missing("no Slurm: scripts/slurm-lab needs root")
    try:
        with shared_lab(IN_USE, _runs, _start, lambda: lab_command("stop")):
            told = json.loads(lab_command("info"))
            yield Slurm(
                conf=Path(told["conf"]),
                home=Path(told["home"]),
                user=told["user"],
                uid=told["uid"],
                gid=told["gid"],
                nodes=tuple(told["nodes"]),
                node_tmp={node: Path(path) for node, path in told["node_tmp"].items()},
                env=told["env"],
            )
    except NotStarted as error:
        missing(f"no Slurm: {error}")


def _runs() -> bool:
    ran = subprocess.run([sys.executable, str(LAB), "status"], capture_output=True, timeout=patience(60))
    return ran.returncode == 0


def _start() -> None:
    try:
        lab_command("start", timeout=START_SECONDS)
    except (CommandFailed, subprocess.TimeoutExpired) as error:
        raise NotStarted(error) from error


@pytest.fixture
def slurm(slurm_lab: Slurm) -> Iterator[Slurm]:
    """Yield the lab for one test: whatever the test broke runs again afterwards, and its jobs are gone."""
    yield slurm_lab
    slurm_lab.heal()


@pytest.fixture
def shared(slurm_lab: Slurm, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Yield a fresh folder of the user's in the shared home, removed after the test."""
    path = Path(_made(slurm_lab, "mktemp", "-d", str(slurm_lab.home / "t-XXXXXX")))
    yield path
    _made(slurm_lab, "rm", "-rf", "--", str(path))


def _made(lab: Slurm, *argv: str) -> str:
    return lab.run_as_user(argv).stdout.strip()


_PROGRAMS = (
    "bash", "awk", "basename", "cat", "chmod", "cp", "cut", "date", "dirname", "env", "expr", "find", "grep",
    "head", "id", "ls", "mkdir", "mv", "printf", "rm", "sed", "seq", "sleep", "sort", "tail", "tee", "touch",
    "tr", "uniq", "wc", "xargs",
)  # fmt: skip
_BUILD_SECONDS = patience(500.0)


@pytest.fixture(scope="session")
def sif(slurm_lab: Slurm) -> Iterator[Path]:
    """Yield an image for sandboxes: bash, some programs and the libraries they load, built by the user."""
    folder = Path(_made(slurm_lab, "mktemp", "-d", str(slurm_lab.home / "image-XXXXXX")))
    files = set()
    for name in _PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin")
        assert found is not None, f"no {name} on this machine"
        files.add((f"usr/bin/{name}", str(Path(found).resolve())))
        listing = subprocess.run(
            ["ldd", found], capture_output=True, text=True, timeout=patience(20), check=True
        )
        files |= {(word.lstrip("/"), word) for word in listing.stdout.split() if word.startswith("/")}
    lines = ["set -e", f"cd {folder}", "mkdir -p root/usr/bin root/etc root/tmp root/proc root/sys root/dev"]
    lines += ["ln -s usr/bin root/bin", "mkdir -p root/home root/root root/var/tmp root/work"]
    for target, source in sorted(files):
        lines.append(f"mkdir -p root/{Path(target).parent} && cp -L {shlex.quote(source)} root/{target}")
    lines += ["ln -s bash root/usr/bin/sh", "echo root:x:0:0::/root:/bin/bash > root/etc/passwd"]
    lines += ["echo root:x:0: > root/etc/group", "apptainer -s build image.sif root", "rm -rf root"]
    slurm_lab.run_as_user(["sh", "-c", "\n".join(lines)], timeout=_BUILD_SECONDS)
    yield folder / "image.sif"
    _made(slurm_lab, "rm", "-rf", "--", str(folder))
