"""Sandboxes of a container engine: Podman and Docker start them alike.

The engine provides the image, the limits and the closed network. Inside, before the exec server starts,
`rollyard_sandbox.isolation.container` adds what a container lacks: its own user without rights, a writable
layer and folders of fixed sizes, and an exec server that nothing inside can bypass or end. For that, the
engine's own filters of system calls and its masks over /proc are off; commands get those of the exec server.

An engine passes no descriptors to a container. A socket of this sandbox alone is mounted over the work
folder. The container's process 1 fetches its descriptors there, among them the secret, and the folder is
covered before anything else runs. No socket of the engine is ever mounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import platform
import re
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rollyard_sandbox.isolation.protections import NOT_CONFINED
from rollyard_tasks.harbor.dockerfiles import DOCKERFILE_IMAGE

from rollyard_pipeline.sandboxes.containers.engine import (
    Engine,
    Kind,
    arguments_of,
    call_engine,
    find_engine,
)
from rollyard_pipeline.sandboxes.errors import (
    DiskFull,
    ImageNotUsable,
    NodeUnusable,
    SandboxStartFailed,
)
from rollyard_pipeline.sandboxes.host.cgroups import CPU_PERIOD_US, CgroupPlace, groups_of
from rollyard_pipeline.sandboxes.host.processes import ProcessRef, kill_and_wait, process_ref
from rollyard_pipeline.sandboxes.host.records import SOCKET_NAME, SandboxFolder, SandboxRecord
from rollyard_pipeline.sandboxes.host.threads import in_thread
from rollyard_pipeline.sandboxes.interface import SandboxKey
from rollyard_pipeline.sandboxes.starters.base import (
    BASHES,
    NO_BASH,
    SANDBOX_ENV,
    START_SECONDS,
    StartedSandbox,
    Starter,
    bind_mount,
    inside,
    limits_of,
    needs_bash,
    server_code,
)
from rollyard_pipeline.sandboxes.starters.bubblewrap import userns_advice
from rollyard_pipeline.sandboxes.starters.launch import (
    LISTEN_FD,
    LOG_FD,
    READY_FD,
    SECRET_FD,
    listener,
    log_file,
    log_text,
    pipe,
    read_some,
    secret_pipe,
)
from rollyard_pipeline.sandboxes.starters.root_folders import WORKDIR, disk_size, memory_folders
from rollyard_pipeline.sandboxes.starters.runtime import (
    INSIDE,
    SANDBOX_UID,
    Runtime,
    make_mount_points,
    make_runtime,
)

log = logging.getLogger(__name__)

SCHEME: Final = "docker://"
LABEL: Final = "dev.rollyard.run-dir"
"""The label of the containers of a run folder, whose value is a hash of its path."""
FIRST_USER: Final = 27_465 << 16
"""The user of this machine that root of a container is where the engine itself is root (Podman).

The 65,536 users from here on are among those that systemd leaves to containers (524288 to 1879048191).
"""
_PREFIX: Final = "rollyard-"
_START_SECONDS: Final = 2 * START_SECONDS
_REMOVE_SECONDS: Final = 10.0
_AGAIN_SECONDS: Final = 0.2
_ASK_SECONDS: Final = 20.0
_PULL_SECONDS: Final = 3600.0
_PULLS_AT_ONCE: Final = 4
_OVERLAY_SINCE: Final = (5, 11)
_HOSTS: Final = "/etc/hosts"
_START_FOLDER: Final = "start"
_LAYER_BYTES: Final = 16 << 20
# Process 1 makes the writable layer with these, and drops them before anything else runs. A process whose
# user is 0 needs SETFCAP to make a user namespace (user_namespaces(7)).
_RIGHTS: Final = ("SYS_ADMIN", "CHOWN", "DAC_OVERRIDE", "FOWNER", "SETFCAP", "SETGID", "SETUID")
_CONTAINER_USER: Final = 65_530
"""What user 1000 of a sandbox is in the container. No file of an image belongs to it."""
_OPEN_FILES: Final = 4096
_REFERENCE: Final = re.compile(
    r"[A-Za-z0-9][\w.-]*(:\d{1,5}(?=/))?(/[A-Za-z0-9][\w.-]*)*(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
# Engines add these variables to those of the image.
_ADDED: Final = ("HOSTNAME", "container", "TERM")
_PROXY_VARIABLES: Final = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
_NO_IMAGE: Final = re.compile(r"no such image|image not known|unable to find image", re.IGNORECASE)
_NO_CONTAINER: Final = re.compile(r"no such (container|object)|no container with", re.IGNORECASE)
_UNKNOWN: Final = re.compile(
    r"not found|manifest unknown|name unknown|does not exist|denied|unauthorized|no matching manifest|"
    r"no image found in .* for architecture|invalid reference|short-name",
    re.IGNORECASE,
)
_NO_ROOM: Final = re.compile(r"no space left|disk quota exceeded", re.IGNORECASE)
_OF_THE_IMAGE: Final = re.compile(r"exec format error|not a directory", re.IGNORECASE)


class ContainerStarter(Starter):
    """Starts a container whose program is the exec server.

    Args:
        kind: The engine.
        folder: The run folder's sandboxes.
        places: The places of control groups. They limit everything, or there are none: then those that the
            engine makes are used.
        default_image: The image for jobs that name none.
        fakeroot: Whether programs may change what belongs to the image's root.
    """

    fetches = True

    def __init__(
        self,
        kind: Kind,
        folder: SandboxFolder,
        places: Sequence[CgroupPlace] = (),
        default_image: str | None = None,
        *,
        fakeroot: bool = False,
        tools: Path | None = None,
    ) -> None:
        self._fakeroot = fakeroot
        self._tools = tools
        super().__init__(places)
        self.name = kind  # type: ignore[misc]
        self._kind: Kind = kind
        self._folder = folder
        self._default_image = default_image
        self._own = folder.run_dir / "containers"
        self._engine: Engine | None = None
        self._runtime: Runtime | None = None
        self._images: dict[str, str] = {}
        """The ids of images by name, which are asked once."""
        self._pulls = asyncio.Semaphore(_PULLS_AT_ONCE)
        self._pulling: dict[str, asyncio.Lock] = {}
        self._label = f"{LABEL}={hashlib.sha256(os.fsencode(folder.run_dir)).hexdigest()[:32]}"

    async def probe(self) -> None:
        """Find the engine, check what it can do here, and remove what dead workers have left in it.

        Raises:
            NodeUnusable: This node cannot run such sandboxes.
            ImageNotUsable: The default image is not the name of an image.
        """
        self._engine = engine = await find_engine(self._kind)
        self.bound = engine.limits
        release = platform.release()
        if tuple(int(part) for part in re.findall(r"\d+", release)[:2]) < _OVERLAY_SINCE:
            raise NodeUnusable(
                f"Linux {release} lets users mount no overlay, which is the writable layer of an image: "
                f"--sandbox {self._kind} needs Linux 5.11 or newer",
                "EngineUnusable",
            )
        if self._fakeroot and not engine.own_users:
            log.warning(
                "the root user of %s's containers is this machine's root: programs in sandboxes are this "
                "user without any capability; the daemon's option userns-remap, or rootless mode, gives "
                "them another",
                self._kind,
            )
        try:
            await in_thread(self._prepare)
        except OSError as error:
            raise NodeUnusable(
                f"run dir {self._folder.run_dir} cannot be used: {error}", "RunDirUnusable"
            ) from error
        await in_thread(self._end_strays)
        if self._default_image is not None:
            self._name_of(None)

    def _prepare(self) -> None:
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._runtime = runtime = make_runtime(self._folder.run_dir, self._tools)
        make_mount_points(runtime, self._own / "runtime")
        # Another user of this machine reads them inside, whatever this process's umask is.
        written = [
            Path(source) for source, _ in runtime.binds if self._folder.run_dir in Path(source).parents
        ]
        for top in (self._own / "runtime", *written):
            for path, _, _ in os.walk(top):
                os.chmod(path, 0o755)

    def _end_strays(self) -> None:
        """Remove containers whose folders are gone, because no sweep of the node's records finds them."""
        known = set(self._folder.ids())
        arguments = ("ps", "--all", "--filter", f"label={self._label}", "--format", "{{.Names}}")
        code, text = call_engine(self._kind, *arguments, seconds=_ASK_SECONDS)
        names = text.split() if code == 0 else []
        for name in names:
            if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in known:
                log.warning("container %s has no folder any more: removed", name)
                self._remove(name, _REMOVE_SECONDS)

    def listed_name(self, image: str | None) -> str | None:
        """Return an image with its scheme, as the installer's list has it."""
        if image is None or "://" in image or image.startswith(("/", DOCKERFILE_IMAGE)):
            return image
        return f"{SCHEME}{image}"

    def check(self, key: SandboxKey) -> None:
        """Raise ImageNotUsable if the key's image is not the name of an image."""
        self._name_of(key.image)

    def _name_of(self, image: str | None) -> str:
        """Return the engine's name for an image."""
        text = image if image is not None else self._default_image
        if text is None:
            raise ImageNotUsable(
                "sandbox.image: not given, and this worker has no default image; name one "
                "(docker://python:3.12-slim, or an image that the engine has), or start the worker with "
                "--default-image"
            )
        if text.startswith(DOCKERFILE_IMAGE):
            raise ImageNotUsable(
                f"sandbox.image {text!r}: the task has a Dockerfile, which this worker does not build; build "
                f"it with `{self._kind} build`, and name the image in sandbox.images of the job"
            )
        name = text.removeprefix(SCHEME)
        if os.path.isabs(text) or not _REFERENCE.fullmatch(name):
            raise ImageNotUsable(
                f"sandbox.image {text!r}: --sandbox {self._kind} takes docker://NAME and names of images "
                f"that {self._kind} has. For a file: `{self._kind} load --input FILE`; for a root folder: "
                f"`tar -C FOLDER -c . | {self._kind} import - NAME`"
            )
        return name

    async def prepare(self, key: SandboxKey) -> None:
        """Pull the image, or wait until it has been pulled."""
        await self._ready(key)

    async def fetch(self, key: SandboxKey) -> bool:
        """Pull the image ahead of the first sandbox. The engine knows how much room it has."""
        await self._ready(key)
        return True

    async def _ready(self, key: SandboxKey) -> str:
        """Return the id of the key's image, which is pulled if the engine does not have it."""
        engine, name = self._started(), self._name_of(key.image)
        if name in self._images:
            return self._images[name]
        async with self._pulling.setdefault(name, asyncio.Lock()):
            if name in self._images:
                return self._images[name]
            known = await self._look(engine, name)
            if known is None:
                await self._pull(engine, name)
                known = await self._look(engine, name)
            if known is None:
                raise SandboxStartFailed(f"sandbox.image {name!r}: {engine.kind} has lost it after the pull")
            self._images[name] = known
            return known

    async def _look(self, engine: Engine, name: str) -> str | None:
        """Return the id of an image that the engine has, or None.

        Raises:
            ImageNotUsable: It is for another processor.
            SandboxStartFailed: The engine does not answer.
        """
        form = "{{.Id}} {{.Architecture}}"
        code, text = await engine.run("image", "inspect", "--format", form, name, seconds=_ASK_SECONDS)
        if code != 0:
            if _NO_IMAGE.search(text):
                return None
            raise SandboxStartFailed(f"{engine.kind} image inspect {name}: {_short(text)}")
        identity, _, machine = text.strip().splitlines()[-1].partition(" ")
        own = _MACHINES.get(platform.machine(), platform.machine())
        if machine and machine != own:
            raise ImageNotUsable(f"sandbox.image {name!r}: is for {machine}, and this machine is {own}")
        return identity

    async def _pull(self, engine: Engine, name: str) -> None:
        source = f"{SCHEME}{name}" if engine.kind == "podman" else name
        async with self._pulls:
            code, text = await engine.run("pull", "--quiet", source, seconds=_PULL_SECONDS, proxies=True)
        if code == 0:
            return
        if _NO_ROOM.search(text):
            raise DiskFull(f"no room for sandbox.image {name!r} in {engine.kind}'s storage: {_short(text)}")
        if _UNKNOWN.search(text):
            raise ImageNotUsable(
                f"sandbox.image {name!r}: {engine.kind} has no such image, and cannot pull it: {_short(text)}"
            )
        raise SandboxStartFailed(f"sandbox.image {name!r} cannot be pulled: {_short(text)}")

    def _started(self) -> Engine:
        if self._engine is None:
            raise SandboxStartFailed("the provider has not been started: await its start() first")
        return self._engine

    async def start(
        self, key: SandboxKey, folder: Path, cgroups: Sequence[Path], secret: bytes
    ) -> StartedSandbox:
        """Start a container with the exec server in it; see `Starter.start`."""
        engine, image = self._started(), await self._ready(key)
        name = container_name(folder.name)
        start_folder = folder / _START_FOLDER
        await in_thread(_make_folder, start_folder)
        command = self._command(engine, key, image, name, start_folder)
        try:
            root = await self._launch(engine, command, folder, cgroups, secret)
        except SandboxStartFailed as error:
            await in_thread(self._remove, name, _REMOVE_SECONDS)
            raise self._explained(error, key) from error
        except BaseException:
            await in_thread(self._remove, name, _REMOVE_SECONDS)
            raise
        if cgroups:
            return StartedSandbox(root, None)
        return StartedSandbox(root, None, (), tuple(await in_thread(groups_of, root.pid)))

    async def _launch(
        self,
        engine: Engine,
        command: Sequence[str],
        folder: Path,
        cgroups: Sequence[Path],
        secret: bytes,
    ) -> ProcessRef:
        """Run the engine, hand over the descriptors, and return process 1 when the server is ready."""
        with contextlib.ExitStack() as stack:
            errors = log_file(stack)
            ready_read, ready_write = pipe(stack)
            control = listener(stack, folder / SOCKET_NAME)
            path = folder / _START_FOLDER / SOCKET_NAME
            entrance = listener(stack, path)
            entrance.setblocking(False)
            path.chmod(0o666)  # Another user of this machine connects; the sandbox's folder is private.
            running = asyncio.ensure_future(engine.detach(*command, seconds=_START_SECONDS))
            waiting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(entrance))
            failure = "ended before it was ready"
            ready = b""
            try:
                async with asyncio.timeout(_START_SECONDS):
                    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
                    if running.done():
                        _check_started(engine, *running.result())
                    connection, _ = await waiting
                    with connection:
                        root = _peer(connection)
                        if root is not None:
                            _join(cgroups, root)
                        descriptors = [
                            control.fileno(),
                            ready_write.fileno(),
                            errors,
                            secret_pipe(stack, secret),
                        ]
                        connection.setblocking(True)  # One byte is always taken at once.
                        socket.send_fds(connection, [b"+"], descriptors)
                    ready_write.close()
                    ready = await read_some(ready_read, bool)
                    _check_started(engine, *await running)
            except TimeoutError:
                ready = b""
                failure = f"was not ready within {_START_SECONDS:g} s"
            finally:
                for task in (running, waiting):
                    task.cancel()
                await asyncio.gather(running, waiting, return_exceptions=True)
                path.unlink(missing_ok=True)
            if not ready:
                words = log_text(errors) or "it wrote nothing"
                raise SandboxStartFailed(f"the exec server {failure}: {words}")
            if root is None:
                raise SandboxStartFailed(
                    f"{engine.kind} runs containers where this worker does not see their processes: run both "
                    "on one machine, and in the same pid namespace"
                )
            return root

    def _command(
        self, engine: Engine, key: SandboxKey, image: str, name: str, start_folder: Path
    ) -> list[str]:
        runtime = self._runtime
        assert runtime is not None
        limits = limits_of(key)
        memory = str(limits.memory_bytes)
        quota = str(max(1000, int(limits.cpu * CPU_PERIOD_US)))
        # The engine's own hosts file would have names of this machine.
        hosts = [(source, target) for source, target in runtime.etc if target == _HOSTS]
        binds = [(str(start_folder), WORKDIR), (str(self._own / "runtime"), INSIDE), *runtime.binds, *hosts]
        processes = str(max(1024, 2 * limits.processes))
        return [
            "run",
            "--detach",
            *arguments_of(
                [
                    ("--name", name),
                    ("--label", self._label),
                    ("--pull", "never"),
                    ("--log-driver", "none"),
                    ("--network", "none"),
                    ("--user", "0:0"),
                    ("--workdir", "/"),
                    ("--cap-drop", "ALL"),
                    *(("--cap-add", name) for name in _RIGHTS),
                    ("--security-opt", "no-new-privileges"),
                    ("--security-opt", "seccomp=unconfined"),
                    ("--security-opt", "apparmor=unconfined"),
                    ("--security-opt", "label=disable"),
                    ("--cgroupns", "private"),
                    ("--memory", memory),
                    ("--memory-swap", memory),
                    ("--cpu-period", str(CPU_PERIOD_US)),
                    ("--cpu-quota", quota),
                    ("--pids-limit", str(limits.processes)),
                    # The defaults of engines may be more than this machine lets anybody have.
                    ("--ulimit", f"nofile={_OPEN_FILES}:{_OPEN_FILES}"),
                    ("--ulimit", f"nproc={processes}:{processes}"),
                    *(("--mount", bind_mount(source, target)) for source, target in binds),
                    ("--entrypoint", runtime.argv[0]),
                ]
            ),
            "--read-only",
            "--no-healthcheck",
            *_engine_options(engine),
            image,
            *runtime.argv[1:],
            *server_code(
                key,
                self.bound,
                WORKDIR,
                runtime.path,
                first=_FIRST,
                before=_confine(key, None if self._fakeroot else _CONTAINER_USER),
                inside=inside(key, SANDBOX_UID),
            ),
        ]

    def oom_killed(self, record: SandboxRecord) -> bool:
        """Return whether memory ran out inside. The engine is asked when its control group is gone."""
        if super().oom_killed(record):
            return True
        if record.root is None or record.root.alive():
            return False
        form = "{{.State.OOMKilled}}"
        name = container_name(record.id)
        _, text = call_engine(self._kind, "inspect", "--format", form, name, seconds=_ASK_SECONDS)
        return text.strip() == "true"

    def taken_away(self, record: SandboxRecord) -> bool:
        """Return whether the engine does not know the container any more."""
        name = container_name(record.id)
        code, text = call_engine(self._kind, "inspect", "--format", "x", name, seconds=_ASK_SECONDS)
        return code != 0 and _NO_CONTAINER.search(text) is not None

    def kill(self, record: SandboxRecord, seconds: float) -> bool:
        """Kill all processes of a container, remove it, and return whether they are gone."""
        deadline = time.monotonic() + seconds
        ended = False
        if record.root is not None:
            # A busy engine takes long. Where this process may not kill another user's, only the engine can.
            with contextlib.suppress(PermissionError):
                ended = kill_and_wait(record.root, deadline - time.monotonic())
        return self._remove(container_name(record.id), deadline - time.monotonic()) or ended

    def _remove(self, name: str, seconds: float) -> bool:
        """Remove a container with its volumes, and return whether it is gone. This blocks."""
        options = ("--time", "0") if self._kind == "podman" else ()
        deadline = time.monotonic() + max(1.0, seconds)
        while True:
            left = max(1.0, deadline - time.monotonic())
            arguments = ("rm", "--force", "--volumes", *options, name)
            code, text = call_engine(self._kind, *arguments, seconds=left)
            if code == 0 or _NO_CONTAINER.search(text):
                return True
            if time.monotonic() >= deadline:
                log.error("container %s cannot be removed: %s", name, _short(text))
                return False
            # The engine may be about to remove the same container, or to mark it as ended.
            time.sleep(_AGAIN_SECONDS)

    def _explained(self, error: SandboxStartFailed, key: SandboxKey) -> Exception:
        text = str(error)
        image = key.image if key.image is not None else self._default_image
        if NOT_CONFINED in text:
            advice = userns_advice() or ["see `sysctl user.max_user_namespaces`, and use Linux 5.11 or newer"]
            return NodeUnusable(
                f"{self._kind} cannot make a sandbox here: no namespaces inside of its containers "
                f"({text[-300:]}). What to do: {'; '.join(advice)}",
                "UserNamespacesForbidden",
            )
        if _NO_ROOM.search(text):
            return DiskFull(f"no room left for a sandbox in {self._kind}'s storage: {text}")
        if NO_BASH in text:
            return ImageNotUsable(f"sandbox.image {image!r}: has no bash (looked for {', '.join(BASHES)})")
        if _NO_IMAGE.search(text):
            self._images.clear()  # It was removed, so the next attempt pulls it again.
            return error
        if _OF_THE_IMAGE.search(text):
            return ImageNotUsable(f"sandbox.image {image!r}: {text}")
        return error


_FIRST: Final = (
    "import os",
    "from rollyard_sandbox.isolation.container import receive_descriptors",
    f"receive_descriptors('{WORKDIR}/{SOCKET_NAME}', {(LISTEN_FD, READY_FD, LOG_FD, SECRET_FD)!r})",
)
"""The lines that bring the descriptors, which `ContainerStarter` sends."""


def _confine(key: SandboxKey, user: int | None) -> list[str]:
    """Return the lines of Python code that run inside, before the exec server."""
    fixed = {name: value for name, value in SANDBOX_ENV.items() if name != "PATH"}
    added = [*_ADDED, *_PROXY_VARIABLES, *(name.upper() for name in _PROXY_VARIABLES)]
    size, sizes = max(_LAYER_BYTES, disk_size(key)), memory_folders(key)
    return [
        f"os.dup2({LOG_FD}, 1); os.dup2({LOG_FD}, 2); os.closerange({READY_FD + 1}, 65536)",
        "from rollyard_sandbox.isolation.container import Confinement, add_layer, clean_environment, confine",
        f"add_layer({size}, {WORKDIR!r}, kept={(INSIDE, _HOSTS)!r}, folders={list(sizes)!r}, user={user})",
        f"confine(Confinement(uid={SANDBOX_UID}, sizes={sizes!r}, "
        "aliases={'/var/tmp': '/tmp'}, read_only=('/dev',), hostname='sandbox'))",
        needs_bash(),
        f"for name in {added!r}: os.environ.pop(name, None)",
        f"clean_environment({fixed!r}, (), '')",
    ]


def _engine_options(engine: Engine) -> list[str]:
    """Return the options that the engines write in different ways.

    The kernel lets a container mount a /proc of its own only where nothing covers a part of the present one.
    """
    if engine.kind == "docker":
        return ["--security-opt", "systempaths=unconfined"]
    options = ["--security-opt", "unmask=ALL", "--image-volume", "ignore"]
    if not engine.rootless:
        users = f"0:{FIRST_USER}:65536"
        options += ["--uidmap", users, "--gidmap", users]
    return options


def _join(groups: Sequence[Path], process: ProcessRef) -> None:
    """Move a process into control groups, which last longer than the container's own.

    What has happened for lack of memory is therefore known after the end of the container.
    """
    for group in groups:
        try:
            (group / "cgroup.procs").write_text(str(process.pid))
        except OSError as error:
            raise SandboxStartFailed(f"the container cannot be moved to {group}: {error}") from error


def _check_started(engine: Engine, code: int, text: str) -> None:
    if code != 0:
        raise SandboxStartFailed(f"{engine.kind} run: {_short(text) or f'exit status {code}'}")


def _peer(connection: socket.socket) -> ProcessRef | None:
    """Return the process at the other end, as this machine sees it, or None if it does not."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process_ref(pid) if pid > 0 else None


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)


def container_name(sandbox_id: str) -> str:
    """Return the name under which `podman ps` and `docker ps` show a sandbox."""
    return f"{_PREFIX}{sandbox_id}"


def _short(text: str) -> str:
    return " ".join(text.split())[-600:]
