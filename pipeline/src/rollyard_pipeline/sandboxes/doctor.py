"""Checks of which sandbox features work on this machine, and advice on how to fix the others."""

from __future__ import annotations

import os
import platform
import pwd
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard_pipeline.sandboxes.apptainer.program import FUSE, find_program, fuse_problem, userns_problem
from rollyard_pipeline.sandboxes.apptainer.starter import namespace_advice
from rollyard_pipeline.sandboxes.containers.engine import KINDS, find_engine
from rollyard_pipeline.sandboxes.errors import NodeUnusable
from rollyard_pipeline.sandboxes.host.cgroups import CgroupPlace, enforced, find_places
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_pipeline.sandboxes.starters.bubblewrap import probe_bwrap

_NPROC_PER_NAMESPACE: Final = (5, 14)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    ok: bool
    meaning: str
    """What the result means for sandboxes on this machine."""
    remedy: str = ""
    """What to do about the problem. It is empty if nothing needs to be done."""


async def sandbox_checks(
    run_dir: Path,
    *,
    bwrap: str | None = None,
    places: Callable[[], Sequence[CgroupPlace]] = find_places,
    proc: Path = Path("/proc"),
) -> list[Check]:
    """Run all checks of this package and return their results, the most important first."""
    return [
        *await _bubblewrap(bwrap),
        limits_check(places(), root=os.geteuid() == 0, release=platform.release()),
        _tmpfs(proc),
        _run_dir(run_dir),
    ]


async def apptainer_checks(
    program: str | None = None, *, fuse: Path = FUSE, etc: Path = Path("/etc")
) -> list[Check]:
    """Check which features of Apptainer sandboxes work for this user on this node.

    Args:
        program: The program. The default is `apptainer`, else `singularity`, from PATH.
        fuse: The device that mounts of SIF files need.
        etc: The folder that holds subuid and subgid.
    """
    checks = []
    try:
        container_program = await find_program(program)
    except NodeUnusable as error:
        checks.append(Check("apptainer", False, "no sandboxes from container images", str(error)))
    else:
        sized = (
            "the writable layer of an image is sized by the job"
            if container_program.takes_config
            else "set-user-id installation: the writable layer has the administrator's `sessiondir max size`"
        )
        checks.append(
            Check(
                "apptainer",
                True,
                f"{container_program.kind} {container_program.version} ({container_program.path}); {sized}",
            )
        )
    problem = await userns_problem()
    if problem is None:
        checks.append(Check("user namespaces", True, "this user may make them"))
    else:
        meaning = f"sandboxes cannot be started: {problem}"
        checks.append(Check("user namespaces", False, meaning, "; ".join(namespace_advice())))
    return [*checks, _fuse(fuse), _subordinate_ids(etc)]


async def engine_checks() -> list[Check]:
    """Check for each container engine whether it can start sandboxes, and with which promises."""
    checks = []
    for kind in KINDS:
        try:
            engine = await find_engine(kind)
        except NodeUnusable as error:
            checks.append(Check(kind, False, f"no --sandbox {kind}", str(error)))
            continue
        who = "rootless" if engine.rootless else "as root"
        meaning = f"version {engine.version}, {who}; memory, processes and CPU of each sandbox are limited"
        remedy = ""
        if not engine.own_users:
            meaning += "; with --fakeroot, programs are this machine's user 0, without any capability"
            remedy = "set the daemon's option userns-remap, or use rootless mode, to give them another user"
        checks.append(Check(kind, True, meaning, remedy))
    return checks


def _fuse(device: Path) -> Check:
    problem = fuse_problem(device)
    if problem is None:
        return Check("fuse", True, f"SIF files are mounted through {device}")
    remedy = (
        f"ask for squashfuse, and for a {device} that all may open (`chmod 0666 {device}`, as udev sets it)"
    )
    # This is not fatal: sandboxes still start, but later and with more disk space.
    return Check("fuse", True, f"{problem}: images are unpacked to folders in the image cache first", remedy)


def _subordinate_ids(etc: Path) -> Check:
    user = pwd.getpwuid(os.geteuid()).pw_name
    lacking = []
    for name in ("subuid", "subgid"):
        try:
            lines = (etc / name).read_text().splitlines()
        except OSError:
            lines = []
        if not any(line.split(":")[0] in (user, str(os.geteuid())) for line in lines):
            lacking.append(f"{etc / name}")
    if not lacking and shutil.which("newuidmap"):
        return Check("subordinate ids", True, "--fakeroot gives images all of their users")
    reason = f"no line for {user} in {' and '.join(lacking)}" if lacking else "newuidmap is not on the PATH"
    ask = f"`usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}`"
    return Check(
        "subordinate ids",
        True,
        f"{reason}: with --fakeroot an image has its root user only",
        f"ask for {ask}",
    )


async def _bubblewrap(bwrap: str | None) -> list[Check]:
    try:
        version = ".".join(map(str, await probe_bwrap(bwrap)))
    except NodeUnusable as error:
        if error.reason == "BubblewrapMissing":
            return [Check("bubblewrap", False, "sandboxes cannot be started", str(error))]
        return [
            Check("bubblewrap", True, "installed"),
            Check("user namespaces", False, "sandboxes cannot be started", str(error)),
        ]
    return [
        Check("bubblewrap", True, f"version {version}"),
        Check(
            "user namespaces", True, "sandboxes get users, processes, mounts, IPC and network of their own"
        ),
    ]


def limits_check(places: Sequence[CgroupPlace], *, root: bool, release: str) -> Check:
    """Return which kind of limits applies for a user (root or not) on a kernel of this release."""
    bound = enforced(places)
    kinds = "cgroup v" + " and v".join(sorted({str(place.version) for place in places}))
    if {"memory", "pids", "cpu"} <= bound:
        return Check("limits", True, f"memory, processes and CPU of each sandbox as a whole ({kinds})")
    missing = sorted({"memory", "pids", "cpu"} - bound)
    remedy = (
        "give this user writable cgroups: run the worker in a systemd user session with Delegate=yes, or the "
        "container with its own writable /sys/fs/cgroup"
    )
    parts = [f"{kinds} limits {', '.join(sorted(bound))}"] if bound else []
    if "memory" in missing:
        parts.append("memory is limited per process only (RLIMIT_DATA), and by the size of /work and /tmp")
    if "pids" in missing:
        if root:
            parts.append("the number of processes is not limited: resource limits do not bind root")
        elif _kernel(release) < _NPROC_PER_NAMESPACE:
            parts.append("the number of processes is counted for the whole account (Linux before 5.14)")
        else:
            parts.append("the number of processes is limited per sandbox (RLIMIT_NPROC)")
    if "cpu" in missing:
        parts.append("CPU is shared, not limited")
    # As root, nothing would stop a fork bomb. For other users the weaker kind of limit still applies.
    return Check("limits", not (root and "pids" in missing), "; ".join(parts), remedy)


def _tmpfs(proc: Path) -> Check:
    try:
        known = any(line.split()[-1] == "tmpfs" for line in (proc / "filesystems").read_text().splitlines())
    except OSError:
        known = False
    if known:
        return Check("tmpfs", True, "work folders are memory file systems of a fixed size")
    return Check(
        "tmpfs", False, "sandboxes have no work folder of limited size", "use a kernel with CONFIG_TMPFS=y"
    )


def _run_dir(run_dir: Path) -> Check:
    try:
        SandboxFolder(run_dir).prepare()
    except NodeUnusable as error:
        return Check("run folder", False, "workers cannot keep sandboxes there", str(error))
    return Check("run folder", True, f"{run_dir}, private to this user")


def _kernel(release: str) -> tuple[int, ...]:
    numbers = release.split("-")[0].split(".")
    return tuple(int(part) for part in numbers[:2] if part.isdigit())
