"""SIF files (or root folders) built from other images once, for all workers and nodes that share a folder.

    <cache>/<key>.sif     an image; <key>.dir where SIF files cannot be mounted
    <cache>/<key>.json    what it was built from
    <cache>/<key>.lock    held by whoever builds it (see `shared_lock`)
    <cache>/.new-<…>      what is being built: renamed when it is whole
    <cache>/.layers-<…>   what a build has downloaded that was not finished: the next one continues from there

A name in a registry that is no digest is looked up once; remove the file to have it looked up again.
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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rollyard_pipeline.sandboxes.apptainer.images import Image
from rollyard_pipeline.sandboxes.apptainer.program import Program, run_program
from rollyard_pipeline.sandboxes.apptainer.shared_lock import STALE_SECONDS, shared_lock
from rollyard_pipeline.sandboxes.errors import DiskFull, ImageNotUsable, RunDirUnusable, SandboxStartFailed
from rollyard_pipeline.sandboxes.host.threads import in_thread

log = logging.getLogger(__name__)

MAX_BYTES: Final = 100 << 30
BUILD_SECONDS: Final = 3600.0
"""The most that a build may take; usually the Init stage's own limit is reached before."""
_IN_USE_SECONDS: Final = 3600.0
_ZSTD: Final = ("--mksquashfs-args", "-comp zstd -Xcompression-level 3")
NO_ROOM: Final = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
_PASSING: Final = re.compile(
    r"timeout|timed out|no such host|connection re(fused|set)|network is unreachable|i/o|temporar|"
    r"too ?many ?requests|\b(429|500|502|503|504)\b|unexpected EOF|TLS handshake",
    re.IGNORECASE,
)


class ImageCache:
    """Built images in one folder, at most `max_bytes` of them as far as those in use allow.

    Args:
        folder: on storage that the nodes share, or on this node.
        max_bytes: beyond it, what has not been used for the longest time is removed.
        stale_seconds: after which a builder that shows no sign of life is taken for dead.
    """

    def __init__(
        self, folder: Path, max_bytes: int = MAX_BYTES, stale_seconds: float = STALE_SECONDS
    ) -> None:
        self.folder = folder.absolute()
        self._max_bytes = max_bytes
        self._stale_seconds = stale_seconds
        self._builds: dict[Path, asyncio.Lock] = {}

    def prepare(self) -> None:
        """Makes the folder.

        Raises:
            RunDirUnusable: it cannot be made or written to.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.folder / f".probe-{secrets.token_hex(6)}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise RunDirUnusable(f"--image-cache {self.folder} cannot be used: {error}") from error

    async def ready(self, image: Image, program: Program, *, unpacked: bool) -> Path:
        """The image as a SIF file, or as a folder where `unpacked`; built where it is not there yet.

        It takes as long as the build, of this or of another node: the caller bounds the wait. A
        cancelled wait ends the build and leaves nothing.

        Raises:
            ImageNotUsable: it can never be built.
            SandboxStartFailed: it could not be built this time (the network, the registry).
            DiskFull: no room for it.
        """
        if image.path is not None and (image.kind == "folder" or (image.kind == "sif" and not unpacked)):
            return image.path
        key = await in_thread(image.key)
        target = self.folder / f"{key}{'.dir' if unpacked else '.sif'}"
        async with self._builds.setdefault(target, asyncio.Lock()):
            if not _used(target):
                with self._disk():
                    async with shared_lock(
                        self.folder / f"{target.name}.lock", until=target.exists,
                        stale_seconds=self._stale_seconds,
                    ) as mine:  # fmt: skip
                        if mine and not target.exists():
                            await self._build(image, program, target)
            _used(target)
        return target

    async def _build(self, image: Image, program: Program, target: Path) -> None:
        await in_thread(self._make_room, target)
        log.info("building %s from %s", target, image.text)
        began = time.monotonic()
        work = self.folder / f".new-{socket.gethostname()}-{secrets.token_hex(6)}"
        work.mkdir(mode=0o700)
        try:
            built = work / target.name
            code, text = 1, ""
            for options in ((),) if target.suffix == ".dir" else (_ZSTD, ()):
                code, text = await self._run(image, program, built, target, options)
                if code == 0 or not re.search(r"compress|zstd|mksquashfs", text, re.IGNORECASE):
                    break
            if code != 0 or not built.exists():
                raise _failure(image, code, text)
            notes = {"image": image.text, "host": socket.gethostname(), "seconds": time.monotonic() - began}
            (work / "notes").write_text(json.dumps(notes))
            (work / "notes").rename(target.with_suffix(".json"))
            if target.suffix == ".dir":
                with contextlib.suppress(FileExistsError):
                    built.rename(target)
            else:
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
        self, image: Image, program: Program, built: Path, target: Path, options: tuple[str, ...]
    ) -> tuple[int, str]:
        env = dict(os.environ)  # registries want proxies, certificates and credentials
        for prefix in ("APPTAINER", "SINGULARITY"):
            env[f"{prefix}_TMPDIR"] = str(built.parent)
            env[f"{prefix}_CACHEDIR"] = str(self._layers(target))
        kind = ("--sandbox", "--fix-perms") if built.suffix == ".dir" else ()
        argv = [program.path, "build", "--force", *kind, *options, str(built), image.source]
        return await run_program(argv, seconds=BUILD_SECONDS, env=env)

    def _make_room(self, wanted: Path) -> None:
        """Removes what builders have left that died, and what has not been used for longest."""
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
            if total <= self._max_bytes:
                return
            if now - used > _IN_USE_SECONDS and path != wanted:
                log.info("removing %s from the image cache, which holds %d MB", path, total >> 20)
                _remove(path)
                path.with_suffix(".json").unlink(missing_ok=True)
                total -= size

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if NO_ROOM.search(os.strerror(error.errno or 0)):
                raise DiskFull(f"no room left in the image cache {self.folder}; free some") from error
            raise


def _failure(image: Image, code: int, text: str) -> Exception:
    lines = [line for line in text.strip().splitlines() if "INFO:" not in line]
    words = " | ".join(lines[-6:])[-1500:] or f"exit status {code}"
    if NO_ROOM.search(text):
        return DiskFull(f"no room left in the image cache to build {image.text!r}: {words}")
    if code == 124 or (image.kind == "registry" and _PASSING.search(text)):
        return SandboxStartFailed(f"sandbox.image {image.text!r} could not be built this time: {words}")
    return ImageNotUsable(f"sandbox.image {image.text!r} cannot be built: {words}")


def _used(path: Path) -> bool:
    """Marks the entry as used now; False where it is not there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:
        return path.exists()  # another user's, or read-only storage
    return True


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(
        os.lstat(os.path.join(folder, name)).st_size for folder, _, files in os.walk(path) for name in files
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for folder, _, _ in os.walk(path):
            with contextlib.suppress(OSError):
                os.chmod(folder, 0o700)  # an image may hold folders that their owner may not change
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
