"""The processes of the sandbox: reading them from /proc, and killing all of them."""

from __future__ import annotations

import os
import signal
from time import monotonic, sleep

from rollyard_sandbox.isolation.system_calls import SET_CHILD_SUBREAPER, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Final

_LONG_PAUSE: Final = 0.01  # seconds
_STAT_BYTES: Final = 4096  # A line of /proc/PID/stat has a few hundred at most.
_OOM_SCORE: Final = 500  # With this score children die of a full memory limit before the server does.


class ProcessStat:
    """A process, as one line of /proc/PID/stat describes it."""

    __slots__ = ("group", "name", "parent", "pid", "session", "state")

    def __init__(self, pid: int, name: bytes, state: str, parent: int, group: int, session: int) -> None:
        self.pid = pid
        self.name = name
        self.state = state
        self.parent = parent
        self.group = group
        self.session = session


def become_subreaper() -> None:
    """Make this process the new parent of all orphans below it, however often they fork and detach."""
    call("prctl", SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def snapshot() -> dict[int, ProcessStat]:
    """Return every process that /proc shows, by pid."""
    processes = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            # A file object would take longer than the reading.
            file = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                line = os.read(file, _STAT_BYTES)
            finally:
                os.close(file)
        except OSError:
            continue  # It ended meanwhile.
        # The command name is in parentheses and may hold anything, even parentheses.
        begin, end = line.index(b"(") + 1, line.rindex(b")")
        state, parent, group, session = line[end + 2 :].split(b" ", 4)[:4]
        pid = int(name)
        processes[pid] = ProcessStat(
            pid, line[begin:end], state.decode(), int(parent), int(group), int(session)
        )
    return processes


def descendants(root: int, processes: dict[int, ProcessStat]) -> list[ProcessStat]:
    """Return all processes below `root` except zombies."""
    children: dict[int, list[ProcessStat]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    alive: list[ProcessStat] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        queue.extend(process.pid for process in below)
        alive.extend(process for process in below if process.state not in "ZX")
    return alive


def alive_below(processes: dict[int, ProcessStat], *, own_namespace: bool) -> list[ProcessStat]:
    """Return the processes of the sandbox that are alive.

    Args:
        processes: All processes, by pid.
        own_namespace: Whether all processes except this one and its init belong to the sandbox. Otherwise
            those below this one do.
    """
    me = os.getpid()
    if not own_namespace:
        return descendants(me, processes)
    return [p for p in processes.values() if p.pid not in (1, me) and p.state not in "ZX"]


def stop_below(root: int) -> set[int]:
    """Stop every process below `root`, zombies included, and return their pids.

    Each process is stopped as soon as it is found, the newest first. None is found if the kernel does not
    list children (proc(5), CONFIG_PROC_CHILDREN).
    """
    stopped: set[int] = set()
    queue = [root]
    while queue:
        for pid in reversed(children_of(queue.pop())):
            if pid not in stopped:
                send_signal((pid,), signal.SIGSTOP)
                stopped.add(pid)
                queue.append(pid)
    return stopped


def children_of(pid: int) -> list[int]:
    """Return the children of a process, the newest last. Some may be missing while others end."""
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                children.extend(map(int, file.read().split()))
    except OSError:
        return children  # The process ended, or this kernel has no such file.
    return children


def session_members(leader: int) -> list[ProcessStat]:
    """Return the processes of session `leader` and everything below it, including the leader."""
    processes = snapshot()
    members = {p.pid: p for p in processes.values() if p.session == leader and p.state not in "ZX"}
    members.update((p.pid, p) for p in descendants(leader, processes))
    return list(members.values())


def forked_by(shell: int) -> tuple[dict[int, int], dict[int, int]]:
    """Find the processes below a shell.

    Returns:
        The copies of the shell that have not become a program yet, and the programs that it started itself,
        each as a map from pid to process group.
    """

    def arguments(pid: int) -> bytes:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return file.read()
        except OSError:
            return b""  # The process has ended.

    own = arguments(shell)
    members = session_members(shell)
    name = next((member.name for member in members if member.pid == shell), b"")
    copies: dict[int, int] = {}
    programs: dict[int, int] = {}
    for member in members:
        if member.pid == shell:
            continue
        # The kernel gives no arguments of a process that forks meanwhile, so hundreds of busy processes would
        # take many seconds. A copy still has the shell's name, which can be read at any time.
        if own and member.name == name and arguments(member.pid) == own:
            copies[member.pid] = member.group
        elif member.parent == shell:
            programs[member.pid] = member.group
    return copies, programs


def with_descendants(roots: Iterable[int]) -> set[int]:
    """Return the pids of these processes and of all processes below them."""
    processes = snapshot()
    return {pid for root in roots for pid in (root, *(p.pid for p in descendants(root, processes)))}


def send_signal(pids: Iterable[int], number: int) -> None:
    """Signal each process that still exists and may be signalled."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def kill_session(leader: int) -> None:
    """Kill the processes of session `leader` and everything below it, including the leader."""
    send_signal((p.pid for p in session_members(leader)), signal.SIGKILL)


def exit_code(status: int) -> int:
    """Return a wait status as shells show it: 128 + the signal's number if a signal ended the process."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def prefer_for_oom(pid: int) -> None:
    """Make the kernel choose `pid` and its children before the server when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "rb", buffering=0) as file:
            own = int(file.read())
        with open(f"/proc/{pid}/oom_score_adj", "wb", buffering=0) as file:
            # A pod may start with a score of up to 1000, and only root may lower a score.
            file.write(b"%d" % min(1000, max(_OOM_SCORE, own + 1)))
    except OSError:
        return  # It ended, or this /proc is read-only. This is a preference, not a guarantee.


def kill_everything(
    reap: Callable[[], bool],
    *,
    own_namespace: bool,
    limit: float = 5.0,
    pausing: Callable[[float], object] = sleep,
) -> int:
    """Kill every process below this one and wait until they are gone.

    In a pid namespace of our own `kill(-1)` reaches all of them at once. Elsewhere the tree below the server,
    which inherits every orphan as a subreaper, is walked until nothing is left. Processes are stopped first,
    because a stopped process cannot fork while the others are being killed. A process that keeps forking and
    ending, each time under a new pid, is gone before a picture of the whole /proc is complete. Therefore the
    processes below the server are read once more and stopped as they are found, without a pause while there
    are new ones.

    Args:
        reap: Collects ended children, and returns False if there are no children.
        own_namespace: Whether only this process and its init may survive.
        limit: The seconds after which processes that do not die are given up.
        pausing: Waits for the end of what was killed, at most for some seconds.

    Returns:
        The number of processes that were killed.
    """
    me = os.getpid()
    killed: set[int] = set()
    deadline = monotonic() + limit
    pause = 0.0005
    while True:
        # In a namespace of our own, what was killed is usually our child. While it ends, its end is awaited
        # for some milliseconds without another picture of the whole /proc.
        while reap() and own_namespace and killed and pause < _LONG_PAUSE:
            pausing(pause)
            pause = min(pause * 2, 0.05)
        processes = snapshot()
        alive = alive_below(processes, own_namespace=own_namespace)
        # A zombie whose other threads are still exiting cannot be reaped yet.
        unreaped = any(p.parent == me and p.state in "ZX" for p in processes.values())
        if not (alive or unreaped) or monotonic() > deadline:
            return len(killed)
        pids = {p.pid for p in alive}
        if own_namespace and alive:
            send_signal((-1,), signal.SIGKILL)
        else:
            send_signal(pids, signal.SIGSTOP)
            pids.update(pid for pid in stop_below(me) if pid not in processes)
            send_signal(pids, signal.SIGKILL)
        if pids <= killed:
            # Killing takes the kernel a moment, and SIGCHLD only comes for our own children.
            sleep(pause)
            pause = min(pause * 2, 0.05)
        killed |= pids
