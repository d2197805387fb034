"""Processes that outlive the worker which started them: their identity, and killing them reliably.

A process id alone is not an identity, because the kernel reuses it. Together with the start time (field 22
of /proc/<pid>/stat, clock ticks since boot; proc(5)) it is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A reference that identifies one process reliably."""

    pid: int
    started: int
    """The start time in clock ticks since boot."""

    def alive(self) -> bool:
        """Return whether the process runs. A zombie does not count as running."""
        stat = _stat(self.pid)
        return stat is not None and stat[1] == self.started and stat[0] not in ("Z", "X")


def process_ref(pid: int) -> ProcessRef | None:
    """Return the identity of the process that has `pid` now, or None if there is none."""
    stat = _stat(pid)
    return None if stat is None else ProcessRef(pid, stat[1])


def this_process() -> ProcessRef:
    """Return the identity of the calling process."""
    ref = process_ref(os.getpid())
    if ref is None:
        raise OSError("/proc does not show this process: is /proc mounted?")
    return ref


def kill_and_wait(ref: ProcessRef, seconds: float) -> bool:
    """Send SIGKILL, wait until the process is gone, and return whether it is gone. This blocks.

    The signal is sent through a pidfd and therefore never hits a reused process id.
    """
    try:
        pidfd = os.pidfd_open(ref.pid)
    except ProcessLookupError:
        return True
    try:
        if not ref.alive():
            return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return wait_gone(pidfd, seconds)
    finally:
        os.close(pidfd)


def ends(ref: ProcessRef, seconds: float) -> bool:
    """Return whether the process ends by itself within `seconds`."""
    try:
        pidfd = os.pidfd_open(ref.pid)
    except ProcessLookupError:
        return True
    try:
        return not ref.alive() or wait_gone(pidfd, seconds)
    finally:
        os.close(pidfd)


def wait_gone(pidfd: int, seconds: float) -> bool:
    """Wait until the process of `pidfd` has ended, and return whether it has. This blocks."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))


def descendants(pid: int) -> list[ProcessRef]:
    """Return all processes below `pid`, children before grandchildren, as /proc shows them now."""
    children: dict[int, list[ProcessRef]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        fields = _stat_fields(int(entry.name))
        if fields is not None:
            ref = ProcessRef(int(entry.name), int(fields[19]))
            children.setdefault(int(fields[1]), []).append(ref)
    refs: list[ProcessRef] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        refs.extend(below)
        waiting.extend(child.pid for child in below)
    return refs


def kill_tree(root: ProcessRef, seconds: float) -> bool:
    """Kill `root` and everything below it, and return whether all of it is gone. This blocks.

    `root` must be the reaper of its descendants (PR_SET_CHILD_SUBREAPER), so none of them escapes when its
    parent dies. For the same reason it is killed last.
    """
    deadline = time.monotonic() + seconds
    while root.alive() and time.monotonic() < deadline:
        below = [ref for ref in descendants(root.pid) if ref.alive()]
        if not below:
            break
        for ref in below:
            kill_and_wait(ref, deadline - time.monotonic())
    return kill_and_wait(root, max(0.1, deadline - time.monotonic()))


class Reaper:
    """Collects the exit status of child processes as they end, without a thread per child."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}

    def watch(self, pid: int) -> None:
        """Reap the child `pid` of this process when it ends. This must be called on the event loop."""
        pidfd = os.pidfd_open(pid)
        self._pidfds[pid] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, pid)

    def close(self) -> None:
        """Stop watching. Child processes that still run are left running."""
        for pid in list(self._pidfds):
            self._ended(pid)

    def _ended(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is None:
            return
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _stat_fields(pid: int) -> list[str] | None:
    try:
        # This is called for every sandbox of the node at every lease request, so it is kept short.
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(fd, 4096)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name (field 2) may contain spaces and parentheses, so fields are counted from the last one.
    return data[data.rindex(b")") + 2 :].decode("ascii").split()


def _stat(pid: int) -> tuple[str, int] | None:
    fields = _stat_fields(pid)
    return None if fields is None else (fields[0], int(fields[19]))
