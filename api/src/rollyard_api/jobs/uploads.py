"""Taking uploads in and reading them back, piece by piece: none is ever whole in memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from rollyard_api.core.problems import ApiError, Invalid, NotFound, QueueFull
from rollyard_api.jobs import blobs
from rollyard_api.jobs.blobs import PIECE_BYTES, BlobLimits, BlobTooLarge
from rollyard_api.storage.database import Database

AT_ONCE: Final = 4
"""Uploads to one namespace."""
PACKERS: Final = 2
"""Threads that compress."""
SILENT_SECONDS: Final = 60.0
"""Between two parts of a body."""
WHOLE_SECONDS: Final = 6 * 3600.0
"""For a whole body."""


class UploadTooSlow(ApiError):
    """The body did not come in time."""

    status = 408
    reason = "UploadTooSlow"


class Uploads:
    """The uploads of all namespaces."""

    def __init__(self, database: Database, limits: BlobLimits) -> None:
        self._database = database
        self._limits = limits
        self._running: Counter[str] = Counter()
        self._packers = ThreadPoolExecutor(PACKERS, thread_name_prefix="uploads")

    async def take(self, namespace: str, sha256: str, body: AsyncIterator[bytes]) -> bool:
        """Store a body under its SHA-256; False where the namespace has had it already.

        Raises:
            Invalid: the body has another SHA-256.
            BlobTooLarge: it is longer than one may be.
            BlobsFull, QueueFull: the namespace has too much, or too many uploads run.
            UploadTooSlow: too little came in time. Of a body that is not taken nothing is kept.
        """
        if self._running[namespace] >= AT_ONCE:
            raise QueueFull(
                f"{AT_ONCE} uploads to namespace {namespace!r} run, and no more may at once",
                reason="UploadsBusy",
                headers={"Retry-After": "2"},
            )
        self._running[namespace] += 1
        try:
            async with asyncio.timeout(WHOLE_SECONDS):
                return await self._take(namespace, sha256, body)
        except TimeoutError as error:
            raise UploadTooSlow(
                f"nothing of the body came for {SILENT_SECONDS:g} seconds, or not all of it within "
                f"{WHOLE_SECONDS:g}"
            ) from error
        finally:
            self._running[namespace] -= 1
            if not self._running[namespace]:
                del self._running[namespace]

    async def _take(self, namespace: str, sha256: str, body: AsyncIterator[bytes]) -> bool:
        write = self._database.write
        blob_id = await write(partial(blobs.begin, namespace=namespace, sha256=sha256, limits=self._limits))
        done = False
        try:
            found = await self._store(blob_id, namespace, body)
            if found != sha256:
                text = f"the body's SHA-256 is {found}, not {sha256}"
                raise Invalid(text, reason="BlobHashMismatch", errors=[text])
            made = await write(partial(blobs.complete, blob_id=blob_id, namespace=namespace, sha256=sha256))
            done = True
            return made
        finally:
            if not done:
                # Also where the caller has gone; a process that is killed leaves it to the sweep.
                await asyncio.shield(write(partial(blobs.give_up, blob_id=blob_id), durable=False))

    async def _store(self, blob_id: int, namespace: str, body: AsyncIterator[bytes]) -> str:
        """Store the body's pieces; its SHA-256."""
        digest, waiting, size, no = hashlib.sha256(), bytearray(), 0, 0

        async def put(data: bytes) -> None:
            nonlocal no
            packed = await asyncio.get_running_loop().run_in_executor(self._packers, blobs.pack, data)
            add = partial(
                blobs.add,
                blob_id=blob_id,
                namespace=namespace,
                no=no,
                packed=packed,
                size=len(data),
                limits=self._limits,
            )
            # The last commit, which is durable, makes those before it durable too.
            await self._database.write(add, durable=False)
            no += 1

        while True:
            async with asyncio.timeout(SILENT_SECONDS):
                part = await anext(body, None)
            if part is None:
                break
            size += len(part)
            if size > self._limits.blob_bytes:
                raise BlobTooLarge(f"the upload is longer than {self._limits.blob_bytes} bytes")
            digest.update(part)
            waiting += part
            while len(waiting) >= PIECE_BYTES:
                data = bytes(waiting[:PIECE_BYTES])
                del waiting[:PIECE_BYTES]
                await put(data)
        if waiting:
            await put(bytes(waiting))
        return digest.hexdigest()

    async def pieces(self, namespace: str, sha256: str) -> AsyncGenerator[bytes, None]:
        """An upload's bytes, for a job that names it.

        Raises:
            Invalid: the namespace has no such upload.
        """
        try:
            row = await self._database.read(partial(blobs.find, namespace=namespace, sha256=sha256))
        except NotFound as error:
            raise blobs.missing_of_job(sha256) from error
        for no in range(row.pieces):
            data = await self._database.read(partial(blobs.piece, blob_id=row.id, no=no))
            if data is None:
                raise blobs.missing_of_job(sha256)
            yield data

    def close(self) -> None:
        """End the threads."""
        self._packers.shutdown()

    async def remove_unneeded(self) -> None:
        """Remove uploads that no job holds and nobody has asked for lately, and those that were given up."""
        expire = partial(blobs.expire, kept_seconds=self._limits.kept_seconds)
        await self._database.write(expire, durable=False)
        while await self._database.write(blobs.remove_some, durable=False):
            pass
