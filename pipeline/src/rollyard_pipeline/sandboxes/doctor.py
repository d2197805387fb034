"""What of the sandboxes works on this machine, and what to do about the rest."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollyard_pipeline.sandboxes.bubblewrap import probe_bwrap
from rollyard_pipeline.sandboxes.cgroups import CgroupPlace, enforced, find_places
from rollyard_pipeline.sandboxes.errors import BubblewrapMissing, RunDirUnusable, UserNamespacesForbidden
from rollyard_pipeline.sandboxes.records import SandboxFolder

_NPROC_PER_NAMESPACE = (5, 14)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    ok: bool
    meaning: str
    """What the finding means for sandboxes here."""
    remedy: str = ""
    """What to do about it; empty where there is nothing to do."""


async def sandbox_checks(
    run_dir: Path,
    *,
    bwrap: str | None = None,
    places: Callable[[], Sequence[CgroupPlace]] = find_places,
    proc: Path = Path("/proc"),
) -> list[Check]:
    """All checks of this package, most important first."""
    return [
        *await _bubblewrap(bwrap),
        limits_check(places(), root=os.geteuid() == 0, release=platform.release()),
        _tmpfs(proc),
        _run_dir(run_dir),
    ]


async def _bubblewrap(bwrap: str | None) -> list[Check]:
    try:
        version = ".".join(map(str, await probe_bwrap(bwrap)))
    except BubblewrapMissing as error:
        return [Check("bubblewrap", False, "sandboxes cannot be started", str(error))]
    except UserNamespacesForbidden as error:
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
    """Which kind of limits is in force for a user (root or not) on a kernel of this release."""
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
    # As root a fork bomb would not be stopped; elsewhere the weaker kind still binds.
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
    except RunDirUnusable as error:
        return Check("run folder", False, "workers cannot keep sandboxes there", str(error))
    return Check("run folder", True, f"{run_dir}, private to this user")


def _kernel(release: str) -> tuple[int, ...]:
    numbers = release.split("-")[0].split(".")
    return tuple(int(part) for part in numbers[:2] if part.isdigit())
