"""Cursors that readers of a job's results acknowledge, each under a name, so that they can resume there.

A cursor only moves forward, unless its reader asks to rewind it, and a reader may say which cursor it expects
to replace. A trainer that was thought dead and comes back therefore never undoes what its successor did.

A cursor that is acknowledged, or sent with a request, shows that all results before it were read. A trainer
that never reads is noticed by the number of unread results of its stream.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.core import cursors as texts
from rollyard_api.core.conditions import timestamp
from rollyard_api.core.cursors import Kind
from rollyard_api.core.problems import Conflict, NotFound
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import cursors, rollouts

KINDS: Final[tuple[texts.Kind, ...]] = ("trajectories", "groups")
MAX_CURSORS: Final = 64
"""The most cursors that are kept for one job."""
_ONE: Final = sa.select(cursors).where(
    cursors.c.job_id == bindparam("b_job"), cursors.c.name == bindparam("b_name")
)
_UNSCORED: Final = sa.select(sa.func.count()).where(
    rollouts.c.job_id == bindparam("b_job"), rollouts.c.unscored_seq.is_not(None)
)
_COUNT: Final = sa.select(sa.func.count()).where(cursors.c.job_id == bindparam("b_job"))


def listed(conn: Connection, namespace: str, job_name: str) -> list[dict[str, Any]]:
    """Return the acknowledged cursors of a job, ordered by name."""
    job = job_rows.find(conn, namespace, job_name)
    query = sa.select(cursors).where(cursors.c.job_id == job.id).order_by(cursors.c.name)
    return [_document(job, row) for row in conn.execute(query)]


def one(conn: Connection, namespace: str, job_name: str, name: str) -> dict[str, Any]:
    """Return one acknowledged cursor of a job.

    Raises:
        NotFound: There is no such job, or nothing was acknowledged under this name.
    """
    job = job_rows.find(conn, namespace, job_name)
    row = conn.execute(_ONE, {"b_job": job.id, "b_name": name}).one_or_none()
    if row is None:
        raise _missing(job, name)
    return _document(job, row)


def acknowledge(
    tx: Transaction,
    namespace: str,
    job_name: str,
    name: str,
    cursor: str,
    expected: str | None,
    *,
    rewind: bool,
) -> dict[str, Any]:
    """Keep a cursor under a name. The cursor that is kept already changes nothing.

    Args:
        tx: The transaction.
        namespace: The namespace of the job.
        job_name: The name of the job.
        name: The name of the cursor.
        cursor: A cursor of the job's trajectories or groups.
        expected: The cursor that is to be replaced, "" for none, or None for any.
        rewind: Whether the cursor may move backwards.

    Returns:
        The cursor that is kept now.

    Raises:
        NotFound: There is no such job.
        Malformed: The text is not such a cursor.
        Gone: The cursor belongs to another job with this name.
        Conflict: The cursor lies past the end, would move backwards, is of another kind than the one that is
            kept, or does not replace the expected one, or the job has MAX_CURSORS cursors.
    """
    job = job_rows.find_locked(tx, namespace, job_name)
    kind, position = _parsed(job, cursor, "cursor")
    row = tx.conn.execute(_ONE, {"b_job": job.id, "b_name": name}).one_or_none()
    if row is not None:
        if row.kind != kind:
            raise Conflict(
                f"cursor: {name!r} of RolloutJob {job.name!r} is a cursor of {row.kind}, not of {kind}; "
                "delete it first or choose another name",
                reason="CursorKindDiffers",
            )
        if row.position == position:
            return _document(job, row)
    _check_expected(job, name, row, expected)
    values = {"kind": kind, "position": position, "moved_at": tx.now}
    if row is None:
        if tx.conn.execute(_COUNT, {"b_job": job.id}).scalar_one() >= MAX_CURSORS:
            raise Conflict(
                f"RolloutJob {job.name!r} has {MAX_CURSORS} acknowledged cursors, which is the most; delete "
                "one that nobody resumes from",
                reason="TooManyCursors",
            )
        tx.conn.execute(sa.insert(cursors).values(job_id=job.id, name=name, **values))
    else:
        if position < row.position and not rewind:
            raise Conflict(
                f"cursor: {name!r} of RolloutJob {job.name!r} has {row.position} {kind} behind it and "
                f"would move back to {position}; give rewind: true if that is meant",
                reason="CursorBehind",
            )
        where = (cursors.c.job_id == job.id, cursors.c.name == name)
        tx.conn.execute(sa.update(cursors).where(*where).values(**values))
    job_rows.note_read(tx, job.id, kind, position)
    return one(tx.conn, namespace, job_name, name)


def forget(tx: Transaction, namespace: str, job_name: str, name: str) -> None:
    """Remove a cursor of a job.

    Raises:
        NotFound: There is no such job, or nothing was acknowledged under this name.
    """
    job = job_rows.find_locked(tx, namespace, job_name)
    where = (cursors.c.job_id == job.id, cursors.c.name == name)
    if not tx.conn.execute(sa.delete(cursors).where(*where)).rowcount:
        raise _missing(job, name)


def forget_all(tx: Transaction, job_id: int) -> None:
    """Remove the cursors of a deleted job."""
    tx.conn.execute(sa.delete(cursors).where(cursors.c.job_id == job_id))


def _parsed(job: JobRow, cursor: str, parameter: str) -> tuple[texts.Kind, int]:
    """Return the kind and the position of a cursor of this job's results."""
    kind = texts.kind_of(cursor, KINDS, parameter)
    end = end_of(job, kind)
    return kind, texts.number(cursor, kind, uid=job.uid, job=job.name, end=end, parameter=parameter)


def _check_expected(job: JobRow, name: str, row: Any, expected: str | None) -> None:
    """Check that a cursor is still where its reader left it."""
    if expected is None:
        return
    required = None if not expected else _parsed(job, expected, "expected")
    if required != (None if row is None else (row.kind, row.position)):
        current = "none" if row is None else _document(job, row)["cursor"]
        raise Conflict(
            f"expected: the cursor {name!r} of RolloutJob {job.name!r} is {current}, "
            f"not {expected or 'none'}: another reader has moved it; read it again, or let only one reader "
            "use this name",
            reason="CursorMoved",
        )


def _missing(job: JobRow, name: str) -> NotFound:
    return NotFound(
        f"nobody has acknowledged a cursor {name!r} of RolloutJob {job.name!r}", reason="CursorNotFound"
    )


def _document(job: JobRow, row: Any) -> dict[str, Any]:
    return {
        "name": row.name,
        "kind": row.kind,
        "cursor": texts.text(row.kind, job.uid, row.position),
        "movedAt": timestamp(row.moved_at),
    }


_PARTS: Final = 16
"""A cursor is noted when it is ahead by this fraction of the bound, so that few pages cause a write."""


def is_ahead(job: JobRow, kind: Kind, position: int, bound: int) -> bool:
    """Return whether a cursor is far enough ahead of the noted one to be noted.

    Args:
        job: The job, as it was last read.
        kind: The kind of the cursor.
        position: The number of results before it.
        bound: The bound on unread results.
    """
    if kind not in KINDS:
        return False
    noted = job.read_groups if kind == "groups" else job.read_trajectories
    return position - noted >= max(1, bound // _PARTS)


def end_of(job: JobRow, kind: Kind) -> int:
    """Return the place of the job's newest result of this kind, beyond which no cursor may lie."""
    if kind == "unscored":
        return job.unscored
    return job.groups_ended if kind == "groups" else job.ended


def check_unread(conn: Connection, job: JobRow, bound: int) -> None:
    """Refuse further rollouts of a stream while too many of its results are unread or have no reward.

    Args:
        conn: The database.
        job: The job.
        bound: The bound on unread rollouts.

    Raises:
        Conflict: The bound is reached.
    """
    waiting = conn.execute(_UNSCORED, {"b_job": job.id}).scalar_one() if job.unscored else 0
    if waiting >= bound:
        raise Conflict(
            f"RolloutJob {job.name!r} has {waiting} rollouts that wait for the trainer's rewards, and "
            f"{bound} is the most: hand rewards in (client.rewards, POST …/rewards), and then repeat this "
            "call",
            reason="RewardsAwaited",
        )
    # A trainer reads trajectories or groups, but seldom both.
    unread = min(job.ended - job.read_trajectories, (job.groups_ended - job.read_groups) * job.limits.samples)
    if unread >= bound:
        raise Conflict(
            f"RolloutJob {job.name!r} has about {unread} ended rollouts that nobody has read, and {bound} is "
            "the most: they are in the trajectory store; read them with a cursor, or acknowledge one, and "
            "then repeat this call",
            reason="ResultsUnread",
        )
