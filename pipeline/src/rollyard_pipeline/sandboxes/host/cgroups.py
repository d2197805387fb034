"""Limits through control groups, version 1 (one hierarchy per controller) and version 2.

A sandbox's groups are made below the first place where this process may make them. The processes join
before they become bubblewrap. If there is no such place, the caller falls back to resource limits, which
apply per process (`getrlimit(2)`).

Files: Documentation/admin-guide/cgroup-v1/memory.rst, pids.rst, and cgroup-v2.rst of Linux.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

CPU_PERIOD_US: Final = 100_000
_WANTED: Final = ("memory", "pids", "cpu")
_GROUP: Final = "rollyard"
# All sandboxes together weigh as much as this number of busy processes per core. With the kernel's default of
# one process in total, any other load starves them, and a sandbox starts several times slower. With a much
# larger weight they would starve the workers that serve them.
_WEIGHT_PER_CORE: Final = 4


@dataclass(frozen=True, slots=True)
class CgroupPlace:
    """A folder in which this process may make groups, for some of the controllers."""

    version: Literal[1, 2]
    path: Path
    controllers: frozenset[str]


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The limits for all processes of one sandbox together."""

    cpu: float
    """The number of CPU cores."""
    memory_bytes: int
    processes: int


def find_places(proc: Path = Path("/proc/self")) -> list[CgroupPlace]:
    """Return the places where groups can be made now.

    Each place is tested by making a group. The list is empty if there are none.
    """
    places = [
        _usable_v1(group.path, group.mount, group.controller)
        if group.controller
        else _usable_v2(group.mount, group.path)
        for group in _groups(proc)
    ]
    return [place for place in places if place is not None]


def memory_limit(proc: Path = Path("/proc/self")) -> int:
    """Return the memory in bytes that this process and its children may use together.

    It is that of the machine, or the smallest limit of the process's own groups and the groups above them.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in _groups(proc):
        file = "memory.limit_in_bytes" if group.controller == "memory" else "memory.max"
        for folder in (group.path, *group.path.parents):
            if not folder.is_relative_to(group.mount):
                break
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / file).read_text()))  # Without a limit it may be the word "max".
    return min(limits)


def groups_of(pid: int) -> list[Path]:
    """Return the groups of another process of this machine that limit memory, processes or CPU."""
    try:
        groups = [group.path for group in _groups(Path("/proc/self"), Path(f"/proc/{pid}"))]
    except OSError:
        return []
    return [path for path in groups if path.is_dir()]


@dataclass(frozen=True, slots=True)
class _OwnGroup:
    """The group of a process in one hierarchy."""

    controller: str
    """The controller of a hierarchy of version 1, or "" for that of version 2."""
    mount: Path
    path: Path


def _groups(proc: Path, process: Path | None = None) -> Iterator[_OwnGroup]:
    """Yield the groups of a process in the hierarchies of the wanted controllers that `proc` has mounted.

    The process is `process`, or that of `proc`.
    """
    try:
        mounts = (proc / "mountinfo").read_text().splitlines()
        own = dict(_own_groups(((process or proc) / "cgroup").read_text()))
    except OSError:
        return
    for line in mounts:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        fields = left.split()
        mount = Path(fields[4].encode().decode("unicode_escape"))
        if kind == "cgroup":
            for name in set(options.split()[-1].split(",")) & set(_WANTED):
                yield _OwnGroup(name, mount, _below(mount, fields[3], own.get(name, "/")))
        elif kind == "cgroup2":
            yield _OwnGroup("", mount, _below(mount, fields[3], own.get("", "/")))


def enforced(places: Sequence[CgroupPlace]) -> frozenset[str]:
    """Return which of memory, pids and cpu these places can limit."""
    return frozenset().union(*(place.controllers for place in places))


def group_paths(places: Sequence[CgroupPlace], sandbox_id: str) -> list[Path]:
    """Return the paths for the groups of one sandbox."""
    return [place.path / sandbox_id for place in places]


def create(places: Sequence[CgroupPlace], sandbox_id: str, limits: CgroupLimits) -> list[Path]:
    """Make the groups of one sandbox, set its limits and return the groups' folders.

    Raises:
        OSError: A group could not be made or a limit could not be set. The groups that were made are removed.
    """
    paths: list[Path] = []
    try:
        for place in places:
            path = place.path / sandbox_id
            if not place.path.exists():
                # The last worker to end removes the place.
                place.path.mkdir(exist_ok=True)
                if place.version == 2:
                    _switch_on(place.path)
                _weigh(place)
            path.mkdir()
            paths.append(path)
            for file, value in _settings(place, limits):
                if file.startswith("?"):
                    with contextlib.suppress(OSError):
                        (path / file[1:]).write_text(value)
                else:
                    (path / file).write_text(value)
    except OSError:
        remove(paths, seconds=1.0)
        raise
    return paths


def remove(paths: Sequence[Path], seconds: float) -> bool:
    """Kill what is left in these groups, remove them and return whether they are gone. This blocks.

    The kernel refuses to remove a group for a moment after its last process ended, and provides no event for
    it. The removal is therefore retried.
    """
    deadline = time.monotonic() + seconds
    left = list(paths)
    while True:
        left = [path for path in left if not _remove_one(path)]
        if not left:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)


def remove_places(places: Sequence[CgroupPlace]) -> None:
    """Remove the places that no sandbox of any worker uses any more."""
    for place in places:
        with contextlib.suppress(OSError):
            place.path.rmdir()


def oom_kills(paths: Sequence[Path]) -> int:
    """Return how many processes of these groups the kernel has killed because memory ran out."""
    total = 0
    for path in paths:
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in (path / name).read_text().splitlines():
                    key, _, value = line.partition(" ")
                    total += int(value) if key == "oom_kill" else 0
    return total


def _weigh(place: CgroupPlace) -> CgroupPlace:
    """Set the weight of a place against everything else on this machine, and return the place."""
    if "cpu" in place.controllers:
        processes = _WEIGHT_PER_CORE * (os.cpu_count() or 1)
        # A process of default niceness weighs 1024 in version 1 and 100 in version 2, where the maximum is
        # 10000.
        shares, weight = 1024 * processes, min(10_000, 100 * processes)
        name, value = ("cpu.shares", shares) if place.version == 1 else ("cpu.weight", weight)
        with contextlib.suppress(OSError):
            (place.path / name).write_text(str(value))
    return place


def _settings(place: CgroupPlace, limits: CgroupLimits) -> list[tuple[str, str]]:
    """Return the files and values to write.

    A leading `?` marks a file that may be missing (accounting of swap and of sockets).
    """
    memory, pids = str(limits.memory_bytes), str(limits.processes)
    quota = str(max(1000, int(limits.cpu * CPU_PERIOD_US)))
    settings: list[tuple[str, str]] = []
    if place.version == 1:
        if "memory" in place.controllers:
            # Buffers of sockets are counted apart from other memory, and only where they are limited.
            sockets = str(limits.memory_bytes // 8)
            settings += [("memory.limit_in_bytes", memory), ("?memory.memsw.limit_in_bytes", memory)]
            settings += [("?memory.kmem.tcp.limit_in_bytes", sockets)]
        if "pids" in place.controllers:
            settings += [("pids.max", pids)]
        if "cpu" in place.controllers:
            settings += [("cpu.cfs_period_us", str(CPU_PERIOD_US)), ("cpu.cfs_quota_us", quota)]
        return settings
    if "memory" in place.controllers:
        settings += [("memory.max", memory), ("?memory.swap.max", "0"), ("?memory.oom.group", "0")]
    if "pids" in place.controllers:
        settings += [("pids.max", pids)]
    if "cpu" in place.controllers:
        settings += [("cpu.max", f"{quota} {CPU_PERIOD_US}")]
    return settings


def _own_groups(text: str) -> list[tuple[str, str]]:
    """Return the (`controller`, path) pairs of /proc/<pid>/cgroup. The controller of version 2 is ''."""
    pairs = []
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        pairs += [(name, path) for name in names.split(",")]
    return pairs


def _below(mount: Path, mounted: str, own: str) -> Path:
    """Return the folder of the group `own` in a mount whose root is the group `mounted`."""
    if own == mounted or not own.startswith(mounted.rstrip("/") + "/"):
        return mount
    return mount / own[len(mounted.rstrip("/")) :].lstrip("/")


def _usable_v1(base: Path, mount: Path, controller: str) -> CgroupPlace | None:
    for parent in dict.fromkeys((base, mount)):
        path = parent / _GROUP
        if _can_make(path) and os.access(path / "cgroup.procs", os.W_OK):
            return _weigh(CgroupPlace(1, path, frozenset({controller})))
    return None


def _usable_v2(mount: Path, own: Path) -> CgroupPlace | None:
    """Return a place in the nearest suitable ancestor of the group `own`, or None if there is none.

    A version 2 group with processes of its own cannot delegate controllers to children, so the worker's own
    group is not suitable. An ancestor that already delegates them is (a systemd user's slice), and so is the
    root group, in which root may enable them.
    """
    candidate = own
    while True:
        path = candidate / _GROUP
        with contextlib.suppress(OSError):
            if candidate == mount and os.access(candidate / "cgroup.subtree_control", os.W_OK):
                _switch_on(candidate)
            controllers = set((candidate / "cgroup.subtree_control").read_text().split())
            # Moving a process needs write access to the common ancestor's cgroup.procs.
            if {"memory", "pids"} <= controllers and os.access(candidate / "cgroup.procs", os.W_OK):
                if not _can_make(path):
                    raise PermissionError(path)
                _switch_on(path)
                on = set((path / "cgroup.subtree_control").read_text().split()) & set(_WANTED)
                if on:
                    return _weigh(CgroupPlace(2, path, frozenset(on)))
        if candidate == mount or mount not in candidate.parents:
            return None
        candidate = candidate.parent


def _switch_on(group: Path) -> None:
    missing = set((group / "cgroup.controllers").read_text().split())
    missing -= set((group / "cgroup.subtree_control").read_text().split())
    for controller in _WANTED:
        if controller in missing:
            with contextlib.suppress(OSError):
                (group / "cgroup.subtree_control").write_text(f"+{controller}")


def _can_make(path: Path) -> bool:
    try:
        path.mkdir(exist_ok=True)
        probe = path / f"probe-{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _remove_one(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            for pid in map(int, (path / "cgroup.procs").read_text().split()):
                if pid > 1:  # 0 stands for a process that this pid namespace does not show.
                    os.kill(pid, signal.SIGKILL)
        return False
    return True
