"""Rollouts that somebody watches while they run.

Each view marks its rollout as watched for some seconds. The worker learns this from the answer to its
heartbeat, and sends what is new in the conversation with the next ones. What it sent is kept in one small
row, which is removed when the watch ends. Everything is bounded, because neither workers nor viewers are
trusted with memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from rollyard_crds.lease import LiveTurns
from sqlalchemy import bindparam

from rollyard_api.core.codec import dumps, loads, pack, unpack
from rollyard_api.core.problems import Conflict, LimitReached
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import rollouts
from rollyard_api.storage.view_tables import watched_rollouts
from rollyard_api.views.rollout.records import row_of

WATCH_SECONDS: Final = 10.0
"""The seconds for which a view makes its rollout watched."""
KEPT_SECONDS: Final = 60.0
"""The seconds for which the turns are kept after the last view."""
MAX_WATCHED: Final = 128
"""The largest number of rollouts that are watched at once."""
MAX_WATCHED_OF_JOB: Final = 32
MAX_BYTES: Final = 64 << 10
"""The largest size of the turns of one rollout, in bytes. The oldest are dropped."""
_W = watched_rollouts.c
_WATCHED: Final = sa.select(_W.rollout_id).where(_W.until > bindparam("b_now"))
_KEPT: Final = (
    sa.select(*_W["rollout_id", "job_id", "token", "turns"])
    .where(_W.until > bindparam("b_now"), _W.rollout_id.in_(bindparam("b_ids", expanding=True)))
    .order_by(_W.rollout_id)
    .with_for_update()
)
_STORE: Final = (
    sa.update(watched_rollouts)
    .where(_W.rollout_id == bindparam("b_id"))
    .values(token=bindparam("b_token"), turns=bindparam("b_turns"))
)
_RUNNING: Final = sa.select(*rollouts.c["id", "state", "since", "worker", "token"])


def watched(tx: Transaction, leases: Collection[str]) -> list[str]:
    """Return which of the rollouts that a worker holds somebody watches."""
    ids = set(tx.conn.scalars(_WATCHED, {"b_now": tx.now}))
    return sorted(ids.intersection(leases))


def take(tx: Transaction, reports: Sequence[LiveTurns], leases: Mapping[str, int]) -> None:
    """Keep what a worker sends about rollouts that are watched.

    Args:
        reports: The turns by rollout.
        leases: The fencing tokens of the leases that the worker still holds. Turns of other rollouts, and
            those under other tokens, are dropped.
    """
    new = {report.rollout: report for report in reports if leases.get(report.rollout) == report.token}
    if not new:
        return
    changes = []
    for row in tx.conn.execute(_KEPT, {"b_now": tx.now, "b_ids": sorted(new)}):
        report = new[row.rollout_id]
        # Another attempt begins with an empty conversation.
        stored = {} if row.turns is None or row.token != report.token else loads(unpack(row.turns))
        turns = {turn["no"]: turn for turn in stored.get("turns", ())}
        turns |= {turn.no: turn.model_dump() for turn in report.turns}
        changes.append(
            {
                "b_id": row.rollout_id,
                "b_token": report.token,
                "b_turns": pack(_bounded(turns, stored.get("dropped", 0))),
            }
        )
    if changes:
        tx.conn.execute(_STORE, changes)


def _bounded(turns: Mapping[int, dict[str, Any]], dropped: int) -> bytes:
    """Return the newest turns that fit, as JSON."""
    chosen: list[dict[str, Any]] = []
    room = MAX_BYTES
    for no in sorted(turns, reverse=True):
        room -= len(dumps(turns[no]))
        if room < 0:
            break
        chosen.append(turns[no])
    chosen.reverse()
    return dumps({"turns": chosen, "dropped": dropped + len(turns) - len(chosen)})


def look(tx: Transaction, namespace: str, name: str, rollout: str) -> dict[str, Any]:
    """Return a running rollout as far as it is known, and mark it as watched.

    Raises:
        NotFound: There is no such job, or it has no such rollout.
        Conflict: It has ended.
        LimitReached: The largest number of rollouts is already watched.
    """
    job = job_rows.find(tx.conn, namespace, name)
    row = row_of(tx.conn, job, rollout, _RUNNING)
    if row.state.has_ended:
        raise Conflict(f"rollout {rollout!r} has ended; its record is there", reason="RolloutEnded")
    watch = tx.conn.execute(sa.select(watched_rollouts).where(_W.rollout_id == rollout)).one_or_none()
    until = tx.now + WATCH_SECONDS
    if watch is None:
        _check_room(tx, job.id)
        values = {"rollout_id": rollout, "job_id": job.id, "until": until, "token": row.token}
        tx.conn.execute(sa.insert(watched_rollouts), values)
    elif watch.until < tx.now + WATCH_SECONDS / 2:
        tx.conn.execute(sa.update(watched_rollouts).where(_W.rollout_id == rollout).values(until=until))
    else:
        until = watch.until
    document: dict[str, Any] = {"turns": [], "dropped": 0}
    if watch is not None and watch.turns is not None and watch.token == row.token:
        document = loads(unpack(watch.turns))
    return {
        "id": row.id,
        "status": row.state.status,
        "stage": row.state.stage,
        "since": row.since,
        "worker": (row.worker or "") if row.state.is_leased else "",
        **document,
        "watched_until": until,
    }


def _check_room(tx: Transaction, job_id: int) -> None:
    tx.conn.execute(sa.delete(watched_rollouts).where(_W.until < tx.now - KEPT_SECONDS))
    rows = tx.conn.execute(sa.select(_W.job_id).where(_W.until > tx.now)).all()
    own = sum(row.job_id == job_id for row in rows)
    if len(rows) >= MAX_WATCHED or own >= MAX_WATCHED_OF_JOB:
        raise LimitReached(
            f"{len(rows)} rollouts are watched, {own} of them of this job; at most {MAX_WATCHED} and "
            f"{MAX_WATCHED_OF_JOB} may be",
            reason="TooManyWaits",
            headers={"Retry-After": str(int(WATCH_SECONDS))},
        )


class Watching:
    """Whether anybody may watch a rollout, so that heartbeats ask the database only then.

    Args:
        alone: Whether no other process writes to the database.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._until = 0.0

    def note(self, now: float) -> None:
        """Note a view, at a time in seconds since the epoch."""
        self._until = now + WATCH_SECONDS

    def possible(self, now: float) -> bool:
        """Return whether a rollout may be watched at this time."""
        return not self._alone or now < self._until
