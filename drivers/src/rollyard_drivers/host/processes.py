"""Processes by identity: a pid together with its start time, so that a reused pid is not mistaken."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_START_TIME = 19  # field 22 of /proc/PID/stat, counted after the command name and its parenthesis
_STATE = 0
_SESSION = 3
SESSION_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that cannot be mistaken: its pid, its start time in clock ticks since boot, and the boot."""

    pid: int
    start_ticks: int
    boot_id: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ProcessIdentity | None:
        """The identity in a pid file; None if the file is not one."""
        try:
            return cls(int(document["pid"]), int(document["start_ticks"]), str(document["boot_id"]))
        except (KeyError, TypeError, ValueError):
            return None


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rsplit(")", 1)[1].split()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a living process; None if there is none."""
    fields = _stat(pid)
    if fields is None:
        return None
    return ProcessIdentity(pid, int(fields[_START_TIME]), _boot_id())


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether this very process runs (a zombie does not)."""
    fields = _stat(identity.pid)
    return (
        fields is not None
        and fields[_STATE] not in ("Z", "X")
        and int(fields[_START_TIME]) == identity.start_ticks
        and _boot_id() == identity.boot_id
    )


def is_same_boot(identity: ProcessIdentity) -> bool:
    """Whether the machine still runs the boot that the identity was taken in: other pids mean nothing."""
    return identity.boot_id == _boot_id()


def kill_session(leader: int, since_ticks: int = 0) -> int:
    """Sends SIGKILL to what is left of a session whose leader has ended; returns how many processes it found.

    A session's number is not given to another process while members of it live. Bounded: what
    will not die within five seconds (in the kernel, on a driver) is left.

    Args:
        leader: pid of the process that led it; if that number is in use by a later process, nothing is done.
        since_ticks: members that started earlier than this are none of its descendants.
    """
    deadline = time.monotonic() + SESSION_SECONDS
    killed: set[int] = set()
    while time.monotonic() < deadline:
        left = members(leader, since_ticks)
        if not left or leader in left:
            break
        for pid in left:
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return len(killed)


def members(session: int, since_ticks: int = 0) -> list[int]:
    """The pids of a session's living processes that started at `since_ticks` or later."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = _stat(int(entry.name))
        except IndexError:
            continue
        if (
            fields is not None
            and int(fields[_SESSION]) == session
            and fields[_STATE] not in ("Z", "X")
            and int(fields[_START_TIME]) >= since_ticks
        ):
            found.append(int(entry.name))
    return found


def send(identity: ProcessIdentity, number: signal.Signals, group: bool = False) -> None:
    """Signals a process (or the group that it leads), if it is still the same one."""
    if is_alive(identity):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(identity.pid, number) if group else os.kill(identity.pid, number)


def end(identity: ProcessIdentity, grace_seconds: float) -> bool:
    """Ends a process that is no child: SIGTERM, then SIGKILL after the grace. Returns whether it is gone."""
    send(identity, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while is_alive(identity) and time.monotonic() < deadline:
        time.sleep(0.05)
    if is_alive(identity):
        send(identity, signal.SIGKILL, group=True)
        deadline = time.monotonic() + 5.0
        while is_alive(identity) and time.monotonic() < deadline:
            time.sleep(0.05)
    return not is_alive(identity)
