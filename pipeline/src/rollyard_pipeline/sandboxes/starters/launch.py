"""Starting an exec server, which inherits descriptors and reports on a pipe that it is ready.

The server gets a listening socket that the worker has bound, so nothing of the run folder needs to be
visible inside. It runs in its own session without a terminal. Neither Ctrl-C nor the death of the worker
ends it; its own lease does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from rollyard_pipeline.sandboxes.errors import NodeDiskFull, SandboxStartFailed
from rollyard_pipeline.sandboxes.host.disk_room import is_full
from rollyard_pipeline.sandboxes.host.processes import ProcessRef, Reaper, kill_and_wait, process_ref
from rollyard_pipeline.sandboxes.host.threads import in_thread

LISTEN_FD, READY_FD, INFO_FD, ARGS_FD, LOG_FD, SECRET_FD = 3, 4, 5, 6, 7, 8
LOG_BYTES: Final = 64 << 10
_SPARE: Final = 64
# The shell joins the groups and then becomes the program, so no instruction of it runs unlimited.
_JOIN: Final = (
    'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1" || exit 125; shift; n=$((n-1)); done; exec "$@"'
)


@dataclass(frozen=True, slots=True)
class SandboxLaunch:
    """A program to start."""

    argv: Sequence[str]
    env: dict[str, str]
    socket_path: Path | None
    """The path of the socket that is bound here. The program inherits it as LISTEN_FD."""
    secret: bytes = b""
    """The secret that the server must prove to know. The program inherits a pipe with it as SECRET_FD."""
    cgroups: Sequence[Path] = ()
    arguments: Sequence[str] | None = None
    """Arguments that bwrap reads by `--args ARGS_FD`, because the sandbox can read its command line."""
    info: bool = False
    """Whether the program writes bwrap's `--info-fd` JSON to INFO_FD."""
    log: bool = False
    """Whether LOG_FD is the standard error too, for a program that replaces it in the processes it starts."""
    control: int | None = None
    """The descriptor that the program inherits as LISTEN_FD instead of a socket that is bound here."""
    end: Callable[[ProcessRef], object] | None = None
    """Ends the program and all it has started, for one whose death leaves others behind. This blocks."""


@dataclass(frozen=True, slots=True)
class Started:
    """A program that has reported that it is ready."""

    child: ProcessRef
    """The process that was started."""
    inner: ProcessRef | None
    """bwrap's `child-pid`, which is process 1 of the sandbox as seen from outside."""


async def start(launch: SandboxLaunch, reaper: Reaper, seconds: float) -> Started:
    """Start the program and wait until it reports that it is ready.

    Raises:
        SandboxStartFailed: The program ended, or was not ready within `seconds` and has been killed. The
            message ends with its standard error.
        NodeDiskFull: There is no room for the socket.
    """
    with contextlib.ExitStack() as stack:
        log = log_file(stack)
        ready_read, ready_write = pipe(stack)
        info_read, info_write = pipe(stack)
        pid = _spawn(launch, stack, log, ready_write, info_write)
        ready_write.close()
        info_write.close()
        child = process_ref(pid)
        reaper.watch(pid)
        inner: ProcessRef | None = None
        ready, failure = b"", "ended before it was ready"
        try:
            async with asyncio.timeout(seconds):
                if launch.info:
                    # bwrap may leave the descriptor open, so the end of the JSON object marks the end.
                    inner = inner_process(
                        await read_some(info_read, lambda data: data.rstrip().endswith(b"}"))
                    )
                ready = await read_some(ready_read, bool)
        except TimeoutError:
            failure = f"was not ready within {seconds:g} s"
        except BaseException:
            await _kill(launch, child, inner)
            raise
        if not ready or child is None or (launch.info and inner is None):
            await _kill(launch, child, inner)
            raise SandboxStartFailed(f"the exec server {failure}: {log_text(log) or 'it wrote nothing'}")
        return Started(child, inner)


def _spawn(launch: SandboxLaunch, stack: contextlib.ExitStack, log: int, ready: FileIO, info: FileIO) -> int:
    null = owned(stack, os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    descriptors = {0: null, 1: log, 2: log, READY_FD: ready.fileno()}
    if launch.control is not None:
        descriptors[LISTEN_FD] = launch.control
    if launch.socket_path is not None:
        descriptors[LISTEN_FD] = listener(stack, launch.socket_path).fileno()
        descriptors[SECRET_FD] = secret_pipe(stack, launch.secret)
    if launch.info:
        descriptors[INFO_FD] = info.fileno()
    if launch.log:
        descriptors[LOG_FD] = log
    argv = list(launch.argv)
    if launch.arguments is not None:
        descriptors[ARGS_FD] = _arguments_memfd(stack, launch.arguments)
    if launch.cgroups:
        joins = [str(path / "cgroup.procs") for path in launch.cgroups]
        argv = ["/bin/sh", "-c", _JOIN, "sh", str(len(joins)), *joins, *argv]
    # The spares are closed at once: the end of a pipe is never seen while its writing end is open here.
    with contextlib.ExitStack() as spares:
        actions = []
        for target, source in descriptors.items():
            # Each source is first moved to a high number, because an earlier target must not overwrite it.
            spare = owned(spares, fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, _SPARE))
            actions.append((os.POSIX_SPAWN_DUP2, spare, target))
        try:
            return os.posix_spawn(
                argv[0],
                argv,
                launch.env,
                file_actions=actions,
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD],
            )
        except OSError as error:
            raise SandboxStartFailed(f"{argv[0]} cannot be started: {error}") from error


async def _kill(launch: SandboxLaunch, child: ProcessRef | None, inner: ProcessRef | None) -> None:
    if launch.end is not None and child is not None:
        await in_thread(launch.end, child)
    for ref in (inner, child):
        if ref is not None:
            await in_thread(kill_and_wait, ref, 10.0)


def listener(stack: contextlib.ExitStack, path: Path) -> socket.socket:
    """Return a Unix socket that listens at `path`, and that `stack` closes.

    Raises:
        NodeDiskFull: There is no room for the socket.
    """
    bound = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        bound.bind(str(path))
    except OSError as error:
        if is_full(error):
            words = f"no room left on the disk of {path.parent}: {error.strerror}"
            raise NodeDiskFull(words) from error
        raise
    bound.listen(64)
    return bound


def secret_pipe(stack: contextlib.ExitStack, secret: bytes) -> int:
    """Return the reading end of a pipe that holds the secret, and whose writing end is closed."""
    read, write = os.pipe()
    owned(stack, read)
    with FileIO(write, "w") as writer:
        writer.write(secret)
    return read


def inner_process(text: bytes) -> ProcessRef | None:
    """Return process 1 of a sandbox, which a JSON object names as its `child-pid`, or None."""
    try:
        return process_ref(int(json.loads(text)["child-pid"]))
    except (ValueError, KeyError, TypeError):
        return None


async def read_some(file: FileIO, enough: Callable[[bytes], bool]) -> bytes:
    """Read from the pipe until `enough` returns true or the pipe ends, at most 64 KiB."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < 65_536:
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(file.fileno(), _wake, readable)
        try:
            await readable
        finally:
            loop.remove_reader(file.fileno())
        chunk = file.read(4096)
        if not chunk:
            break
        data += chunk
        if enough(data):
            break
    return data


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def pipe(stack: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    """Return the ends of a new pipe, of which the reading one does not block. `stack` closes them."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    return stack.enter_context(FileIO(read, "r")), stack.enter_context(FileIO(write, "w"))


def owned(stack: contextlib.ExitStack, fd: int) -> int:
    """Return a descriptor that `stack` closes."""
    stack.callback(os.close, fd)
    return fd


def log_file(stack: contextlib.ExitStack) -> int:
    """Return a descriptor for standard error with a fixed size.

    A program inside that writes without end gets EPERM and does not fill the worker's disk.
    """
    fd = owned(stack, os.memfd_create("rollyard-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(fd, LOG_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def log_text(fd: int) -> str:
    """Return the last lines of a log file, in one line."""
    lines = os.pread(fd, LOG_BYTES, 0).rstrip(b"\0").decode(errors="replace").strip().splitlines()
    return " | ".join(lines[-12:])[-2000:]


def _arguments_memfd(stack: contextlib.ExitStack, arguments: Sequence[str]) -> int:
    fd = owned(stack, os.memfd_create("rollyard-args", os.MFD_CLOEXEC))
    os.write(fd, b"".join(os.fsencode(argument) + b"\0" for argument in arguments))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
