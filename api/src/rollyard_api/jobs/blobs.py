"""Uploads of a namespace are named by their SHA-256. They are task files that are too large for a manifest.

Uploads are stored in the database, in pieces. Every replica of the control plane therefore sees them, and an
upload appears whole or not at all. The control plane itself compresses each piece. A job holds the upload
that it names until the job's own rows are removed. An upload that no job holds is removed after some time.
An upload is received and read back piece by piece, and is never whole in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core.problems import RETRY_AFTER, ApiError, Invalid, NotFound, QueueFull, TooLarge
from rollyard_api.core.quotas import Quota
from rollyard_api.jobs.task_sources import FIELD
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.rows import BlobRow
from rollyard_api.storage.schema import blob_pieces, blobs, jobs

PIECE_BYTES: Final = 256 << 10
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


class BlobsFull(QueueFull):
    """The namespace has reached its limit of uploads or of bytes."""


class BlobTooLarge(TooLarge):
    """The upload is longer than the limit for one upload."""


def missing_of_job(sha256: str) -> ApiError:
    """Return the error for a job that names an upload that the namespace does not have."""
    return Invalid.of(
        f"{FIELD}: this namespace has no upload sha256:{sha256}; upload the file first", reason="BlobNotFound"
    )


def find(conn: Connection, namespace: str, sha256: str, *, lock: bool = False) -> BlobRow:
    """Return the row of an upload; `lock` locks it until the commit.

    Raises:
        NotFound: The namespace has no upload with this content.
    """
    query = sa.select(blobs).where(
        blobs.c.namespace == namespace, blobs.c.sha256 == sha256, blobs.c.complete.is_(True)
    )
    row = conn.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise NotFound(f"this namespace has no upload sha256:{sha256}", reason="BlobNotFound")
    return BlobRow(*row)


def touch(tx: Transaction, namespace: str, sha256: str) -> BlobRow:
    """Return what `find` returns, and restart the time for which an upload that no job holds is kept."""
    row = find(tx.conn, namespace, sha256, lock=True)
    tx.conn.execute(sa.update(blobs).where(blobs.c.id == row.id).values(touched_at=tx.now))
    return row


def piece(conn: Connection, blob_id: int, no: int) -> bytes | None:
    """Return a piece of an upload, decompressed, or None past the last piece."""
    packed = conn.execute(
        sa.select(blob_pieces.c.data).where(blob_pieces.c.blob_id == blob_id, blob_pieces.c.no == no)
    ).scalar_one_or_none()
    return None if packed is None else zlib.decompress(packed)


def begin(tx: Transaction, namespace: str, sha256: str, limits: BlobLimits) -> int:
    """Begin an upload, which is not visible before it is complete, and return its id.

    Raises:
        BlobsFull: The namespace has reached its limit of uploads or of bytes.
    """
    _refuse_full(tx, namespace, limits, adding=1)
    values = {
        "namespace": namespace,
        "sha256": sha256,
        "size": 0,
        "pieces": 0,
        "complete": False,
        "created_at": tx.now,
        "touched_at": tx.now,
    }
    made: int = tx.conn.execute(sa.insert(blobs).values(**values).returning(blobs.c.id)).scalar_one()
    return made


def _refuse_full(tx: Transaction, namespace: str, limits: BlobLimits, *, adding: int) -> None:
    count, size = tx.conn.execute(
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(blobs.c.size), 0)).where(
            blobs.c.namespace == namespace
        )
    ).one()
    if count + adding > limits.namespace_count or size > limits.namespace_bytes:
        raise BlobsFull(
            f"namespace {namespace!r} holds {count} uploads of {size} bytes, and may hold "
            f"{limits.namespace_count} of {limits.namespace_bytes} bytes; delete jobs that use them, "
            f"or wait: those that no job uses are removed after {limits.kept_seconds:g} seconds",
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
        BlobsFull: The namespace has reached its limit of bytes.
        NotFound: The upload took so long between two pieces that it was removed.
    """
    found = tx.conn.execute(
        sa.update(blobs)
        .where(blobs.c.id == blob_id, blobs.c.complete.is_(False), blobs.c.pieces == no)
        .values(size=blobs.c.size + size, pieces=no + 1, touched_at=tx.now)
        .returning(blobs.c.sha256)
    ).scalar_one_or_none()
    if found is None:
        raise NotFound("the upload was given up; begin it again", reason="BlobNotFound")
    _refuse_full(tx, namespace, limits, adding=0)
    tx.conn.execute(sa.insert(blob_pieces).values(blob_id=blob_id, no=no, data=packed))


def pack(data: bytes) -> bytes:
    """Return a piece in its stored form."""
    return zlib.compress(data, 1)


def complete(tx: Transaction, blob_id: int, namespace: str, sha256: str) -> bool:
    """Make an upload visible once all its pieces are stored and have this SHA-256.

    Returns:
        False if the namespace already had this content; the new upload is then given up.
    """
    try:
        touch(tx, namespace, sha256)
    except NotFound:
        values = {"complete": True, "touched_at": tx.now}
        tx.conn.execute(sa.update(blobs).where(blobs.c.id == blob_id).values(values))
        return True
    give_up(tx, blob_id)
    return False


def give_up(tx: Transaction, blob_id: int) -> None:
    """Make an upload invisible; `remove_some` removes it."""
    tx.conn.execute(sa.update(blobs).where(blobs.c.id == blob_id).values(complete=False, touched_at=0.0))


def hold(tx: Transaction, namespace: str, sha256: str) -> int:
    """Return the id of an upload that a new job is to hold, locked against removal until the commit.

    Raises:
        Invalid: The namespace has no upload with this content.
    """
    try:
        return int(touch(tx, namespace, sha256).id)
    except NotFound as error:
        raise missing_of_job(sha256) from error


def let_go(tx: Transaction, blob_id: int) -> None:
    """Release an upload when a job that held it is removed; it is given up if no other job holds it."""
    # The row is locked before the search for other jobs. A job that is being created at this moment is either
    # found by the search or does not find the upload.
    tx.conn.execute(sa.select(blobs.c.id).where(blobs.c.id == blob_id).with_for_update())
    if tx.conn.execute(sa.select(jobs.c.id).where(jobs.c.blob_id == blob_id).limit(1)).first() is None:
        give_up(tx, blob_id)


def expire(tx: Transaction, kept_seconds: float) -> None:
    """Give up the uploads that no job holds and that were last used more than `kept_seconds` ago."""
    held = sa.exists().where(jobs.c.blob_id == blobs.c.id)
    tx.conn.execute(
        sa.update(blobs)
        .where(blobs.c.complete.is_(True), blobs.c.touched_at < tx.now - kept_seconds, sa.not_(held))
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
    numbers = list(
        tx.conn.scalars(
            sa.select(blob_pieces.c.no).where(blob_pieces.c.blob_id == blob_id).limit(_REMOVED_AT_ONCE)
        )
    )
    of_blob = blob_pieces.c.blob_id == blob_id
    tx.conn.execute(sa.delete(blob_pieces).where(of_blob, blob_pieces.c.no.in_(numbers)))
    if len(numbers) < _REMOVED_AT_ONCE:
        tx.conn.execute(sa.delete(blobs).where(blobs.c.id == blob_id))
    return True


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


def _busy(namespace: str | None, most: int) -> ApiError:
    text = f"{most} uploads to namespace {namespace!r} run, and no more may at once"
    return QueueFull(text, reason="UploadsBusy", headers=RETRY_AFTER)


class Uploads:
    """The uploads of all namespaces."""

    def __init__(self, database: Database, limits: BlobLimits) -> None:
        self._database = database
        self._limits = limits
        self._running = Quota("uploads", each=AT_ONCE, refusal=_busy)
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
        with self._running.held(namespace):
            try:
                async with asyncio.timeout(WHOLE_SECONDS):
                    return await self._take(namespace, sha256, body)
            except TimeoutError as error:
                raise UploadTooSlow(
                    f"nothing of the body came for {SILENT_SECONDS:g} seconds, or not all of it within "
                    f"{WHOLE_SECONDS:g}"
                ) from error

    async def _take(self, namespace: str, sha256: str, body: AsyncIterator[bytes]) -> bool:
        write = self._database.write
        blob_id = await write(partial(begin, namespace=namespace, sha256=sha256, limits=self._limits))
        done = False
        try:
            found = await self._store(blob_id, namespace, body)
            if found != sha256:
                raise Invalid.of(f"the body's SHA-256 is {found}, not {sha256}", reason="BlobHashMismatch")
            made = await write(partial(complete, blob_id=blob_id, namespace=namespace, sha256=sha256))
            done = True
            return made
        finally:
            if not done:
                # This also runs if the caller has gone. If the process is killed, the sweep removes the
                # upload.
                await asyncio.shield(write(partial(give_up, blob_id=blob_id), durable=False))

    async def _store(self, blob_id: int, namespace: str, body: AsyncIterator[bytes]) -> str:
        """Store the pieces of the body, and return its SHA-256."""
        digest, waiting, total, no = hashlib.sha256(), bytearray(), 0, 0

        async def put(data: bytes) -> None:
            nonlocal no
            packed = await asyncio.get_running_loop().run_in_executor(self._packers, pack, data)
            size = len(data)
            # The last commit, which is durable, makes the commits before it durable, too.
            await self._database.write(
                lambda tx: add_piece(tx, blob_id, namespace, no, packed, size, self._limits), durable=False
            )
            no += 1

        while True:
            async with asyncio.timeout(SILENT_SECONDS):
                part = await anext(body, None)
            if part is None:
                break
            total += len(part)
            if total > self._limits.blob_bytes:
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
            row = await self._database.read(partial(find, namespace=namespace, sha256=sha256))
        except NotFound as error:
            raise missing_of_job(sha256) from error
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
