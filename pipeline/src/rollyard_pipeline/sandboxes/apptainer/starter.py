"""Apptainer sandboxes: rootless instances of SIF files, of container images and of root folders.

Apptainer provides the image, a writable layer and the closed network. Inside, before the exec server
starts, `rollyard_sandbox.isolation.container` adds what an instance lacks: its own user, size limits for
what can be written, and an exec server that nothing inside can bypass or end.

An instance is a process that keeps it (`Apptainer instance: USER [NAME]`, daemonized), its child `appinit`,
which is process 1 inside, and helpers that serve its file systems. Killing process 1 immediately ends
everything inside, and then the keeper, which ends the helpers. If the keeper is killed first, it leaves the
helpers behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import platform
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rollyard_sandbox.isolation.protections import NOT_CONFINED

from rollyard_pipeline.sandboxes.allowed_images import ANY, AllowedImages
from rollyard_pipeline.sandboxes.apptainer.image_cache import NO_ROOM, ImageCache
from rollyard_pipeline.sandboxes.apptainer.images import Image, built_image, parse_image
from rollyard_pipeline.sandboxes.apptainer.program import (
    ContainerProgram,
    find_program,
    fuse_problem,
    program_env,
    userns_problem,
)
from rollyard_pipeline.sandboxes.errors import (
    DiskFull,
    ImageNotUsable,
    NodeDiskFull,
    NodeUnusable,
    SandboxStartFailed,
)
from rollyard_pipeline.sandboxes.host.cgroups import CgroupPlace
from rollyard_pipeline.sandboxes.host.processes import (
    ProcessRef,
    descendants,
    ends,
    kill_and_wait,
    process_ref,
)
from rollyard_pipeline.sandboxes.host.records import SOCKET_NAME, SandboxFolder, SandboxRecord
from rollyard_pipeline.sandboxes.host.threads import in_thread
from rollyard_pipeline.sandboxes.interface import BuildFolder, SandboxKey
from rollyard_pipeline.sandboxes.starters.base import (
    BASHES,
    NO_BASH,
    SANDBOX_ENV,
    START_SECONDS,
    StartedSandbox,
    Starter,
    bind_mount,
    inside,
    needs_bash,
    server_code,
)
from rollyard_pipeline.sandboxes.starters.bubblewrap import userns_advice
from rollyard_pipeline.sandboxes.starters.launch import LOG_FD, READY_FD, SandboxLaunch, start
from rollyard_pipeline.sandboxes.starters.root_folders import WORKDIR, disk_size, memory_folders
from rollyard_pipeline.sandboxes.starters.runtime import (
    INSIDE,
    SANDBOX_UID,
    Runtime,
    make_mount_points,
    make_runtime,
)

_PREFIX: Final = "ry-"
_KEEPER_SECONDS: Final = 5.0


log = logging.getLogger(__name__)

_START_SECONDS: Final = 2 * START_SECONDS
"""The time for a start in seconds. A cold image on a busy file server takes long to read."""
_USERS_OVERLAY_SINCE: Final = (5, 11)
_LAYER_MB: Final = 16
# Programs of Apptainer add these variables to the environment of the programs that they start.
_ADDED: Final = ("APPTAINER_", "SINGULARITY_", "PS1", "PROMPT_COMMAND")
_LIBRARIES: Final = "/.singularity.d/libs"
_OF_THE_IMAGE: Final = re.compile(
    r"image format|opening image|image driver|not a SIF|squashfs|mount.*rootfs|no such file|exec format",
    re.IGNORECASE,
)
_CONFIG: Final = """# Written by Rollyard: the memory of this size holds the writable layer of an image.
sessiondir max size = {megabytes}
config passwd = no
config group = no
config resolv_conf = no
mount home = no
mount tmp = yes
user bind control = yes
enable overlay = yes
"""


@dataclass(frozen=True, slots=True)
class ApptainerOptions:
    """A worker's settings for Apptainer sandboxes."""

    program: str | None = None
    """The program. The default is `apptainer`, else `singularity`, from PATH."""
    default_image: str | None = None
    """The image for jobs that name none."""
    image_cache: Path | None = None
    """The folder for built images, best on storage that the nodes share. The default is in the run folder."""
    image_cache_bytes: int = 100 << 30
    build_dockerfiles: bool = False
    """Whether images of tasks' Dockerfiles are built, which runs their authors' commands as this user."""
    fakeroot: bool = False
    """Whether programs inside are root of the image and may change all of it."""


class ApptainerStarter(Starter):
    """Starts an instance whose start script is the exec server."""

    name = "apptainer"
    fetches = True

    def __init__(
        self,
        folder: SandboxFolder,
        places: Sequence[CgroupPlace],
        options: ApptainerOptions,
        images: AllowedImages | None = None,
        tools: Path | None = None,
    ) -> None:
        self._tools = tools
        self._allowed = images or AllowedImages([ANY])
        super().__init__(places)
        self._folder = folder
        self._options = options
        self._own = folder.run_dir / "apptainer"
        self._cache = ImageCache(
            options.image_cache or self._own / "images",
            options.image_cache_bytes,
            dockerfiles=options.build_dockerfiles,
        )
        self._program: ContainerProgram | None = None
        self._runtime: Runtime | None = None
        self._unpacked = False
        self._layered = True

    async def probe(self) -> None:
        """Find the program and check what this node lets it do.

        Raises:
            NodeUnusable: This node cannot run such sandboxes.
            ImageNotUsable: The default image cannot be used.
        """
        # All checks run concurrently, because a worker's first rollout waits for them.
        finding = asyncio.create_task(find_program(self._options.program))
        preparing = asyncio.create_task(in_thread(self._prepare))
        try:
            problem = await userns_problem()
            self._program = await finding
            if problem is not None:
                raise NodeUnusable(forbidden_text(problem), "UserNamespacesForbidden")
            try:
                await preparing
            except OSError as error:
                raise NodeUnusable(
                    f"run dir {self._folder.run_dir} cannot be used: {error}", "RunDirUnusable"
                ) from error
        finally:
            finding.cancel()
            await asyncio.wait([preparing])
        if (problem := fuse_problem()) is not None:
            self._unpacked = True
            log.warning(
                "%s: SIF files cannot be mounted here, and are unpacked to folders in %s first; ask the "
                "administrator for squashfuse and a /dev/fuse that all may open (mode 0666, as udev sets it)",
                problem,
                self._cache.folder,
            )
            # Without FUSE the writable layer is the kernel's own overlay, which users may mount only in
            # newer kernels.
            self._layered = _kernel(platform.release()) >= _USERS_OVERLAY_SINCE
            if not self._layered:
                log.warning("Linux %s lets users mount no overlay: images are read-only", platform.release())
        await in_thread(self._end_strays)
        if self._options.default_image is not None:
            self._image(None)

    def _prepare(self) -> None:
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._cache.prepare()
        self._runtime = make_runtime(self._folder.run_dir, self._tools)
        self._write("start", '#!/bin/sh\nexec "$@"\n', 0o755)
        make_mount_points(self._runtime, self._own / "runtime")

    def _end_strays(self) -> None:
        """End instances whose folders are gone, because no sweep of the node's records finds them."""
        known = set(self._folder.ids())
        for sandbox_id in filed_instances(self._own):
            if sandbox_id not in known:
                log.warning("instance %s has no folder any more: ended", instance_name(sandbox_id))
                self._clear(instance_name(sandbox_id))

    def check(self, key: SandboxKey) -> None:
        """Raise ImageNotUsable if no sandbox can ever be started from the key's image.

        A Dockerfile is translated later, because its files take time to read.
        """
        if key.build is None:
            self._image(key.image)

    def _image(self, text: str | None, build: BuildFolder | None = None) -> Image:
        if text is not None and build is not None:
            return built_image(text, build, self._allowed, private=[self._folder.run_dir])
        if text is None:
            text = self._options.default_image
            if text is None:
                raise ImageNotUsable(
                    "sandbox.image: not given, and this worker has no default image; name one (a SIF file, "
                    "docker://NAME, …), or start the worker with --default-image"
                )
        return parse_image(text, private=[self._folder.run_dir])

    async def prepare(self, key: SandboxKey) -> None:
        """Build the image, or wait for another process that builds it."""
        await self._ready(key)

    async def fetch(self, key: SandboxKey) -> bool:
        """Build the image ahead of the first sandbox, if the cache has room; see `ImageCache.fetch`."""
        image, program = await self._source(key)
        return await self._cache.fetch(image, program, unpacked=self._unpacked)

    async def _source(self, key: SandboxKey) -> tuple[Image, ContainerProgram]:
        if self._program is None:
            raise SandboxStartFailed("the provider has not been started: await its start() first")
        return await in_thread(self._image, key.image, key.build), self._program

    async def _ready(self, key: SandboxKey) -> Path:
        image, program = await self._source(key)
        try:
            return await self._cache.ready(image, program, unpacked=self._unpacked)
        except DiskFull as error:
            if self._cache.folder.is_relative_to(self._folder.run_dir):
                raise NodeDiskFull(str(error)) from error
            raise

    async def start(
        self, key: SandboxKey, folder: Path, cgroups: Sequence[Path], secret: bytes
    ) -> StartedSandbox:
        """Start an instance with the exec server in it; see `Starter.start`."""
        image = await self._ready(key)
        name = instance_name(folder.name)
        launch = SandboxLaunch(
            # An instance begins in the folder from which it is started, if the image has such a folder.
            argv=["/bin/sh", "-c", 'cd / && exec "$@"', "sh", *self._command(key, image, name)],
            env=program_env(self._own),
            socket_path=folder / SOCKET_NAME,
            secret=secret,
            cgroups=cgroups,
            log=True,
            end=lambda child: self._clear(name, [child.pid]),
        )
        try:
            started = await start(launch, self.reaper, _START_SECONDS)
            instance = await self._filed(name, started.child)
        except SandboxStartFailed as error:
            await in_thread(self._clear, name)
            raise self._explained(error, key) from error
        except BaseException:
            await in_thread(self._clear, name)
            raise
        return StartedSandbox(instance.root, instance.keeper, instance.helpers)

    async def _filed(self, name: str, starter: ProcessRef) -> Instance:
        """Return the instance's processes, once Apptainer has filed them.

        The start command is one of the helpers if it still runs.
        """
        instance = await in_thread(load_instance, self._own, name)
        if instance is None:
            await in_thread(ends, starter, START_SECONDS)
            instance = await in_thread(load_instance, self._own, name)
        if instance is None:
            raise SandboxStartFailed(f"no instance {name} is filed below {self._own}, though one has started")
        # Apptainer files an instance before the server runs, but its command ends up to 0.1 s later. Nobody
        # needs to wait for that, only to end the command with the sandbox.
        return replace(instance, helpers=(*instance.helpers, starter)) if starter.alive() else instance

    def _command(self, key: SandboxKey, image: Path, name: str) -> list[str]:
        program, runtime = self._program, self._runtime
        assert program is not None
        assert runtime is not None
        binds = [(str(self._own / "runtime"), INSIDE), *runtime.binds]
        binds.append((str(self._own / "start"), "/.singularity.d/startscript"))
        return [
            program.path,
            "-s",
            *self._config(key),
            "instance",
            "start",
            *(["--fakeroot"] if self._options.fakeroot else ["--userns"]),
            *program.options,
            "--containall",
            "--cleanenv",
            "--no-home",
            "--no-mount",
            "sys,bind-paths",
            "--net",
            "--network",
            "none",
            *(part for folder in (WORKDIR, *key.folders) for part in ("--scratch", folder)),
            *(["--writable-tmpfs"] if self._layered else []),
            *(part for source, target in binds for part in ("--mount", bind_mount(source, target))),
            str(image),
            name,
            *runtime.argv,
            *server_code(
                key,
                self.bound,
                WORKDIR,
                runtime.path,
                before=self._confine(key),
                inside=inside(key, None if self._options.fakeroot else SANDBOX_UID),
            ),
        ]

    def _config(self, key: SandboxKey) -> list[str]:
        """Return options for a configuration of our own, which sets the size of the writable layer.

        They are empty if a user may not give a configuration.
        """
        if self._program is None or not self._program.takes_config:
            return []
        megabytes = max(_LAYER_MB, disk_size(key) >> 20)
        text = _CONFIG.format(megabytes=megabytes)
        return ["--config", str(self._write(f"layer-{megabytes}.conf", text, 0o600))]

    def _write(self, name: str, text: str, mode: int) -> Path:
        """Write a file atomically, because other workers may be using it already."""
        path = self._own / name
        if not path.exists():
            temporary = self._own / f".{name}.{os.getpid()}"
            temporary.write_text(text)
            temporary.chmod(mode)
            temporary.rename(path)
        return path

    def _confine(self, key: SandboxKey) -> list[str]:
        """Return the lines of Python code that run inside, before the exec server."""
        uid = None if self._options.fakeroot else SANDBOX_UID
        fixed = {name: value for name, value in SANDBOX_ENV.items() if name != "PATH"}
        if self._options.fakeroot:
            fixed |= {"USER": "root", "LOGNAME": "root"}
        return [
            "import os",
            f"os.dup2({LOG_FD}, 1); os.dup2({LOG_FD}, 2); os.closerange({READY_FD + 1}, 65536)",
            "from rollyard_sandbox.isolation.container import Confinement, clean_environment, confine",
            f"confine(Confinement(uid={uid!r}, sizes={memory_folders(key)!r}, "
            "aliases={'/var/tmp': '/tmp'}, read_only=('/dev', '/sys'), hostname='sandbox'))",
            needs_bash(),
            f"clean_environment({fixed!r}, {_ADDED!r}, {_LIBRARIES!r})",
        ]

    def kill(self, record: SandboxRecord, seconds: float) -> bool:
        """Kill the instance with all of its processes, and return whether they are gone."""
        name = instance_name(record.id)
        if record.root is None:
            ended = end_by_name(name, seconds)
        else:
            ended = end_instance(record.root, record.monitor, record.helpers, seconds)
        forget_instance(self._own, name)
        return ended

    def _clear(self, name: str, sessions: Sequence[int] = ()) -> None:
        instance = load_instance(self._own, name)
        if instance is not None:
            end_instance(instance.root, instance.keeper, instance.helpers, 10.0)
        end_by_name(name, 10.0, sessions)
        forget_instance(self._own, name)

    def _explained(self, error: SandboxStartFailed, key: SandboxKey) -> Exception:
        text = str(error)
        if NOT_CONFINED in text or re.search(r"user namespace|unshare.*not permitted", text, re.IGNORECASE):
            return NodeUnusable(forbidden_text(text), "UserNamespacesForbidden")
        if NO_ROOM.search(text):
            return DiskFull(f"no room left for a sandbox in {self._folder.run_dir}: {text}")
        image = key.image if key.image is not None else self._options.default_image
        if NO_BASH in text:
            return ImageNotUsable(f"sandbox.image {image!r}: has no bash (looked for {', '.join(BASHES)})")
        if _OF_THE_IMAGE.search(text):
            return ImageNotUsable(f"sandbox.image {image!r}: {text}")
        return error


def forbidden_text(answer: str) -> str:
    """Return the message for refused namespaces: the program's output and what can be done."""
    return (
        f"Apptainer cannot make a sandbox here: no user namespaces ({answer.strip()[:300]}). What to do: "
        f"{'; '.join(namespace_advice())}"
    )


def namespace_advice() -> list[str]:
    """Return what forbids user namespaces here, as far as /proc shows it, with what to ask for."""
    return userns_advice() or [
        "in a container: run it with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "--security-opt systempaths=unconfined`; inside a chroot the kernel refuses them always"
    ]


def _kernel(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])


@dataclass(frozen=True, slots=True)
class Instance:
    """The processes of an instance, as this machine sees them."""

    root: ProcessRef
    keeper: ProcessRef
    helpers: tuple[ProcessRef, ...]


def instance_name(sandbox_id: str) -> str:
    """Return the name under which `apptainer instance list` shows a sandbox."""
    return f"{_PREFIX}{sandbox_id}"


def filed_instances(config: Path) -> list[str]:
    """Return the ids of the sandboxes that Apptainer has filed below `config`, alive or not."""
    names = {path.name for path in config.glob(f"instances/*/*/*/{_PREFIX}*") if path.is_dir()}
    return sorted(name.removeprefix(_PREFIX) for name in names)


def load_instance(config: Path, name: str) -> Instance | None:
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


def end_instance(
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


def forget_instance(config: Path, name: str) -> None:
    """Remove what Apptainer files for an instance: its entry and its logs."""
    for path in [*config.glob(f"instances/*/*/*/{name}/*"), *config.glob(f"instances/logs/*/*/{name}.*")]:
        path.unlink(missing_ok=True)
    for folder in config.glob(f"instances/*/*/*/{name}"):
        with contextlib.suppress(OSError):
            folder.rmdir()
