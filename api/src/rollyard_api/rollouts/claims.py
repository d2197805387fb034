"""Sandbox claims, which workers file, a driver fulfils, and this module releases once they are unneeded.

A claim is needed while the Init or Eval lease under which it was filed is held. A claim of an Init lease is
also needed afterwards, while its sandbox belongs to its unfinished rollout. A claim of an Eval lease, which
is for a fresh sandbox to evaluate in, ends with its lease. Whether a claim is needed follows from the
rollout's row alone, and a claim that is no longer needed is never needed again. The code that ends or moves a
rollout therefore does not have to know of claims, and a crash between the two steps loses nothing. A released
claim is kept until the driver reports that nothing of its sandbox is left.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import orjson
import sqlalchemy as sa
from rollyard_crds.claims import ClaimRequest, ClaimStatus
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import loads, revision_of
from rollyard_api.core.limits import Quota
from rollyard_api.core.problems import Conflict, Invalid, NotFound
from rollyard_api.core.wakeups import CLAIMS, claim_topic
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import ClaimRow, read_all, read_one
from rollyard_api.storage.schema import claims, jobs, rollouts
from rollyard_api.storage.statements import by_dialect

PENDING, BOUND, FAILED, RELEASED = "Pending", "Bound", "Failed", "Released"

_ADDRESS: Final = re.compile(r"tcp://[^\s/]+:[0-9]{1,5}")
# The columns that the REST form of a claim shows as they are.
_SHOWN: Final = ("id", "namespace", "job", "job_uid", "state", "address", "secret", "reason", "message")
_FILING: Final = (RolloutState.LEASED_INIT, RolloutState.LEASED_EVAL)
_KEPT_FOR_EVAL: Final = 8
"""One in this many claims is reserved for Eval, because sandboxes that wait for Eval could otherwise use them
all up."""
_NEEDED: Final = sa.exists().where(
    rollouts.c.id == claims.c.rollout_id,
    sa.or_(
        sa.and_(rollouts.c.sandbox_id == claims.c.id, rollouts.c.state < RolloutState.SUCCEEDED),
        sa.and_(rollouts.c.state.in_(_FILING), rollouts.c.token == claims.c.token),
    ),
)
_HOLDER: Final = (
    sa.select(rollouts.c.state, rollouts.c.token, jobs.c.namespace, jobs.c.name, jobs.c.uid)
    .join_from(rollouts, jobs, jobs.c.id == rollouts.c.job_id)
    .where(rollouts.c.id == bindparam("b_rollout"))
)
_FILED: Final = sa.select(claims).where(
    claims.c.rollout_id == bindparam("b_rollout"), claims.c.token == bindparam("b_token")
)
_COUNT: Final = sa.select(
    sa.func.count(),
    sa.func.coalesce(sa.func.sum(sa.case((claims.c.namespace == bindparam("b_namespace"), 1), else_=0)), 0),
).select_from(claims)
_INSERT: Final = by_dialect(
    lambda insert: insert(claims).on_conflict_do_nothing(index_elements=[claims.c.rollout_id, claims.c.token])
)
_FORGET: Final = sa.delete(claims).where(claims.c.removed, sa.not_(_NEEDED)).returning(claims.c.id)
_RELEASE: Final = (
    sa.update(claims)
    .where(claims.c.state != RELEASED, sa.not_(claims.c.removed), sa.not_(_NEEDED))
    .values(state=RELEASED, secret="")
    .returning(claims.c.id)
)


def _changed(tx: Transaction, ids: Sequence[str]) -> None:
    if ids:
        tx.wake(CLAIMS, *map(claim_topic, ids))


def _write(tx: Transaction, claim: str, **values: Any) -> ClaimRow:
    row = tx.conn.execute(
        sa.update(claims).where(claims.c.id == claim).values(**values).returning(claims)
    ).one()
    _changed(tx, [claim])
    return ClaimRow(*row)


def file(tx: Transaction, request: ClaimRequest, quota: Quota) -> ClaimRow:
    """Return the row of the claim of this rollout and token, and make the claim if there is none yet.

    Raises:
        NotFound: There is no such rollout.
        Conflict: Its Init or Eval lease is not held with this token, or it has a claim of another shape.
        LimitReached: There is no room for another claim, or none in seven eighths of it for an Init lease.
    """
    holder = tx.conn.execute(_HOLDER, {"b_rollout": request.rollout}).one_or_none()
    if holder is None:
        raise NotFound(f"there is no rollout {request.rollout!r}", reason="RolloutNotFound")
    if holder.state not in _FILING or holder.token != request.token:
        raise lease_lost(request)
    key = {"b_rollout": request.rollout, "b_token": request.token}
    shape = orjson.dumps(request.shape.model_dump(), option=orjson.OPT_SORT_KEYS)
    row = tx.conn.execute(_FILED, key).one_or_none()
    if row is None:
        total, own = tx.conn.execute(_COUNT, {"b_namespace": holder.namespace}).one()
        bounds = quota.without(_KEPT_FOR_EVAL) if holder.state == RolloutState.LEASED_INIT else quota
        counted = "claims whose sandboxes a driver has not removed"
        bounds.check(counted, holder.namespace, total=total, own=int(own), adding=1, retry_after=2)
        values = {
            "id": f"c{secrets.token_hex(10)}",
            "rollout_id": request.rollout,
            "token": request.token,
            "namespace": holder.namespace,
            "job": holder.name,
            "job_uid": holder.uid,
            "shape": shape,
            "created_at": tx.now,
        }
        # Another replica may file the claim at this moment. In that case its row is the answer.
        tx.conn.execute(_INSERT[tx.sqlite], values)
        row = tx.conn.execute(_FILED, key).one()
        _changed(tx, [row.id])
    if loads(row.shape) != loads(shape):
        raise Conflict(
            f"the lease of {request.rollout!r} with token {request.token} has a claim of another shape",
            reason="AlreadyExists",
        )
    return ClaimRow(*row)


def lease_lost(request: ClaimRequest) -> Conflict:
    """Return the error for a claim whose lease is not held."""
    return Conflict(
        f"no Init or Eval lease of {request.rollout!r} with token {request.token} is held", reason="LeaseLost"
    )


def find(conn: Connection, claim: str, *, lock: bool = False) -> ClaimRow | None:
    """Return the claim's row, or None if there is no such claim; `lock` locks it until the commit."""
    query = sa.select(claims).where(claims.c.id == claim)
    rows = conn.execute(query.with_for_update() if lock else query)
    return read_one(ClaimRow, rows.one_or_none())


def unknown(claim: str) -> NotFound:
    """Return the error for a claim that does not exist or no longer exists."""
    return NotFound(f"there is no claim {claim!r}", reason="ClaimNotFound")


def release(tx: Transaction, claim: str) -> None:
    """Release a claim for which its worker has no use. A released or unknown claim stays as it is."""
    row = find(tx.conn, claim, lock=True)
    if row is None or row.state == RELEASED:
        return
    if row.removed:
        _forget(tx, claim)
    else:
        _write(tx, claim, state=RELEASED, secret="")


def _forget(tx: Transaction, claim: str) -> None:
    tx.conn.execute(sa.delete(claims).where(claims.c.id == claim))
    _changed(tx, [claim])


def release_unneeded(tx: Transaction) -> int:
    """Release every claim that no rollout needs, and return the number of claims that were released."""
    forgotten = list(tx.conn.scalars(_FORGET))
    released = list(tx.conn.scalars(_RELEASE))
    _changed(tx, forgotten + released)
    return len(forgotten) + len(released)


def check_status(status: ClaimStatus) -> None:
    """Check that a driver's report has the fields that its state requires.

    Raises:
        Invalid: A field is missing or wrong; `errors` names each of them.
    """
    problems = []
    if status.state == BOUND:
        if not _ADDRESS.fullmatch(status.address):
            problems.append(f"address: must be tcp://HOST:PORT with 'state: Bound' (got {status.address!r})")
        if not status.secret:
            problems.append("secret: is required with 'state: Bound'")
    if status.state == FAILED and not status.reason:
        problems.append("reason: is required with 'state: Failed', a CamelCase word such as 'QuotaExceeded'")
    if problems:
        raise Invalid.of(*problems)


def report(tx: Transaction, claim: str, status: ClaimStatus) -> ClaimRow | None:
    """Apply a driver's report, and return the claim's row after it, or None if the report is `Removed`.

    Only a Pending claim becomes Bound, and only a Pending or Bound claim becomes Failed. Any other report
    changes nothing, and the returned row shows the state of the claim.

    Raises:
        NotFound: There is no such claim, and the report is not `Removed`.
    """
    row = find(tx.conn, claim, lock=True)
    if status.state == "Removed":
        if row is not None:
            _removed(tx, row)
        return None
    if row is None:
        raise unknown(claim)
    if status.state == BOUND and row.state == PENDING:
        tx.count("claim_seconds", value=max(0.0, tx.now - row.created_at))
        return _write(tx, claim, state=BOUND, address=status.address, secret=status.secret)
    if status.state == FAILED and row.state in (PENDING, BOUND):
        return _fail(tx, row, status, removed=False)
    return row


def _fail(tx: Transaction, row: ClaimRow, status: ClaimStatus, *, removed: bool) -> ClaimRow:
    tx.count("claim_failures", status.reason)
    return _write(
        tx,
        row.id,
        state=FAILED,
        removed=removed,
        address="",
        secret="",
        reason=status.reason,
        message=status.message,
        retryable=status.retryable,
    )


def _removed(tx: Transaction, row: ClaimRow) -> None:
    """Record that nothing is left of a claim's sandbox. The claim stays Failed while its worker may ask."""
    if row.state == RELEASED:
        _forget(tx, row.id)
    elif row.state == FAILED:
        if not row.removed:
            _write(tx, row.id, removed=True)
    else:
        message = "the driver removed the sandbox before the claim was released"
        failure = ClaimStatus(state="Failed", reason="SandboxRemoved", message=message)
        _fail(tx, row, failure, removed=True)


def document(row: ClaimRow, now: float) -> dict[str, Any]:
    """Return the REST form of a claim from its row; `now` is the time from which its age is computed."""
    return {name: getattr(row, name) for name in _SHOWN} | {
        "rollout": row.rollout_id,
        "shape": orjson.Fragment(row.shape),
        "retryable": bool(row.retryable),
        "age_seconds": round(max(0.0, now - row.created_at), 3),
    }


def listed(conn: Connection, namespace: str | None) -> dict[str, Any]:
    """Return a ClaimList: the claims that drivers handle, oldest first, and the sandboxes to keep warm.

    The revision is a digest of the list's content without the ages. Every replica therefore gives the same
    list the same revision, even after a restart, and gives a different list a different revision.
    """
    query = sa.select(claims).where(sa.not_(claims.c.removed)).order_by(claims.c.created_at, claims.c.id)
    if namespace is not None:
        query = query.where(claims.c.namespace == namespace)
    rows = read_all(ClaimRow, conn.execute(query))
    warm = _warm(conn, namespace)
    shown = [[row.id, row.state, row.address, row.reason] for row in rows]
    now = time.time()
    return {
        "revision": revision_of([shown, warm]),
        "claims": [document(row, now) for row in rows],
        "warm": warm,
    }


def _warm(conn: Connection, namespace: str | None) -> list[dict[str, Any]]:
    query = sa.select(jobs.c.namespace, jobs.c.name, jobs.c.uid, jobs.c.warm, jobs.c.status).where(
        *job_rows.LEASABLE, jobs.c.object_uid.is_not(None), jobs.c.warm.is_not(None)
    )
    if namespace is not None:
        query = query.where(jobs.c.namespace == namespace)
    return [
        {"namespace": row.namespace, "job": row.name, "job_uid": row.uid, **loads(row.warm)}
        for row in conn.execute(query.order_by(jobs.c.id))
        if _admitted(loads(row.status))
    ]


def _admitted(status: dict[str, Any]) -> bool:
    conditions = status.get("conditions", [])
    return any(c["type"] == "Admitted" and c["status"] == "True" for c in conditions)
