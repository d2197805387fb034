"""The processes of the sandbox, read from /proc, and how all of them are killed."""

from __future__ import annotations

import os
import signal
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_OOM_SCORE = 500  # children die of a full memory limit before the server does


class Process:
    """One line of /proc/PID/stat."""

    __slots__ = ("group", "parent", "pid", "session", "state")

    def __init__(self, pid: int, state: str, parent: int, group: int, session: int) -> None:
        self.pid = pid
        self.state = state
        self.parent = parent
        self.group = group
        self.session = session


def become_subreaper() -> None:
    """Orphans below this process become its children, however often they fork and detach."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def snapshot() -> dict[int, Process]:
    """Every process that /proc shows, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                line = file.read()
        except OSError:
            continue  # it ended meanwhile
        # The command name is in parentheses and may hold anything, parentheses too.
        state, parent, group, session = line[line.rindex(b")") + 2 :].split(b" ", 4)[:4]
        pid = int(name)
        found[pid] = Process(pid, state.decode(), int(parent), int(group), int(session))
    return found


def descendants(root: int, processes: dict[int, Process]) -> list[Process]:
    """All processes below `root`, zombies left out."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        queue.extend(process.pid for process in below)
        found.extend(process for process in below if process.state not in "ZX")
    return found


def alive_below(processes: dict[int, Process], *, own_namespace: bool) -> list[Process]:
    """The processes of the sandbox: all but this one and its init, or those below this one."""
    me = os.getpid()
    if not own_namespace:
        return descendants(me, processes)
    return [p for p in processes.values() if p.pid not in (1, me) and p.state not in "ZX"]


def stop_below(root: int) -> set[int]:
    """Stops every process below `root`, each as soon as it is found, the newest first; zombies too.

    Nothing is found where the kernel does not list children (proc(5), CONFIG_PROC_CHILDREN).
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
    """The children of a process, the newest last; some may be left out while others end."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                found.extend(map(int, file.read().split()))
    except OSError:
        return found  # it ended, or this kernel has no such file
    return found


def session_members(leader: int) -> list[Process]:
    """The processes of session `leader` and everything below it, the leader included."""
    processes = snapshot()
    members = {p.pid: p for p in processes.values() if p.session == leader and p.state not in "ZX"}
    members.update((p.pid, p) for p in descendants(leader, processes))
    return list(members.values())


def forked_by(shell: int) -> tuple[dict[int, int], dict[int, int]]:
    """Finds the processes below a shell, as a map from pid to process group.

    Returns:
        The copies of the shell that have not become a program yet, and the programs that it started itself.
    """

    def arguments(pid: int) -> bytes:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return file.read()
        except OSError:
            return b""  # it has ended

    own = arguments(shell)
    copies: dict[int, int] = {}
    programs: dict[int, int] = {}
    for member in session_members(shell):
        if member.pid == shell:
            continue
        if own and arguments(member.pid) == own:
            copies[member.pid] = member.group
        elif member.parent == shell:
            programs[member.pid] = member.group
    return copies, programs


def with_descendants(roots: Iterable[int]) -> set[int]:
    """These processes and all below them."""
    processes = snapshot()
    return {pid for root in roots for pid in (root, *(p.pid for p in descendants(root, processes)))}


def send_signal(pids: Iterable[int], number: int) -> None:
    """Signals each process that still exists and may be signalled."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def prefer_for_oom(pid: int) -> None:
    """Makes the kernel choose `pid` and its children before the server when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "rb", buffering=0) as file:
            own = int(file.read())
        with open(f"/proc/{pid}/oom_score_adj", "wb", buffering=0) as file:
            # A pod may start with up to 1000, and only root may go below what it has.
            file.write(b"%d" % min(1000, max(_OOM_SCORE, own + 1)))
    except OSError:
        return  # it ended, or this /proc is read-only: a preference, not a guarantee


def kill_everything(reap: Callable[[], bool], *, own_namespace: bool, limit: float = 5.0) -> int:
    """Kills every process below this one and waits until they are gone.

    In a pid namespace of our own `kill(-1)` reaches all of them at once. Elsewhere the tree below the server
    is walked (as a subreaper it inherits every orphan): stopped first, so that nothing forks while it is
    being killed, and again until nothing is left. A process that keeps forking and ending, each time under a
    new pid, is gone before a picture of the whole /proc is complete: what is below the server is therefore
    read once more and stopped as it is found, with no pause while there is anything new.

    Args:
        reap: collects ended children; False where there are none.
        own_namespace: this process and its init are all that may survive.
        limit: seconds after which what does not die is given up.

    Returns:
        The number of processes that were killed.
    """
    me = os.getpid()
    killed: set[int] = set()
    deadline = monotonic() + limit
    pause = 0.0005
    while True:
        reap()
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
            # Dying takes the kernel a moment; SIGCHLD only comes for our own children.
            sleep(pause)
            pause = min(pause * 2, 0.05)
        killed |= pids
