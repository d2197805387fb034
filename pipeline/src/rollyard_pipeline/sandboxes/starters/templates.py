"""Templates of sandboxes: processes that have loaded the exec server, and fork one for each sandbox.

There is one template for each root folder that is in use (see `rollyard_sandbox.server.template`). Where
templates do not work, sandboxes are started one by one, as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import select
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollyard_pipeline.sandboxes.errors import SandboxStartFailed
from rollyard_pipeline.sandboxes.host.processes import ProcessRef, kill_and_wait
from rollyard_pipeline.sandboxes.host.threads import in_thread
from rollyard_pipeline.sandboxes.starters.launch import (
    LISTEN_FD,
    READY_FD,
    inner_process,
    listener,
    log_file,
    log_text,
    owned,
    pipe,
    read_some,
    secret_pipe,
)
from rollyard_pipeline.sandboxes.starters.runtime import EVAL_FOLDER

log = logging.getLogger(__name__)

MAX_TEMPLATES: Final = 4
"""The number of templates that one worker keeps. The least recently used one is ended beyond it."""
NAMED_SECONDS: Final = 5.0
"""The time for which a start that was given up waits for the template to name the process that it forked."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A sandbox that a template is to fork. The fields of `options` are those that the template reads."""

    socket_path: Path
    secret: bytes
    cgroups: Sequence[Path]
    options: Mapping[str, object]


class Template:
    """A running template, which ends when this object is closed or its worker ends.

    Args:
        control: The worker's end of the template's socket.
        stamp: What the template depends on; see `source_stamp`.
    """

    def __init__(self, control: socket.socket, stamp: object) -> None:
        self._control = control
        self.stamp = stamp

    def close(self) -> None:
        """End the template. Sandboxes that were forked from it are left running."""
        self._control.close()

    async def fork(self, request: Fork, seconds: float) -> ProcessRef | None:
        """Fork a sandbox, and return its process 1 when the server inside is ready.

        It returns None if the template has ended.

        Raises:
            SandboxStartFailed: The server ended, or was not ready within `seconds` and has been killed. The
                message ends with its standard error.
            NodeDiskFull: There is no room for the socket.
        """
        with contextlib.ExitStack() as stack:
            errors = log_file(stack)
            ready_read, ready_write = pipe(stack)
            info_read, info_write = pipe(stack)
            descriptors = [
                listener(stack, request.socket_path).fileno(),
                ready_write.fileno(),
                info_write.fileno(),
                errors,
                secret_pipe(stack, request.secret),
            ]
            for path in request.cgroups:
                procs = os.open(path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
                descriptors.append(owned(stack, procs))
            try:
                socket.send_fds(self._control, [json.dumps(request.options).encode()], descriptors)
            except OSError:
                return None
            ready_write.close()
            info_write.close()
            root: ProcessRef | None = None
            ready, failure = b"", "ended before it was ready"
            try:
                async with asyncio.timeout(seconds):
                    root = inner_process(await read_some(info_read, lambda data: data.endswith(b"}")))
                    ready = await read_some(ready_read, bool)
            except TimeoutError:
                failure = f"was not ready within {seconds:g} s"
            except BaseException:
                await _kill(root or await in_thread(_named, info_read.fileno()))
                raise
            if ready and root is not None:
                return root
            if root is None:
                root = await in_thread(_named, info_read.fileno())
            await _kill(root)
            words = log_text(errors)
            if not words and root is None and failure.startswith("ended"):
                return None
            raise SandboxStartFailed(f"the exec server {failure}: {words or 'it wrote nothing'}")


class Templates:
    """The templates of one worker, by root folder.

    They raise this process's limit of open files to the permitted maximum, because no process can pass
    descriptors while its user has more of them in flight. Sandboxes of the same user may have thousands.

    Args:
        launch: Starts a template for a root folder, whose end of the socket it is given.
    """

    def __init__(self, launch: Callable[[str | None, int], Awaitable[object]]) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._launch = launch
        self._running: OrderedDict[str | None, Template] = OrderedDict()
        self._starting = asyncio.Lock()

    async def get(self, image: str | None, stamp: object) -> Template:
        """Return the template of a root folder that has this stamp. It is started if there is none.

        Raises:
            SandboxStartFailed: It cannot be started.
        """
        async with self._starting:
            template = self._running.get(image)
            if template is not None and template.stamp == stamp:
                self._running.move_to_end(image)
                return template
            self.drop(image)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with theirs:
                    await self._launch(image, theirs.fileno())
            except BaseException:
                ours.close()
                raise
            # A request is far smaller than the socket's buffer, and starts at the same time are few.
            ours.setblocking(False)
            self._running[image] = Template(ours, stamp)
            while len(self._running) > MAX_TEMPLATES:
                self._running.popitem(last=False)[1].close()
            return self._running[image]

    def drop(self, image: str | None) -> None:
        """End the template of a root folder, if there is one."""
        template = self._running.pop(image, None)
        if template is not None:
            template.close()

    def close(self) -> None:
        """End all templates."""
        for image in list(self._running):
            self.drop(image)


def template_code(path: Sequence[str]) -> list[str]:
    """Return Python's arguments that run a template, which appends `path` to sys.path."""
    lines = [
        "import sys",
        f"sys.path += {list(path)!r}",
        "from rollyard_sandbox.server.template import run",
        f"sys.exit(run({LISTEN_FD}, {READY_FD}, {EVAL_FOLDER!r}))",
    ]
    return ["-I", "-S", "-c", "\n".join(lines)]


def numbered(limits: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return resource limits with the numbers that their names stand for on this machine."""
    return [(int(getattr(resource, name)), limit) for name, limit in limits.items()]


def source_stamp(arguments: Sequence[str]) -> tuple[Any, ...]:
    """Return what a template depends on: its arguments, and which files and folders it has bound.

    A file that is replaced on this machine stays visible in an older template, so that one is ended.
    """
    parts: list[object] = [tuple(arguments)]
    for number, word in enumerate(arguments):
        if word == "--ro-bind":
            try:
                info = os.stat(arguments[number + 1])
            except OSError:
                parts.append(None)
                continue
            parts.append((info.st_dev, info.st_ino))
    return tuple(parts)


def _named(info: int) -> ProcessRef | None:
    """Return process 1 of a sandbox whose start was given up before the template named it. This blocks.

    Otherwise it could continue to run until its lease ends. The result is None if there is no such process.
    """
    if not select.select([info], [], [], NAMED_SECONDS)[0]:
        return None
    return inner_process(os.read(info, 4096))


async def _kill(ref: ProcessRef | None) -> None:
    if ref is not None:
        await in_thread(kill_and_wait, ref, 10.0)
