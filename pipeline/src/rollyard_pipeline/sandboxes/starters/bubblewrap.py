"""bubblewrap sandboxes: they are rootless and run in their own namespaces over a read-only system.

A template is a process that has loaded the exec server, and forks one for each sandbox. There is one for
each root folder that is in use (see `rollyard_sandbox.server.template`). Where templates do not work,
sandboxes are started one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import resource
import select
import shutil
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollyard_process.open_files import open_many_files

from rollyard_pipeline.sandboxes.errors import ImageNotUsable, NodeUnusable, SandboxStartFailed
from rollyard_pipeline.sandboxes.host.cgroups import CgroupPlace
from rollyard_pipeline.sandboxes.host.processes import ProcessRef, kill_and_wait
from rollyard_pipeline.sandboxes.host.programs import run_program
from rollyard_pipeline.sandboxes.host.records import SOCKET_NAME, SandboxFolder, SandboxRecord
from rollyard_pipeline.sandboxes.host.threads import in_thread
from rollyard_pipeline.sandboxes.interface import SandboxKey
from rollyard_pipeline.sandboxes.starters.base import (
    LEASE_SECONDS,
    SANDBOX_ENV,
    START_SECONDS,
    StartedSandbox,
    Starter,
    command_namespaces,
    inside,
    resource_limits,
    server_code,
    yielding,
)
from rollyard_pipeline.sandboxes.starters.launch import (
    ARGS_FD,
    INFO_FD,
    LISTEN_FD,
    READY_FD,
    SandboxLaunch,
    Started,
    inner_process,
    listener,
    log_file,
    log_text,
    owned,
    pipe,
    read_some,
    secret_pipe,
    start,
)
from rollyard_pipeline.sandboxes.starters.root_folders import (
    NAMESPACES,
    WORKDIR,
    bwrap_arguments,
    check_image,
    memory_folders,
    template_arguments,
)
from rollyard_pipeline.sandboxes.starters.runtime import EVAL_FOLDER, SANDBOX_UID, Runtime, make_runtime

MAX_TEMPLATES: Final = 4
"""The number of templates that one worker keeps. The least recently used one is ended beyond it."""
NAMED_SECONDS: Final = 5.0
"""The time for which a start that was given up waits for the template to name the process that it forked."""


log = logging.getLogger(__name__)

INSTALL_HINT: Final = (
    "install it (Debian, Ubuntu: `apt-get install bubblewrap`; Fedora, RHEL: `dnf install bubblewrap`), "
    "or ask for bare processes without isolation by name: `--sandbox process`"
)
MOUNT_TRIES: Final = 4
"""The number of times that bwrap is started while mounts of the machine change under it."""
FORK_FAILURES: Final = 3
"""The number of failures in a row after which no sandbox is forked from a template any more."""
_MOUNTS_CHANGED: Final = re.compile(r"Unable to (apply mount flags|find \".*\" in mount table)")
"""The messages of bwrap (bind-mount.c) where a mount of the machine went away after bwrap had listed it."""
_SYSCTLS: Final = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (or an AppArmor profile that lets bwrap "
        "use user namespaces)",
    ),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
)


def bwrap_version(text: str) -> tuple[int, ...]:
    """Return the numbers in the output of `bwrap --version` (`bubblewrap 0.8.0`)."""
    match = re.search(r"(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def userns_advice(sysctl: Path = Path("/proc/sys")) -> list[str]:
    """Return what forbids user namespaces here, each with the command that allows them.

    The result is limited to what /proc shows.
    """
    advice = []
    for name, bad, remedy in _SYSCTLS:
        try:
            value = (sysctl / name).read_text().strip()
        except OSError:
            continue
        if value == bad:
            advice.append(f"{name.replace('/', '.')} is {value}: as root, {remedy}")
    return advice


async def probe_bwrap(bwrap: str | None = None) -> tuple[int, ...]:
    """Run `bwrap` once with all the namespaces of a sandbox, and return its version.

    Raises:
        NodeUnusable: There is no such program, it does not run, or the namespaces are refused. The message
            says what to do.
    """
    program = bwrap or shutil.which("bwrap")
    if program is None or not os.access(program, os.X_OK):
        raise NodeUnusable(
            f"there is no bubblewrap (bwrap) on this machine's PATH: {INSTALL_HINT}", "BubblewrapMissing"
        )
    code, text = await _run(program, "--version")
    version = bwrap_version(text)
    if code != 0 or not version:
        raise NodeUnusable(
            f"{program} does not run ({text.strip()[:300]}): {INSTALL_HINT}", "BubblewrapMissing"
        )
    for _ in range(MOUNT_TRIES):
        code, text = await _run(
            program, *NAMESPACES, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "/bin/true"
        )
        if code == 0:
            return version
        if not mounts_changed(text):
            break
    raise NodeUnusable(forbidden_text(text), "UserNamespacesForbidden")


def mounts_changed(text: str) -> bool:
    """Return whether bwrap failed because mounts of the machine came or went while it bound them.

    This happens on machines that run containers, and the next start usually succeeds.
    """
    return _MOUNTS_CHANGED.search(text) is not None


def forbidden_text(answer: str, sysctl: Path = Path("/proc/sys")) -> str:
    """Return the message for a refused namespace: the output of bwrap and what can be done."""
    advice = userns_advice(sysctl) or [
        "in a container: run it with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "--security-opt systempaths=unconfined` (Docker, Podman) or with a seccomp profile that allows "
        "unshare, clone and mount"
    ]
    return (
        f"bubblewrap cannot make a sandbox here ({answer.strip()[:300]}). What to do: {'; '.join(advice)}; "
        "or ask for bare processes without isolation by name: `--sandbox process`"
    )


async def _run(*argv: str) -> tuple[int, str]:
    return await run_program(argv, seconds=10, env=os.environ, cwd=Path())


class BubblewrapStarter(Starter):
    """Starts the exec server in a view of the file system that bwrap makes.

    Args:
        folder: The run folder's sandboxes.
        places: The places where control groups can be made.
        bwrap: The path of the bubblewrap program. By default it is looked up on PATH.
        templates: Whether sandboxes are forked from templates. Otherwise bwrap, which stays outside as a
            sandbox's monitor, and Python are started for each of them.
    """

    name = "bubblewrap"

    def __init__(
        self,
        folder: SandboxFolder,
        places: Sequence[CgroupPlace],
        bwrap: str | None = None,
        *,
        templates: bool = True,
        tools: Path | None = None,
    ) -> None:
        super().__init__(places)
        self._folder = folder
        self._tools = tools
        self._bwrap = bwrap or shutil.which("bwrap") or "bwrap"
        self._runtime: Runtime | None = None
        self._templates = Templates(self._start_template) if templates else None
        # A fork takes about 10 ms. Forks that nobody uses in the end would cost more than they save.
        self.starts_ahead = not templates
        self._failures = 0

    async def probe(self) -> None:
        """Check that bwrap works here, and prepare the Python that is mounted into sandboxes."""
        await probe_bwrap(self._bwrap if os.path.isabs(self._bwrap) else None)
        self._runtime = await asyncio.to_thread(make_runtime, self._folder.run_dir, self._tools)

    async def stand_ready(self) -> None:
        """Start the template over this machine's own system, which serves all sandboxes without an image."""
        if self._templates is not None:
            await self._templates.get(None, self._stamp(None))

    def _stamp(self, image: str | None) -> object:
        """Return what a template over this root folder depends on."""
        return source_stamp(template_arguments(image, self._prepared(), SANDBOX_ENV))

    def check(self, key: SandboxKey) -> None:
        """Raise ImageNotUsable if the key's image is not a root folder that can be used."""
        if key.image is not None:
            check_image(key.image, private=[self._folder.run_dir])

    async def start(
        self, key: SandboxKey, folder: Path, cgroups: Sequence[Path], secret: bytes
    ) -> StartedSandbox:
        """Start the exec server; see `Starter.start`."""
        self.check(key)
        # A template lacks the mount points of further folders, and nothing can be made in its view.
        if self._templates is None or self._failures >= FORK_FAILURES or key.folders:
            return await self._start_alone(key, folder, cgroups, secret)
        problem: Exception | None = None
        try:
            started = await self._fork(self._templates, key, folder, cgroups, secret)
        except SandboxStartFailed as error:
            problem = error
        else:
            if started is not None:
                self._failures = 0
                return started
            log.info("a template of sandboxes has ended; another one will be started")
        self._templates.drop(key.image)
        (folder / SOCKET_NAME).unlink(missing_ok=True)  # The next start binds it again.
        started = await self._start_alone(key, folder, cgroups, secret)
        if problem is not None:
            # The key is not at fault, since the sandbox could be started alone.
            self._failures += 1
            if self._failures == FORK_FAILURES:
                log.warning("no sandbox can be forked here, so each is started alone: %s", problem)
        return started

    async def _fork(
        self, templates: Templates, key: SandboxKey, folder: Path, cgroups: Sequence[Path], secret: bytes
    ) -> StartedSandbox | None:
        """Fork a sandbox of a template, or return None if the template has ended."""
        options = {
            "sizes": memory_folders(key),
            "limits": numbered(resource_limits(key, self.bound)),
            "workdir": WORKDIR,
            "lease": LEASE_SECONDS,
            "namespaces": command_namespaces(key, SANDBOX_UID),
            "yielding": yielding(self.bound),
        }
        template = await templates.get(key.image, self._stamp(key.image))
        root = await template.fork(Fork(folder / SOCKET_NAME, secret, cgroups, options), START_SECONDS)
        return None if root is None else StartedSandbox(root, None)

    async def _start_template(self, image: str | None, control: int) -> Started:
        runtime = self._prepared()
        return await self._start(
            SandboxLaunch(
                argv=[self._bwrap, "--args", str(ARGS_FD), "--", *runtime.argv, *template_code(runtime.path)],
                env={"PATH": SANDBOX_ENV["PATH"], "LANG": "C.UTF-8"},
                socket_path=None,
                control=control,
                arguments=template_arguments(image, runtime, SANDBOX_ENV),
            )
        )

    def _prepared(self) -> Runtime:
        if self._runtime is None:
            raise SandboxStartFailed("the provider has not been started: await its start() first")
        return self._runtime

    async def _start_alone(
        self, key: SandboxKey, folder: Path, cgroups: Sequence[Path], secret: bytes
    ) -> StartedSandbox:
        runtime = self._prepared()
        launch = SandboxLaunch(
            argv=[
                self._bwrap,
                "--args",
                str(ARGS_FD),
                "--info-fd",
                str(INFO_FD),
                "--",
                *runtime.argv,
                *server_code(
                    key,
                    self.bound,
                    WORKDIR,
                    runtime.path,
                    inside=inside(key, SANDBOX_UID),
                    before=_mounts(key),
                ),
            ],
            env={"PATH": SANDBOX_ENV["PATH"], "LANG": "C.UTF-8"},
            socket_path=folder / SOCKET_NAME,
            secret=secret,
            cgroups=cgroups,
            arguments=bwrap_arguments(key, runtime, SANDBOX_ENV),
            info=True,
        )
        try:
            started = await self._start(launch)
        except SandboxStartFailed as error:
            raise self._explained(error, key) from error
        if started.inner is None:
            raise SandboxStartFailed("bwrap named no process 1 of the sandbox on its --info-fd")
        return StartedSandbox(started.inner, started.child)

    async def _start(self, launch: SandboxLaunch) -> Started:
        for _ in range(MOUNT_TRIES - 1):
            try:
                return await start(launch, self.reaper, START_SECONDS)
            except SandboxStartFailed as error:
                if not mounts_changed(str(error)):
                    raise
            if launch.socket_path is not None:
                launch.socket_path.unlink(missing_ok=True)  # The next start binds it again.
        return await start(launch, self.reaper, START_SECONDS)

    def kill(self, record: SandboxRecord, seconds: float) -> bool:
        """Kill process 1 inside, and with it all others, and return whether they are gone."""
        deadline = time.monotonic() + seconds
        ended = True
        # Process 1 is killed first: the kernel then kills all of its namespace, and the monitor ends by
        # itself.
        for process in (record.root, record.monitor):
            if process is not None:
                ended = kill_and_wait(process, deadline - time.monotonic()) and ended
        return ended

    def close(self) -> None:
        """End the templates, and stop watching the processes that were started."""
        if self._templates is not None:
            self._templates.close()
        super().close()

    def _explained(self, error: SandboxStartFailed, key: SandboxKey) -> Exception:
        text = str(error)
        if re.search(
            r"creat\w* new (user )?namespace|setting up uid map|No permissions", text, re.IGNORECASE
        ):
            return NodeUnusable(forbidden_text(text), "UserNamespacesForbidden")
        if key.image is not None and "not ready within" not in text:
            return ImageNotUsable(f"sandbox.image {key.image!r}: {text}")
        return error


def _mounts(key: SandboxKey) -> list[str]:
    """Return the lines of Python code that mount what can be written, and for which bwrap bounds no files."""
    return [
        "import os",
        "from rollyard_sandbox.isolation.system_calls import mount_memory",
        f"for folder, (size, mode) in {memory_folders(key)!r}.items(): mount_memory(folder, size, mode)",
        f"os.chdir({WORKDIR!r})",
    ]


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
        open_many_files()
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
