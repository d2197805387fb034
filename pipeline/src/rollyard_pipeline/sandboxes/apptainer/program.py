"""Apptainer or SingularityCE: identified by its output, and called without the worker's environment."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rollyard_pipeline.sandboxes.errors import NodeUnusable
from rollyard_pipeline.sandboxes.host.programs import run_program

INSTALL_HINT: Final = (
    "ask the administrator for Apptainer 1.1 or newer (an unprivileged installation is enough: "
    "https://apptainer.org/docs/admin/main/installation.html; many clusters have `module load apptainer`), "
    "or name the program by --apptainer"
)
_ANSWER: Final = re.compile(
    r"\b(apptainer|singularity-ce|singularity)(?:-pro)? version (\d+)\.(\d+)", re.IGNORECASE
)
_OLDEST: Final = {"apptainer": (1, 1), "singularity-ce": (3, 11)}
_OCI_SINCE: Final = (4, 0)
FUSE: Final = Path("/dev/fuse")


@dataclass(frozen=True, slots=True)
class ContainerProgram:
    """A program that starts containers without root."""

    path: str
    kind: Literal["apptainer", "singularity-ce"]
    version: str
    """The version from its output, without the name."""
    options: tuple[str, ...]
    """The options of every start. Without them, a site that makes OCI mode the default has no instances."""
    takes_config: bool
    """Whether the installation is unprivileged, which lets users give their own configuration."""


async def find_program(program: str | None = None) -> ContainerProgram:
    """Return `program`, or the first on PATH that identifies itself as Apptainer or SingularityCE.

    Raises:
        NodeUnusable: There is no such program. The message says what was found instead.
    """
    names = [program] if program else ["apptainer", "singularity"]
    problems = []
    for name in names:
        path = shutil.which(name)
        if path is None:
            problems.append(f"{name}: not found")
            continue
        # Both run concurrently, because a worker's first rollout waits for both.
        (code, text), takes = await asyncio.gather(
            run_program([path, "--version"], seconds=20, env=dict(os.environ)), _takes_config(path)
        )
        match = _ANSWER.search(text)
        if code != 0 or match is None:
            problems.append(f"{path} answers {text.strip()[:200]!r}")
            continue
        # The Singularity from before the two projects split has neither name.
        kind, version = match[1].lower(), (int(match[2]), int(match[3]))
        if kind not in _OLDEST or version < _OLDEST[kind]:
            problems.append(f"{path} is {match[0]}, which is too old")
            continue
        answered = text[match.start() :].split()[2]
        if kind == "apptainer":
            return ContainerProgram(path, "apptainer", answered, (), takes)
        options = ("--no-oci",) if version >= _OCI_SINCE else ()
        return ContainerProgram(path, "singularity-ce", answered, options, takes)
    raise NodeUnusable(
        f"no Apptainer and no SingularityCE ({'; '.join(problems)}): {INSTALL_HINT}", "ApptainerMissing"
    )


async def _takes_config(path: str) -> bool:
    """Return whether there is no set-user-id part, with which only the administrator may configure it."""
    code, text = await run_program([path, "buildcfg"], seconds=20, env=dict(os.environ))
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if code != 0 or not values:
        return False
    return "1" not in (values.get(f"{prefix}_SUID_INSTALL") for prefix in ("APPTAINER", "SINGULARITY"))


def fuse_problem(device: Path = FUSE) -> str | None:
    """Return why this user cannot mount SIF images, or None if it is possible."""
    if not device.exists():
        return f"there is no {device}"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} is closed to this user"
    if not any(shutil.which(name) for name in ("squashfuse_ll", "squashfuse")):
        return "squashfuse is not on the PATH"
    return None


async def userns_problem() -> str | None:
    """Return why this process may not make user namespaces, or None if it may."""
    code = "import ctypes, os, sys; l = ctypes.CDLL(None, use_errno=True)\n"
    # These are the user, mount and process namespaces that a sandbox needs.
    code += "sys.exit(os.strerror(ctypes.get_errno()) if l.unshare(0x10000000 | 0x20000 | 0x20000000) else 0)"
    status, text = await run_program([sys.executable, "-I", "-S", "-c", code], seconds=20, env={})
    return None if status == 0 else text.strip() or f"exit status {status}"


def program_env(folder: Path) -> dict[str, str]:
    """Return the environment for starting a container: its state in `folder`, nothing of the worker's.

    `folder` replaces ~/.apptainer, so a full or missing home folder causes no problem.
    """
    env = {name: os.environ[name] for name in ("PATH", "HOME", "USER", "LOGNAME") if os.environ.get(name)}
    env.setdefault("PATH", os.defpath)
    for prefix in ("APPTAINER", "SINGULARITY"):
        env[f"{prefix}_CONFIGDIR"] = str(folder)
    return {**env, "LANG": "C.UTF-8"}
