"""A stage before the server, which makes a sandbox like bubblewrap's inside a container that others started.

`confine` gives the server namespaces of its own, below those of the container. They have a user without any
right, a process table in which the server is process 1 (nothing inside can end it, or see the processes that
manage the container), and memory file systems of fixed sizes where programs write. The server keeps all
rights in these namespaces; `command_namespaces` puts further ones between the server and its commands.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys

from rollyard_sandbox.isolation.protections import FAILED, NOT_CONFINED
from rollyard_sandbox.isolation.system_calls import (
    BIND,
    NEWCGROUP,
    NEWIPC,
    NEWNS,
    NEWPID,
    NEWUSER,
    NEWUTS,
    NODEV,
    NOEXEC,
    NOSUID,
    PRIVATE,
    REC,
    SET_DUMPABLE,
    SET_NO_NEW_PRIVS,
    SET_PDEATHSIG,
    call,
    limit_rights,
    map_users,
    mount,
    mount_memory,
    mount_read_only,
    unmount,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Final, NoReturn

_SETFCAP: Final = 31  # CAP_SETFCAP, without which user 0 makes no user namespace.
_SPARE: Final = 64  # A number above those that are handed over.


class Confinement:
    """The wanted properties of a sandbox.

    Args:
        uid: The user and group that programs inside see themselves as. None if the container has a root user
            of its own (`--fakeroot`), which stays, with the rights that a container's root usually has.
        sizes: A map from a folder to (bytes, mode). Each folder is covered by a memory file system.
        aliases: A map from a folder to the folder that it shows, if both exist.
        read_only: The mount points to which no program may write. Their submounts stay as they are.
        hostname: The name that `hostname` prints.
    """

    def __init__(
        self,
        *,
        uid: int | None,
        sizes: Mapping[str, tuple[int, int]],
        aliases: Mapping[str, str],
        read_only: Sequence[str],
        hostname: str,
    ) -> None:
        self.uid = uid
        self.sizes = sizes
        self.aliases = aliases
        self.read_only = read_only
        self.hostname = hostname


def confine(confinement: Confinement) -> None:
    """Make a new sandbox, and return in its process 1.

    The calling process ends, and another process ends the container when the sandbox has ended. If the
    kernel refuses a part of it, this exits with FAILED and reports the part on standard error.
    """
    if os.fork():
        if os.getpid() == 1:
            _be_first()
        # The container's process 1 passes signals to the group of the program that it started, and ends at
        # the first signal for which it finds no group. The group is left, so one signal is now enough.
        os._exit(0)
    os.setsid()
    try:
        _namespaces(confinement.uid)
        child = os.fork()
        if child:
            _keep(child)
        call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        _mounts(confinement)
        call("sethostname", confinement.hostname.encode(), len(confinement.hostname))
        call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    except OSError as error:
        print(f"{NOT_CONFINED}: {error}", file=sys.stderr, flush=True)
        _end_container()


def receive_descriptors(path: str, numbers: Sequence[int]) -> None:
    """Receive open descriptors from the program that listens at `path`, and give them these numbers.

    This is for containers whose engine passes no descriptors. The numbers must be below 64.

    Raises:
        OSError: Nothing listens there, or it has sent another number of descriptors.
    """
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect(path)
        received = socket.recv_fds(sender, 1, len(numbers))[1]
    if len(received) != len(numbers):
        raise OSError(f"{path} has sent {len(received)} descriptors instead of {len(numbers)}")
    # Each is first moved to a high number, because an earlier one must not be overwritten.
    spares = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _SPARE) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for spare, number in zip(spares, numbers, strict=True):
        os.dup2(spare, number)
        os.close(spare)


def add_layer(size: int, stage: str, kept: Sequence[str], folders: Iterable[str], user: int | None) -> None:
    """Replace the root folder of a container by the same with a writable layer, whose files are memory.

    It needs Linux 5.11 and CAP_SYS_ADMIN in the container's own mount namespace: in one below, the kernel
    does not let the root folder be a lower layer. The calling process is process 1, and loses all rights but
    that to make a user namespace. If the kernel refuses a part of it, this exits with FAILED.

    Args:
        size: The size of the layer in bytes.
        stage: An existing folder, over which the layer is mounted while it is made.
        kept: The paths at which mounts of the container stay visible, in addition to /dev. All others go.
        folders: The folders that are made where the image has none.
        user: The user and group that the process becomes. With None it stays the image's root, whose files
            programs can then change.
    """
    try:
        # Where the worker has moved it to other control groups, their names are not seen from these.
        call("unshare", NEWCGROUP)
        mount("", "/", flags=REC | PRIVATE)
        mount_memory(stage, size, 0o755)
        root, upper, work = (f"{stage}/{name}" for name in ("root", "upper", "work"))
        for folder in (root, upper, work):
            os.mkdir(folder, 0o755)
        options = f"lowerdir=/,upperdir={upper},workdir={work},userxattr"
        mount("overlay", root, "overlay", NOSUID | NODEV, options)
        # A new /proc can be mounted only where another one is visible that hides nothing.
        mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
        for path in ("/dev", *kept):
            if os.path.ismount(path):
                mount(path, f"{root}{path}", flags=BIND | REC)
        os.chdir(root)
        call("pivot_root", b".", b".")
        # The old root now lies over the new one, and its other mounts go with it.
        unmount(".")
        os.chdir("/")
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
        if user is None:
            limit_rights(frozenset({_SETFCAP}))
            return
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)  # All rights go with this.
        # A process that has changed its user may otherwise not write to its own files in /proc.
        call("prctl", SET_DUMPABLE, 1, 0, 0, 0)
    except OSError as error:
        print(f"{NOT_CONFINED}: {error}", file=sys.stderr, flush=True)
        os._exit(FAILED)


def clean_environment(fixed: Mapping[str, str], prefixes: Sequence[str], libraries: str) -> None:
    """Reduce the environment to what the image sets, without what the container's programs have added.

    Args:
        fixed: The variables that are set, whatever the image says.
        prefixes: The prefixes of the variables that are removed.
        libraries: The folder that is removed from LD_LIBRARY_PATH.
    """
    for name in list(os.environ):
        if name.startswith(tuple(prefixes)):
            del os.environ[name]
    paths = [path for path in os.environ.pop("LD_LIBRARY_PATH", "").split(":") if path not in ("", libraries)]
    if paths:
        os.environ["LD_LIBRARY_PATH"] = ":".join(paths)
    os.environ.update(fixed)


def _namespaces(uid: int | None) -> None:
    user, group = os.geteuid(), os.getegid()
    own = NEWNS | NEWPID | NEWIPC | NEWUTS
    if uid is None:
        call("unshare", own)
        return
    call("unshare", own | NEWUSER)
    map_users("self", user, group, uid)


def _be_first() -> NoReturn:
    """Be process 1 of a container that has no other: reap until nothing is left, which ends the container.

    SIGTERM ends it at once. Without a handler, the kernel would keep that signal from a process 1.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(FAILED))
    _close_descriptors()
    limit_rights(frozenset())
    while True:
        try:
            os.wait()
        except ChildProcessError:
            os._exit(FAILED)


def _keep(child: int) -> NoReturn:
    """Wait for the end of the sandbox, then end the container."""
    _close_descriptors()
    os.waitpid(child, 0)
    _end_container()


def _close_descriptors() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.closerange(3, 1 << 16)


def _end_container() -> NoReturn:
    if os.getpid() != 1:  # The sandbox's own process 1 only ends, and its keeper does the rest.
        os.kill(1, signal.SIGTERM)
    os._exit(FAILED)


def _mounts(confinement: Confinement) -> None:
    mount("", "/", flags=REC | PRIVATE)
    # The container's /proc shows the processes that manage it. A new /proc shows this sandbox only. Commands
    # get another one, which hides more.
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    for folder, (size, mode) in confinement.sizes.items():
        mount_memory(folder, size, mode)
    for alias, folder in confinement.aliases.items():
        if os.path.isdir(alias) and not os.path.islink(alias):
            mount(folder, alias, flags=BIND)
    for folder in confinement.read_only:
        if os.path.ismount(folder):
            mount_read_only(folder)
