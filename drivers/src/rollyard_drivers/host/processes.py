"""The identity of processes: a pid together with a start time.

The start time ensures that a reused pid is not taken for the earlier process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

# This is field 22 of /proc/PID/stat, counted after the command name and its closing parenthesis.
_START_TIME: Final = 19
_STATE: Final = 0
_SESSION: Final = 3
SESSION_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """The unambiguous identity of a process.

    It consists of the pid, the start time in clock ticks since boot, and the id of the boot.
    """

    pid: int
    start_ticks: int
    boot_id: str

    def to_json(self) -> dict[str, Any]:
        """Return the identity as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ProcessIdentity | None:
        """Return the identity in a pid file, or None if the document is not one."""
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
    """Return the identity of a living process, or None if there is no such process."""
    fields = _stat(pid)
    if fields is None:
        return None
    return ProcessIdentity(pid, int(fields[_START_TIME]), _boot_id())


def is_alive(identity: ProcessIdentity) -> bool:
    """Return whether exactly this process runs. A zombie does not count as running."""
    fields = _stat(identity.pid)
    return (
        fields is not None
        and fields[_STATE] not in ("Z", "X")
        and int(fields[_START_TIME]) == identity.start_ticks
        and _boot_id() == identity.boot_id
    )


def is_same_boot(identity: ProcessIdentity) -> bool:
    """Return whether the machine has not been rebooted since the identity was recorded.

    The pids of another boot mean nothing.
    """
    return identity.boot_id == _boot_id()


def kill_session(leader: int, since_ticks: int = 0) -> int:
    """Kill what is left of a session whose leader has ended, and return the number of processes found.

    The kernel does not give the number of a session to another process while members of the session live. The
    call is bounded: a process that has not died after five seconds (because it hangs in the kernel or in a
    device driver) is left alone.

    Args:
        leader: The pid of the process that led the session. If a later process uses that number, nothing is
            done.
        since_ticks: Members that started earlier than this, in clock ticks since boot, are not descendants of
            the leader and are left alone.
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
    """Return the pids of a session's living processes that started at `since_ticks` or later."""
    pids = []
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
            pids.append(int(entry.name))
    return pids


def send(identity: ProcessIdentity, number: signal.Signals, group: bool = False) -> None:
    """Send a signal to a process (or to the group that it leads), if it is still the same process."""
    if is_alive(identity):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(identity.pid, number) if group else os.kill(identity.pid, number)


def end(identity: ProcessIdentity, grace_seconds: float) -> bool:
    """End a process that is not a child of this one, and return whether it is gone.

    The process gets SIGTERM, and SIGKILL after the grace period.
    """
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
