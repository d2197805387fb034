"""A cache of SIF files (or root folders), each built once for all workers and nodes that share a folder.

    <cache>/<key>.sif     an image, also that of a Dockerfile; <key>.dir if SIF files cannot be mounted
    <cache>/<key>.json    the source from which it was built
    <cache>/<key>.lock    held by the process that builds it (see `shared_lock`)
    <cache>/.new-<…>      a build in progress, which is renamed when it is complete
    <cache>/.layers-<…>   what an unfinished build has downloaded; the next build continues from there

A registry name without a digest is looked up once. Remove the file to have it looked up again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from rollyard_sandbox import folders

from rollyard_pipeline.sandboxes.apptainer.images import Image
from rollyard_pipeline.sandboxes.apptainer.program import ContainerProgram
from rollyard_pipeline.sandboxes.errors import DiskFull, ImageNotUsable, NodeUnusable, SandboxStartFailed
from rollyard_pipeline.sandboxes.host.programs import run_program
from rollyard_pipeline.sandboxes.host.threads import in_thread

log = logging.getLogger(__name__)

MAX_BYTES: Final = 100 << 30
BUILD_SECONDS: Final = 3600.0
"""The longest time of a build in seconds. The Init stage's own limit is usually reached earlier."""
BUILDS_AT_ONCE: Final = 4
"""The number of images that one worker builds or fetches at the same time. Others wait for a place."""
_IN_USE_SECONDS: Final = 3600.0
_REMOVE_SECONDS: Final = 60.0
_ZSTD: Final = ("--mksquashfs-args", "-comp zstd -Xcompression-level 3")
_NEEDED: Final = ("PATH", "HOME", "USER", "LOGNAME")
NO_ROOM: Final = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
_PASSING: Final = re.compile(
    r"timeout|timed out|no such host|connection re(fused|set)|network is unreachable|i/o|temporar|"
    r"too ?many ?requests|\b(429|500|502|503|504)\b|unexpected EOF|TLS handshake",
    re.IGNORECASE,
)
TOUCH_SECONDS: Final = 5.0
STALE_SECONDS: Final = 45.0
_POLL_SECONDS: Final = 0.5


class ImageCache:
    """Built images in one folder, limited to `max_bytes` as far as the images in use allow.

    Args:
        folder: A folder on storage that the nodes share, or on this node.
        max_bytes: The size limit in bytes. Beyond it, the least recently used images are removed.
        stale_seconds: The time in seconds after which a builder without a sign of life is considered dead.
        dockerfiles: Whether Dockerfiles may be built, which runs their authors' commands on this machine as
            this process's user.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int = MAX_BYTES,
        stale_seconds: float = STALE_SECONDS,
        *,
        dockerfiles: bool = False,
    ) -> None:
        self.folder = folder.absolute()
        self._max_bytes = max_bytes
        self._stale_seconds = stale_seconds
        self._dockerfiles = dockerfiles
        self._builds: dict[Path, asyncio.Lock] = {}
        self._places = asyncio.Semaphore(BUILDS_AT_ONCE)

    def prepare(self) -> None:
        """Make the folder.

        Raises:
            NodeUnusable: The folder cannot be made or written to.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.folder / f".probe-{secrets.token_hex(6)}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise NodeUnusable(
                f"--image-cache {self.folder} cannot be used: {error}", "RunDirUnusable"
            ) from error

    async def ready(self, image: Image, program: ContainerProgram, *, unpacked: bool) -> Path:
        """Return the image as a SIF file, or as a folder if `unpacked`. It is built if it is missing.

        A build on this or another node can take long, so the caller bounds the wait. A cancelled wait ends
        the build and leaves nothing.

        Raises:
            ImageNotUsable: The image can never be built, or it is that of a Dockerfile and must not be.
            SandboxStartFailed: The image could not be built this time (the network, the registry).
            DiskFull: There is no room for the image.
        """
        if image.path is not None and (image.kind == "folder" or (image.kind == "sif" and not unpacked)):
            return image.path
        if image.recipe is not None and unpacked:
            # It is unpacked from the SIF file, so that no command of a Dockerfile runs twice.
            await self.ready(image, program, unpacked=False)
        target = await self._target(image, unpacked=unpacked)
        async with self._builds.setdefault(target, asyncio.Lock()):
            if not _used(target):
                with self._disk():
                    async with shared_lock(
                        self.folder / f"{target.name}.lock",
                        until=target.exists,
                        stale_seconds=self._stale_seconds,
                    ) as mine:
                        if mine and not target.exists():
                            await self._build(image, program, target)
            _used(target)
        return target

    async def fetch(self, image: Image, program: ContainerProgram, *, unpacked: bool) -> bool:
        """Build an image that no sandbox waits for yet, unless the cache is full. Return whether it exists.

        An image that is needed now is built even if the images in use fill the cache. One that is only
        expected is not.

        Raises:
            ImageNotUsable, SandboxStartFailed, DiskFull: See `ready`.
        """
        if image.path is None or image.kind == "archive" or unpacked:
            target = await self._target(image, unpacked=unpacked)
            if not target.exists() and not await in_thread(self._make_room, target):
                return False
        await self.ready(image, program, unpacked=unpacked)
        return True

    async def has(self, image: Image) -> bool:
        """Return whether the image has been built as a SIF file.

        Raises:
            ImageNotUsable: Its archive or file cannot be read.
        """
        return (await self._target(image, unpacked=False)).exists()

    async def _target(self, image: Image, *, unpacked: bool) -> Path:
        return self.folder / f"{await in_thread(image.key)}{'.dir' if unpacked else '.sif'}"

    async def _build(self, image: Image, program: ContainerProgram, target: Path) -> None:
        recipe = image.recipe if target.suffix == ".sif" else None
        if recipe is not None and not self._dockerfiles:
            raise ImageNotUsable(
                f"sandbox.image {image.text!r}: the image of this Dockerfile has not been built, and workers "
                f"may not build it: run `rollyard images build FOLDER --cache {self.folder}`"
            )
        await in_thread(self._make_room, target)
        log.info("building %s from %s", target, image.text)
        began = time.monotonic()
        work = self.folder / f".new-{socket.gethostname()}-{secrets.token_hex(6)}"
        work.mkdir(mode=0o700)
        try:
            built = work / target.name
            if recipe is not None:
                assert image.base is not None
                # The base is an image of its own, which many Dockerfiles share.
                base = await self.ready(image.base, program, unpacked=False)
                await in_thread(recipe.write, work, base)
            code, text = 1, ""
            async with self._places:
                for options in ((),) if target.suffix == ".dir" else (_ZSTD, ()):
                    code, text = await self._run(image, program, built, target, options)
                    if code == 0 or not re.search(r"compress|zstd|mksquashfs", text, re.IGNORECASE):
                        break
            if code != 0 or not built.exists():
                raise _failure(image, code, text)
            notes = {"image": image.text, "host": socket.gethostname(), "seconds": time.monotonic() - began}
            (work / "notes").write_text(json.dumps(notes))
            (work / "notes").rename(target.with_suffix(".json"))
            # Another process may have been faster, which does not matter: a file is replaced, a folder stays.
            with contextlib.suppress(FileExistsError):
                built.rename(target)
            await in_thread(_remove, self._layers(target))
        except ImageNotUsable:
            await in_thread(_remove, self._layers(target))
            raise
        finally:
            await asyncio.shield(asyncio.to_thread(_remove, work))

    def _layers(self, target: Path) -> Path:
        return self.folder / f".layers-{target.stem}"

    async def _run(
        self, image: Image, program: ContainerProgram, built: Path, target: Path, options: tuple[str, ...]
    ) -> tuple[int, str]:
        env = dict(os.environ)  # Registries need proxies, certificates and credentials.
        for prefix in ("APPTAINER", "SINGULARITY"):
            env[f"{prefix}_TMPDIR"] = str(built.parent)
            env[f"{prefix}_CACHEDIR"] = str(self._layers(target))
        kind = ("--sandbox", "--fix-perms") if built.suffix == ".dir" else ()
        if image.recipe is not None and target.suffix == ".sif":
            return await _run_recipe(program, built, list(options))
        source = image.source if image.recipe is None else str(target.with_suffix(".sif"))
        argv = [program.path, "build", "--force", *kind, *options, str(built), source]
        return await run_program(argv, seconds=BUILD_SECONDS, env=env)

    def _make_room(self, target: Path) -> bool:
        """Remove what dead builders left, and the least recently used images. Return if there is room."""
        now = time.time()
        for path in [*self.folder.glob(".new-*"), *self.folder.glob(".layers-*")]:
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > 2 * BUILD_SECONDS:
                    _remove(path)
        entries = []
        for path in [*self.folder.glob("*.sif"), *self.folder.glob("*.dir")]:
            with contextlib.suppress(OSError):
                entries.append((path.stat().st_mtime, path, _size(path)))
        total = sum(size for _, _, size in entries)
        for used, path, size in sorted(entries):
            if total < self._max_bytes:
                break
            if now - used > _IN_USE_SECONDS and path != target:
                log.info("removing %s from the image cache, which holds %d MB", path, total >> 20)
                _remove(path)
                path.with_suffix(".json").unlink(missing_ok=True)
                total -= size
        return total < self._max_bytes

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if NO_ROOM.search(os.strerror(error.errno or 0)):
                raise DiskFull(f"no room left in the image cache {self.folder}; free some") from error
            raise


async def _run_recipe(program: ContainerProgram, built: Path, options: list[str]) -> tuple[int, str]:
    """Build from the definition file beside `built`.

    The build runs the commands of a Dockerfile's author, who can read the environment of the program.
    """
    work = built.parent
    env = {name: value for name in _NEEDED if (value := os.environ.get(name))}
    env.setdefault("PATH", os.defpath)
    for prefix in ("APPTAINER", "SINGULARITY"):
        env[f"{prefix}_TMPDIR"] = str(work)
        env[f"{prefix}_CACHEDIR"] = str(work / "cache")
    argv = [program.path, "build", "--force", "--fakeroot", *options]
    # A build would otherwise see the /tmp of this machine, and leave its files there.
    for name, target in (("tmp", "/tmp"), ("var-tmp", "/var/tmp")):
        (work / name).mkdir(exist_ok=True)
        (work / name).chmod(0o1777)
        argv += ["--bind", f"{work / name}:{target}"]
    argv += [str(built), "definition"]
    return await run_program(argv, seconds=BUILD_SECONDS, env={**env, "LANG": "C.UTF-8"}, cwd=work)


def _failure(image: Image, code: int, text: str) -> Exception:
    lines = [line for line in text.strip().splitlines() if "INFO:" not in line]
    words = " | ".join(lines[-6:])[-1500:] or f"exit status {code}"
    if NO_ROOM.search(text):
        return DiskFull(f"no room left in the image cache to build {image.text!r}: {words}")
    if code == 124 or (image.kind in ("registry", "dockerfile") and _PASSING.search(text)):
        return SandboxStartFailed(f"sandbox.image {image.text!r} could not be built this time: {words}")
    return ImageNotUsable(f"sandbox.image {image.text!r} cannot be built: {words}")


def _used(path: Path) -> bool:
    """Mark the entry as used now, and return whether it exists."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:
        return path.exists()  # The file may belong to another user, or the storage may be read-only.
    return True


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(info.st_size for info in folders.sizes(str(path)))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(OSError):
            folders.remove(str(path))
        if path.exists() and (program := shutil.which("unshare")) is not None:
            # A build with --fakeroot that was killed leaves files of the user's further ids (/etc/subuid).
            argv = [program, "--map-root-user", "--map-auto", "rm", "-rf", "--", str(path)]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_REMOVE_SECONDS)
    else:
        path.unlink(missing_ok=True)


@asynccontextmanager
async def shared_lock(
    path: Path, *, until: Callable[[], bool] = lambda: False, stale_seconds: float = STALE_SECONDS
) -> AsyncIterator[bool]:
    """Hold the lock file `path`, whose folder must exist. The caller bounds the wait.

    It is a lock for several nodes on shared storage, where flock(2) may apply to one node only: a file that
    its holder touches repeatedly. A file that has not been touched for `stale_seconds` belongs to a dead
    holder, and a waiting process takes it. All times come from the storage, because the nodes' clocks may
    differ. If a holder was frozen for that long, there may be a second one. The protected work must stay
    correct in that case: the lock saves work, it does not guard data.

    The value is False, and nothing is held, once `until` returns true because nothing is left to do.

    Raises:
        OSError: The storage refuses the file.
    """
    mine = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}\n"
    while not await asyncio.to_thread(_taken, path, mine, stale_seconds):
        if until():
            yield False
            return
        await asyncio.sleep(_POLL_SECONDS)
    touching = asyncio.create_task(_touch(path, stale_seconds), name=f"lock {path.name}")
    try:
        yield True
    finally:
        touching.cancel()
        await asyncio.gather(touching, return_exceptions=True)
        await asyncio.shield(asyncio.to_thread(_give_back, path, mine))


async def _touch(path: Path, stale_seconds: float) -> None:
    while True:
        await asyncio.sleep(min(TOUCH_SECONDS, stale_seconds / 3))
        # No times are passed, so the storage writes its own.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(os.utime, path)


def _taken(path: Path, mine: str, stale_seconds: float) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        _clear_stale(path, stale_seconds)
        return False
    try:
        os.write(fd, mine.encode())
    finally:
        os.close(fd)
    return True


def _clear_stale(path: Path, stale_seconds: float) -> None:
    """Remove the lock of a dead holder. Of several processes that try, one succeeds."""
    probe = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        holder, touched = path.read_text(), path.stat().st_mtime
        probe.touch()
        age = probe.stat().st_mtime - touched
    except FileNotFoundError:
        return
    finally:
        probe.unlink(missing_ok=True)
    if age < stale_seconds:
        return
    try:
        path.rename(probe)
    except FileNotFoundError:
        return
    try:
        if probe.read_text() != holder:
            # Another process was faster, and the moved lock is a new holder's. It is put back.
            with contextlib.suppress(FileExistsError):
                os.link(probe, path)
        else:
            log.warning(
                "took the lock %s of a holder that has not been seen for %.0f s: %s", path, age, holder
            )
    finally:
        probe.unlink(missing_ok=True)


def _give_back(path: Path, mine: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.read_text() == mine:
            path.unlink()
