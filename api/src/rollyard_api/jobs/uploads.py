"""Uploads are received and read back piece by piece; no upload is ever whole in memory."""

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
"""The number of uploads to one namespace that may run at the same time."""
PACKERS: Final = 2
"""The number of threads that compress."""
SILENT_SECONDS: Final = 60.0
"""The longest time between two parts of a body, in seconds."""
WHOLE_SECONDS: Final = 6 * 3600.0
"""The longest time for a whole body, in seconds."""


class UploadTooSlow(ApiError):
    """The body did not arrive in time."""

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
        """Store a body under its SHA-256, and return False if the namespace already had it.

        Nothing is kept of a body that is not accepted.

        Raises:
            Invalid: The body has another SHA-256.
            BlobTooLarge: The body is longer than the limit for one upload.
            BlobsFull, QueueFull: The namespace has reached its limits, or too many uploads are running.
            UploadTooSlow: Too little arrived in time.
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
                # This also runs if the caller has gone. If the process is killed, the sweep removes the
                # upload.
                await asyncio.shield(write(partial(blobs.give_up, blob_id=blob_id), durable=False))

    async def _store(self, blob_id: int, namespace: str, body: AsyncIterator[bytes]) -> str:
        """Store the pieces of the body, and return its SHA-256."""
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
            # The last commit, which is durable, makes the commits before it durable, too.
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
        """Yield the bytes of an upload for a job that names it.

        Raises:
            Invalid: The namespace has no such upload.
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
        """Stop the threads."""
        self._packers.shutdown()

    async def remove_unneeded(self) -> None:
        """Remove uploads that were given up, and those that no job holds and that were not used lately."""
        expire = partial(blobs.expire, kept_seconds=self._limits.kept_seconds)
        await self._database.write(expire, durable=False)
        while await self._database.write(blobs.remove_some, durable=False):
            pass
