"""The offers of jobs to ready workers, each of which is handed out once.

A driver offers a job to one ready worker. The worker fetches its assignment with a token that can do nothing
else. The row of an offer is kept after that, because it shows that the token is spent. An offer holds no
token: the job's token is made when the assignment is handed out. Whether the job still exists is decided at
that moment, and a job that has ended or was deleted thereby withdraws its offers.
"""

from __future__ import annotations

import time
from typing import Final, Literal

import sqlalchemy as sa
from rollyard_crds.workers import AssignmentOffer
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import dumps, loads
from rollyard_api.core.problems import Conflict, NotFound
from rollyard_api.core.wakeups import ready_topic
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import assignments, jobs
from rollyard_api.storage.statements import by_dialect

KEPT_SECONDS: Final = 7 * 86400.0
"""An offer is kept for at least this many seconds, and as long as its job has a row."""

Refusal = Literal["taken", "withdrawn"]

_INSERT: Final = by_dialect(
    lambda insert: insert(assignments).on_conflict_do_nothing(
        index_elements=[assignments.c.namespace, assignments.c.worker]
    )
)


def offer(tx: Transaction, request: AssignmentOffer) -> bool:
    """Offer a job to a ready worker, and return whether the worker has fetched it already.

    Raises:
        NotFound: There is no such job.
        Conflict: The job has ended, or the worker was offered another job.
    """
    job = job_rows.named(tx.conn, request.namespace, request.job)
    if job is None or request.uid not in (job.uid, job.object_uid):
        raise NotFound(
            f"there is no RolloutJob {request.job!r} with uid {request.uid!r} "
            f"in namespace {request.namespace!r}",
            reason="JobNotFound",
        )
    if job.finished_at is not None:
        raise Conflict(f"RolloutJob {request.job!r} has ended and needs no worker", reason="JobEnded")
    values = {
        "namespace": request.namespace,
        "worker": request.worker,
        "job_id": job.id,
        "arguments": dumps(list(request.arguments)),
        "offered_at": tx.now,
        "taken_at": None,
    }
    tx.conn.execute(_INSERT[tx.sqlite], values)
    there = tx.conn.execute(
        sa.select(assignments.c.job_id, assignments.c.taken_at).where(
            *_key(request.namespace, request.worker)
        )
    ).one()
    if there.job_id != job.id:
        raise Conflict(
            f"the ready worker {request.worker!r} was offered another job before; it serves one job only",
            reason="AlreadyAssigned",
        )
    tx.wake(ready_topic(request.namespace, request.worker))
    return there.taken_at is not None


def is_offered(conn: Connection, namespace: str, worker: str) -> bool:
    """Return whether a job was ever offered to this ready worker."""
    query = sa.select(assignments.c.job_id).where(*_key(namespace, worker))
    return conn.execute(query).first() is not None


def take(tx: Transaction, namespace: str, worker: str) -> tuple[JobRow, list[str]] | Refusal:
    """Hand out the assignment of a ready worker, which must have been offered one.

    Returns:
        The job and the worker's arguments; `taken` if they were handed out before; `withdrawn` if the job has
        ended or was deleted. The worker's token is spent in each case.
    """
    here = _key(namespace, worker)
    columns = (assignments.c.job_id, assignments.c.arguments, assignments.c.taken_at)
    row = tx.conn.execute(sa.select(*columns).where(*here).with_for_update()).one()
    if row.taken_at is not None:
        return "taken"
    tx.conn.execute(sa.update(assignments).where(*here).values(taken_at=tx.now))
    job = job_rows.by_id(tx.conn, row.job_id)
    if job is None or job.deleted_at is not None or job.finished_at is not None:
        return "withdrawn"
    return job, loads(row.arguments)


def _key(namespace: str, worker: str) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return assignments.c.namespace == namespace, assignments.c.worker == worker


def _old(before: float) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return assignments.c.offered_at < before, ~sa.exists().where(jobs.c.id == assignments.c.job_id)


def has_old(conn: Connection) -> bool:
    """Return whether `forget_old` would remove any offer."""
    query = sa.select(assignments.c.worker).where(*_old(time.time() - KEPT_SECONDS)).limit(1)
    return conn.execute(query).first() is not None


def forget_old(tx: Transaction) -> None:
    """Remove the offers that are older than KEPT_SECONDS and whose jobs have no row any more."""
    tx.conn.execute(sa.delete(assignments).where(*_old(tx.now - KEPT_SECONDS)))
