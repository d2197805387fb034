"""Processes, mounts, sockets and control groups of one Rollyard, as the kernel lists them.

A sandbox has a clean environment and, once started, nothing of the home in its command line. It is identified
by the listening socket that it inherited, whose path is in the home; by the namespace of process ids that the
holder of that socket lives in; and by its control groups, which carry the name of the socket's folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
SOCKET = "exec.sock"


@dataclass(frozen=True, slots=True)
class Process:
    """One live process."""

    pid: int
    started: int
    """The clock ticks since boot: with the pid, they are an identity that is never reused."""
    parent: int
    kind: str
    """One of driver, control-plane, worker, backend, sandbox and ready; otherwise foreign."""
    sandbox: str = ""
    """The sandbox that it belongs to."""
    is_first: bool = False
    """Whether this is process 1 of its namespace, with which everything inside ends."""

    def alive(self) -> bool:
        """Return whether this very process still runs."""
        with contextlib.suppress(OSError):
            state, _, started = _stat(self.pid)
            return started == self.started and state not in "ZX"
        return False


def processes(home: Path, mark: bytes, known: Set[str] = frozenset()) -> list[Process]:
    """Return the live processes of the Rollyard in `home` whose driver has `mark` in its environment.

    `known` holds the names of its sandboxes seen before, whose sockets may be gone.
    """
    bound = dict(_sockets(home))
    names = known | set(bound.values())
    found: dict[int, Process] = {}
    others: list[_Seen] = []
    for pid in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()):
        # A process may end while it is being read, and is left out then; a zombie holds nothing.
        with contextlib.suppress(OSError):
            seen = _look(pid)
            if seen.state in "ZX" or pid == os.getpid():
                continue
            if mark in seen.environment:
                kind = "ready" if _stands_ready(pid, seen.command) else _kind(seen.command)
                found[pid] = Process(pid, seen.started, seen.parent, kind)
            else:
                others.append(seen)
    named: dict[str, str] = {}
    outside = os.readlink(PROC / "self/ns/pid")
    for seen in others:
        name = next((name for name in seen.groups if name in names), None)
        name = name or next((bound[inode] for inode in _inodes(seen.pid) if inode in bound), None)
        if name is not None:
            found[seen.pid] = seen.of(name)
            if seen.namespace != outside:
                named[seen.namespace] = name
    for seen in others:
        if seen.namespace in named:
            found[seen.pid] = seen.of(named[seen.namespace])
    # Outside, one process waits for the first one inside.
    waiting = {one.parent: one.sandbox for one in found.values() if one.is_first}
    for seen in others:
        if seen.pid in waiting and b"bwrap" in seen.command[0]:
            found[seen.pid] = seen.of(waiting[seen.pid])
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Seen:
    pid: int
    state: str
    parent: int
    started: int
    command: list[bytes]
    environment: list[bytes]
    groups: frozenset[str]
    """The last parts of its control groups."""
    namespace: str

    def of(self, sandbox: str) -> Process:
        numbers = _numbers(self.pid)
        return Process(
            self.pid, self.started, self.parent, "sandbox", sandbox, len(numbers) > 1 and numbers[-1] == "1"
        )


def _look(pid: int) -> _Seen:
    folder = PROC / str(pid)
    state, parent, started = _stat(pid)
    return _Seen(
        pid,
        state,
        parent,
        started,
        (folder / "cmdline").read_bytes().split(b"\0"),
        (folder / "environ").read_bytes().split(b"\0"),
        frozenset(line.rsplit("/", 1)[1] for line in (folder / "cgroup").read_text().splitlines()),
        os.readlink(folder / "ns/pid"),
    )


def sandbox_names(home: Path) -> set[str]:
    """Return every sandbox that has a folder or a socket now."""
    names = {name for _, name in _sockets(home)}
    with contextlib.suppress(FileNotFoundError):
        names |= {name for name in os.listdir(home / "run" / "sandboxes") if not name.startswith(".")}
    return names


def mounts(home: Path) -> list[str]:
    """Return the mounts of this namespace in the home."""
    return [line for line in (PROC / "self/mountinfo").read_text().splitlines() if str(home) in line]


def sockets(home: Path) -> list[str]:
    """Return the paths of bound Unix sockets in the home."""
    return [name for _, name in _sockets(home)]


def control_groups(names: Set[str]) -> list[str]:
    """Return the control groups with these names, wherever they are."""
    return [f"{folder}/{name}" for folder, below, _ in os.walk(CGROUPS) for name in below if name in names]


def _sockets(home: Path) -> Iterator[tuple[str, str]]:
    """Yield (inode, sandbox) of every Unix socket bound below the home."""
    for line in (PROC / "net/unix").read_text().splitlines()[1:]:
        fields = line.split(None, 7)
        if len(fields) == 8 and fields[7].startswith(f"{home}/"):
            path = Path(fields[7])
            yield fields[6], path.parent.name if path.name == SOCKET else path.name


def _inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for number in os.listdir(PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(PROC / str(pid) / "fd" / number)
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _stat(pid: int) -> tuple[str, int, int]:
    """Return state, parent and start time (proc(5), fields 3, 4 and 22)."""
    fields = (PROC / str(pid) / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    return fields[0], int(fields[1]), int(fields[19])


def _numbers(pid: int) -> list[str]:
    """Return the process's number in each namespace, from the outermost."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return line.split()[1:]
    return []


def _stands_ready(pid: int, words: list[bytes]) -> bool:
    """Return whether a process waits to become a worker, a backend or a control plane.

    Such a process reads its arguments from a pipe, which it closes when it has them.
    """
    if b"rollyard_drivers.host.ready_process" not in words:
        return False
    return os.readlink(PROC / str(pid) / "fd/0").startswith("pipe:")


def _kind(words: list[bytes]) -> str:
    for module, kind in (
        (b"rollyard_api", "control-plane"),
        (b"rollyard_pipeline", "worker"),
        (b"rollyard_engine", "backend"),
        (b"rollyard", "driver"),
    ):
        if module in words:
            return kind
    return "foreign"
