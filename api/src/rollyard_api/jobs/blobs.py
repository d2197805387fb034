"""Uploads of a namespace: task files that are too large for a manifest, named by their SHA-256.

Uploads are stored in the database, in pieces. Every replica of the control plane therefore sees them, and an
upload appears as a whole or not at all. The control plane itself compresses each piece. A job holds the
upload that it names until the job's own rows are removed. An upload that no job holds is removed after some
time. An upload is received and read back piece by piece, and is never whole in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core.limits import Limit
from rollyard_api.core.problems import (
    RETRY_AFTER,
    ApiError,
    Invalid,
    LimitReached,
    NotFound,
    TooLarge,
)
from rollyard_api.jobs.allow_lists import FIELD
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.rows import BlobRow, read_one
from rollyard_api.storage.schema import blob_pieces, blobs, jobs

PIECE_BYTES: Final = 256 << 10
AT_ONCE: Final = 4
"""The largest number of uploads to one namespace at the same time."""
PACKERS: Final = 2
"""The number of threads that compress."""
SILENT_SECONDS: Final = 60.0
"""The longest time between two parts of a body, in seconds."""
WHOLE_SECONDS: Final = 6 * 3600.0
"""The longest time for a whole body, in seconds."""
UPLOAD_SILENT_SECONDS: Final = 600.0
"""The time in seconds after which an unfinished upload without a new piece counts as abandoned."""
_REMOVED_AT_ONCE: Final = 64
"""The number of pieces that are removed in one transaction. Other requests run between two transactions."""


@dataclass(frozen=True, slots=True)
class BlobLimits:
    """The limits on uploads."""

    blob_bytes: int = 1 << 30
    """The largest size of one upload, in bytes."""
    namespace_bytes: int = 4 << 30
    """The largest size of all uploads of a namespace together, in bytes, including unfinished ones."""
    namespace_count: int = 1000
    """The largest number of uploads of a namespace, including unfinished ones."""
    kept_seconds: float = 3600.0
    """The number of seconds for which an upload that no job holds is kept."""


def missing_of_job(sha256: str) -> ApiError:
    """Return the error for a job that names an upload that the namespace does not have."""
    return Invalid.of(
        f"{FIELD}: this namespace has no upload sha256:{sha256}; upload the file first", reason="BlobNotFound"
    )


def _is_upload(namespace: str, sha256: str) -> sa.ColumnElement[bool]:
    return sa.and_(blobs.c.namespace == namespace, blobs.c.sha256 == sha256, blobs.c.complete.is_(True))


def find(conn: Connection, namespace: str, sha256: str) -> BlobRow | None:
    """Return the row of an upload, or None if the namespace has no upload with this content."""
    query = sa.select(blobs).where(_is_upload(namespace, sha256))
    return read_one(BlobRow, conn.execute(query).one_or_none())


def touch(tx: Transaction, namespace: str, sha256: str) -> BlobRow | None:
    """Return what `find` returns, and restart the time for which an upload that no job holds is kept.

    The row of the upload is locked until the commit.
    """
    touched = sa.update(blobs).where(_is_upload(namespace, sha256)).values(touched_at=tx.now)
    return read_one(BlobRow, tx.conn.execute(touched.returning(blobs)).one_or_none())


def piece(conn: Connection, blob_id: int, no: int) -> bytes | None:
    """Return a piece of an upload, decompressed, or None past the last piece."""
    packed = conn.execute(
        sa.select(blob_pieces.c.data).where(blob_pieces.c.blob_id == blob_id, blob_pieces.c.no == no)
    ).scalar_one_or_none()
    return None if packed is None else zlib.decompress(packed)


def begin(tx: Transaction, namespace: str, sha256: str, limits: BlobLimits) -> int:
    """Begin an upload, which is not visible until it is complete, and return its id.

    Raises:
        LimitReached: The namespace has reached its limit of uploads or of bytes.
    """
    times = {"created_at": tx.now, "touched_at": tx.now}
    new = sa.insert(blobs).values(
        namespace=namespace, sha256=sha256, size=0, pieces=0, complete=False, **times
    )
    blob_id: int = tx.conn.execute(new.returning(blobs.c.id)).scalar_one()
    _refuse_full(tx, namespace, limits)
    return blob_id


def _refuse_full(tx: Transaction, namespace: str, limits: BlobLimits) -> None:
    sums = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(blobs.c.size), 0))
    count, size = tx.conn.execute(sums.where(blobs.c.namespace == namespace)).one()
    if count > limits.namespace_count or size > limits.namespace_bytes:
        raise LimitReached(
            f"namespace {namespace!r} would hold {count} uploads of {size} bytes, and may hold "
            f"{limits.namespace_count} of {limits.namespace_bytes} bytes; delete jobs that use them, "
            f"or wait: those that no job uses are removed after {limits.kept_seconds:g} seconds",
            reason="BlobsFull",
            headers={"Retry-After": "60"},
        )


def add_piece(
    tx: Transaction, blob_id: int, namespace: str, no: int, packed: bytes, size: int, limits: BlobLimits
) -> None:
    """Add the next piece.

    Args:
        packed: The piece as `pack` returns it.
        size: The number of bytes of the piece before compression.

    Raises:
        LimitReached: The namespace has reached its limit of bytes.
        NotFound: The pause between two pieces was so long that the upload was removed.
    """
    counted = tx.conn.execute(
        sa.update(blobs)
        .where(blobs.c.id == blob_id, blobs.c.complete.is_(False), blobs.c.pieces == no)
        .values(size=blobs.c.size + size, pieces=no + 1, touched_at=tx.now)
    )
    if not counted.rowcount:
        raise NotFound("the upload was given up; begin it again", reason="BlobNotFound")
    _refuse_full(tx, namespace, limits)
    tx.conn.execute(sa.insert(blob_pieces).values(blob_id=blob_id, no=no, data=packed))


def pack(data: bytes) -> bytes:
    """Return a piece in its stored form."""
    return zlib.compress(data, 1)


def complete(tx: Transaction, blob_id: int, namespace: str, sha256: str) -> bool:
    """Make an upload visible once all its pieces are stored and have this SHA-256.

    Returns:
        False if the namespace already had this content; the new upload is then given up.
    """
    if touch(tx, namespace, sha256) is not None:
        give_up(tx, blob_id)
        return False
    values = {"complete": True, "touched_at": tx.now}
    tx.conn.execute(sa.update(blobs).where(blobs.c.id == blob_id).values(values))
    return True


def give_up(tx: Transaction, blob_id: int) -> None:
    """Make an upload invisible; `remove_some` removes it."""
    tx.conn.execute(sa.update(blobs).where(blobs.c.id == blob_id).values(complete=False, touched_at=0.0))


def hold(tx: Transaction, namespace: str, sha256: str) -> int:
    """Return the id of an upload that a new job is to hold, locked against removal until the commit.

    Raises:
        Invalid: The namespace has no upload with this content.
    """
    row = touch(tx, namespace, sha256)
    if row is None:
        raise missing_of_job(sha256)
    return row.id


def let_go(tx: Transaction, blob_id: int) -> None:
    """Release an upload when a job that held it is removed; it is given up if no other job holds it."""
    # The row is locked before the search for other jobs. A job that is being created at this moment is either
    # found by the search or does not find the upload.
    tx.conn.execute(sa.select(blobs.c.id).where(blobs.c.id == blob_id).with_for_update())
    if tx.conn.execute(sa.select(jobs.c.id).where(jobs.c.blob_id == blob_id).limit(1)).first() is None:
        give_up(tx, blob_id)


def expire(tx: Transaction, kept_seconds: float) -> None:
    """Give up the uploads that no job holds and that were last used more than `kept_seconds` ago."""
    used = sa.exists().where(jobs.c.blob_id == blobs.c.id)
    tx.conn.execute(
        sa.update(blobs)
        .where(blobs.c.complete.is_(True), blobs.c.touched_at < tx.now - kept_seconds, sa.not_(used))
        .values(complete=False, touched_at=0.0)
    )


def remove_some(tx: Transaction) -> bool:
    """Remove some pieces of one upload that was given up, and its row last; return False if there is none."""
    old = sa.select(blobs.c.id).where(
        blobs.c.complete.is_(False), blobs.c.touched_at < tx.now - UPLOAD_SILENT_SECONDS
    )
    blob_id = tx.conn.execute(old.order_by(blobs.c.id).limit(1)).scalar_one_or_none()
    if blob_id is None:
        return False
    numbers = sa.select(blob_pieces.c.no).where(blob_pieces.c.blob_id == blob_id).limit(_REMOVED_AT_ONCE)
    pieces = sa.delete(blob_pieces).where(blob_pieces.c.blob_id == blob_id, blob_pieces.c.no.in_(numbers))
    if tx.conn.execute(pieces).rowcount < _REMOVED_AT_ONCE:
        tx.conn.execute(sa.delete(blobs).where(blobs.c.id == blob_id))
    return True


def _busy(namespace: str | None, most: int) -> ApiError:
    text = f"{most} uploads to namespace {namespace!r} run, and no more may at once"
    return LimitReached(text, reason="UploadsBusy", headers=RETRY_AFTER)


class Uploads:
    """The uploads of all namespaces."""

    def __init__(self, database: Database, limits: BlobLimits) -> None:
        self._database = database
        self._limits = limits
        self._running = Limit("uploads", each=AT_ONCE, refusal=_busy)
        self._packers = ThreadPoolExecutor(PACKERS, thread_name_prefix="uploads")

    async def take(self, namespace: str, sha256: str, body: AsyncIterator[bytes]) -> bool:
        """Store a body under its SHA-256, and return False if the namespace already had it.

        Nothing is kept of a body that is not accepted.

        Raises:
            Invalid: The body has another SHA-256.
            TooLarge: The body is longer than the limit for one upload.
            LimitReached: The namespace has reached its limits, or too many uploads are running.
            ApiError: Too little arrived in time.
        """
        with self._running.held(namespace):
            try:
                async with asyncio.timeout(WHOLE_SECONDS):
                    return await self._take(namespace, sha256, body)
            except TimeoutError as error:
                raise ApiError(
                    f"nothing of the body came for {SILENT_SECONDS:g} seconds, or not all of it within "
                    f"{WHOLE_SECONDS:g}",
                    status=408,
                    reason="UploadTooSlow",
                ) from error

    async def _take(self, namespace: str, sha256: str, body: AsyncIterator[bytes]) -> bool:
        write, limits = self._database.write, self._limits
        loop, digest, no = asyncio.get_running_loop(), hashlib.sha256(), 0
        blob_id = await write(partial(begin, namespace=namespace, sha256=sha256, limits=limits))
        try:
            add = partial(add_piece, blob_id=blob_id, namespace=namespace, limits=limits)
            async with aclosing(self._cut(body)) as cut:
                async for data in cut:
                    digest.update(data)
                    packed = await loop.run_in_executor(self._packers, pack, data)
                    # The last commit is durable, and makes the commits before it durable as well.
                    await write(partial(add, no=no, packed=packed, size=len(data)), durable=False)
                    no += 1
            if digest.hexdigest() != sha256:
                problem = f"the body's SHA-256 is {digest.hexdigest()}, not {sha256}"
                raise Invalid.of(problem, reason="BlobHashMismatch")
            return await write(partial(complete, blob_id=blob_id, namespace=namespace, sha256=sha256))
        except BaseException:
            # This also runs if the caller has gone. If the process is killed, the sweep removes the upload.
            await asyncio.shield(write(partial(give_up, blob_id=blob_id), durable=False))
            raise

    async def _cut(self, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield a body in pieces of PIECE_BYTES."""
        waiting, total = bytearray(), 0
        while True:
            async with asyncio.timeout(SILENT_SECONDS):
                part = await anext(body, None)
            if part is None:
                break
            total += len(part)
            if total > self._limits.blob_bytes:
                text = f"the upload is longer than {self._limits.blob_bytes} bytes"
                raise TooLarge(text, reason="BlobTooLarge")
            waiting += part
            while len(waiting) >= PIECE_BYTES:
                yield bytes(waiting[:PIECE_BYTES])
                del waiting[:PIECE_BYTES]
        if waiting:
            yield bytes(waiting)

    async def pieces(self, namespace: str, sha256: str) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of an upload for a job that names it.

        Raises:
            Invalid: The namespace has no such upload.
        """
        row = await self._database.read(partial(find, namespace=namespace, sha256=sha256))
        if row is None:
            raise missing_of_job(sha256)
        for no in range(row.pieces):
            data = await self._database.read(partial(piece, blob_id=row.id, no=no))
            if data is None:
                raise missing_of_job(sha256)
            yield data

    def close(self) -> None:
        """Stop the threads."""
        self._packers.shutdown()

    async def remove_unneeded(self) -> None:
        """Remove uploads that were given up, and those that no job holds and that were not used lately."""
        over = partial(expire, kept_seconds=self._limits.kept_seconds)
        await self._database.write(over, durable=False)
        while await self._database.write(remove_some, durable=False):
            pass
