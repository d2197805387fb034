"""Apptainer's instances of one run folder: their processes, and how each instance is ended completely.

An instance is a process that keeps it (`Apptainer instance: USER [NAME]`, daemonized), its child `appinit`,
which is process 1 inside, and helpers that serve its file systems. Killing process 1 immediately ends
everything inside, and then the keeper, which ends the helpers. If the keeper is killed first, it leaves the
helpers behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard_pipeline.sandboxes.host.processes import (
    ProcessRef,
    descendants,
    ends,
    kill_and_wait,
    process_ref,
)

_PREFIX: Final = "ry-"
_KEEPER_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Instance:
    """The processes of an instance, as this machine sees them."""

    root: ProcessRef
    keeper: ProcessRef
    helpers: tuple[ProcessRef, ...]


def instance_name(sandbox_id: str) -> str:
    """Return the name under which `apptainer instance list` shows a sandbox."""
    return f"{_PREFIX}{sandbox_id}"


def filed(config: Path) -> list[str]:
    """Return the ids of the sandboxes that Apptainer has filed below `config`, alive or not."""
    names = {path.name for path in config.glob(f"instances/*/*/*/{_PREFIX}*") if path.is_dir()}
    return sorted(name.removeprefix(_PREFIX) for name in names)


def load(config: Path, name: str) -> Instance | None:
    """Return the instance that Apptainer has filed below `config`, or None if it is missing or dead."""
    for file in config.glob(f"instances/*/*/*/{name}/{name}.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            filed = json.loads(file.read_bytes())
            root, keeper = process_ref(int(filed["pid"])), process_ref(int(filed["ppid"]))
            if root is not None and keeper is not None:
                return Instance(root, keeper, _helpers(root, keeper))
    return None


def _helpers(root: ProcessRef, keeper: ProcessRef) -> tuple[ProcessRef, ...]:
    inside = {root.pid, *(ref.pid for ref in descendants(root.pid))}
    return tuple(ref for ref in descendants(keeper.pid) if ref.pid not in inside)


def search(name: str, sessions: Iterable[int] = ()) -> list[ProcessRef]:
    """Return this user's processes whose command line names the instance, with the related processes.

    Related processes are their descendants, those in their sessions, and those in `sessions`. Keepers come
    last.
    """
    own = f"Uid:\t{os.geteuid()}\t"
    keepers, others, theirs = [], dict[ProcessRef, int](), set(sessions)
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            # The status gives the owner: the folder itself belongs to root if a process may not be traced.
            if pid == os.getpid() or own not in Path(f"/proc/{pid}/status").read_text(errors="replace"):
                continue
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            session, ref = os.getsid(pid), process_ref(pid)
            if ref is None:
                continue
            if not {f"[{name}]", name} & set(line.replace("\0", " ").split(" ")):
                others[ref] = session
                continue
            keepers.append(ref)
            if session != os.getsid(0):
                theirs.add(session)
    below = [ref for keeper in keepers for ref in descendants(keeper.pid)]
    beside = [ref for ref, session in others.items() if session in theirs]
    return [ref for ref in dict.fromkeys([*below, *beside]) if ref not in keepers] + keepers


def end(
    root: ProcessRef | None, keeper: ProcessRef | None, helpers: Sequence[ProcessRef], seconds: float
) -> bool:
    """End an instance in the order that leaves nothing, and return whether all of it is gone. This blocks."""
    deadline = time.monotonic() + seconds
    ended = root is None or kill_and_wait(root, deadline - time.monotonic())
    if keeper is not None and not ends(keeper, min(_KEEPER_SECONDS, deadline - time.monotonic())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper.pid, signal.SIGTERM)
        ends(keeper, min(1.0, deadline - time.monotonic()))
    for ref in (*helpers, *([keeper] if keeper is not None else [])):
        ended = kill_and_wait(ref, max(0.1, deadline - time.monotonic())) and ended
    return ended


def end_by_name(name: str, seconds: float, sessions: Iterable[int] = ()) -> bool:
    """End an instance whose processes are not recorded, and return whether all of it is gone. This blocks.

    Args:
        sessions: Sessions that are known to contain its processes, in addition to those found by name.
    """
    deadline = time.monotonic() + seconds
    # Processes are stopped first, until no new one appears: a starting instance starts more of them, and a
    # helper whose keeper is dead can no longer be found.
    stopped: dict[ProcessRef, None] = {}
    while fresh := [ref for ref in search(name, sessions) if ref not in stopped and ref.alive()]:
        for ref in reversed(fresh):
            with contextlib.suppress(ProcessLookupError):
                os.kill(ref.pid, signal.SIGSTOP)
        stopped |= dict.fromkeys(fresh)
        if time.monotonic() >= deadline:
            break
    last = [ref for ref in search(name, sessions) if ref in stopped]
    ended = True
    for ref in dict.fromkeys([*last, *stopped]):
        ended = kill_and_wait(ref, max(0.1, deadline - time.monotonic())) and ended
    return ended


def forget(config: Path, name: str) -> None:
    """Remove what Apptainer files for an instance: its entry and its logs."""
    for path in [*config.glob(f"instances/*/*/*/{name}/*"), *config.glob(f"instances/logs/*/*/{name}.*")]:
        path.unlink(missing_ok=True)
    for folder in config.glob(f"instances/*/*/*/{name}"):
        with contextlib.suppress(OSError):
            folder.rmdir()
