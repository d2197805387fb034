"""The function `requeue` decides every way in which a rollout that was not done returns to a queue.

| cause | returns to | counts as an attempt | ends the rollout |
|---|---|---|---|
| a failure that a worker reports | the stage, or the one that the worker names | yes, unless it is a hand-over | if it is final, or the stage's attempts are used up |
| a failure of Run while the pool has no ready backend | the same | no, MAX_OUTAGES times | no, MAX_OUTAGES times |
| a lost lease: it expired, or its worker died | Init; Eval once more in its own sandbox | no | after too many lost leases |
| a lost node, with the sandboxes there | Init | no | never |
| new weights, for which the rollout is too old | Init | no | never |

The attempt that ended in this way is kept with the rollout (see `attempts`), and each return is an event.
"""  # noqa: E501 - a row of a table has no line breaks

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import sqlalchemy as sa
from rollyard_crds.rolloutjob import StageName
from sqlalchemy import bindparam

from rollyard_api.core.codec import loads
from rollyard_api.core.wakeups import QUEUE
from rollyard_api.machine.limits import Limits
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import timing
from rollyard_api.rollouts.ending import Ending, end
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import HeldRollout, columns
from rollyard_api.storage.schema import jobs, payloads, rollouts
from rollyard_api.trajectories import attempts, spans

MAX_EXPIRIES = 10
"""The default number of leases of a rollout that may be lost. One more ends it."""
MAX_EVAL_EXPIRIES = 1
"""The number of Eval leases that may be lost before the sandbox is no longer trusted and the rollout returns
to Init."""
MAX_OUTAGES = 20
"""The number of attempts of a rollout that outages of its pool excuse. Further ones count as failures, so a
backend that is ready for moments only cannot keep a rollout for ever."""
HELD_COLUMNS = columns(HeldRollout, rollouts)
"""The columns of a rollout that `requeue` reads."""

_RETURN = (
    sa.update(rollouts)
    .where(rollouts.c.id == bindparam("b_id"))
    .values(
        {
            "lease_expires": None,
            **{
                name: bindparam(f"b_{name}")
                for name in (
                    "state",
                    "node",
                    "since",
                    "settled",
                    "timings",
                    "sandbox_id",
                    "sandbox",
                    "failures_init",
                    "failures_run",
                    "failures_eval",
                    "expiries",
                    "eval_expiries",
                    "outages",
                    "attempts",
                )
            },
        }
    )
)
_LIMITS = sa.select(jobs.c.id, jobs.c.limits).where(jobs.c.id.in_(bindparam("b_ids", expanding=True)))
_DROP_PAYLOADS = sa.delete(payloads).where(payloads.c.rollout_id == bindparam("b_id"))


class Cause(Enum):
    """What takes a rollout away from where it is. The table above says what follows from it."""

    FAILURE = auto()
    LEASE_LOST = auto()
    NODE_LOST = auto()
    NEW_WEIGHTS = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """A rollout that was not done, and why. The row is locked by the transaction that calls `requeue`."""

    row: HeldRollout
    cause: Cause
    reason: str
    """The reason in CamelCase."""
    message: str = ""
    to: StageName | None = None
    """The stage that the report of a failure names; None stands for the same stage."""
    retryable: bool = True
    """Whether another attempt after a failure may succeed."""
    counts: bool = True
    """Whether a failure counts as an attempt. It is false for hand-overs and preemptions."""
    outage: bool = False
    """Whether the failure is excused because the pool had no ready backend. At most MAX_OUTAGES are."""
    settled: str | None = None
    """The settled tokens with that of the report; None leaves them as they are."""
    times: Mapping[str, Any] | None = None
    """What the worker measured in this attempt, or None."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What becomes of a rollout. `to` is None if it ends."""

    to: StageName | None
    counted: bool
    changes: dict[str, int]


def _judge(item: Return, limits: Mapping[int, Limits], max_expiries: int) -> _Verdict:
    row = item.row
    match item.cause:
        case Cause.FAILURE:
            return _judge_failure(item, limits[row.job_id])
        case Cause.LEASE_LOST:
            if row.expiries + 1 > max_expiries:
                return _Verdict(None, False, {})
            again = row.state.stage == "eval" and row.eval_expiries < MAX_EVAL_EXPIRIES
            counts = {"expiries": row.expiries + 1, "eval_expiries": row.eval_expiries + 1 if again else 0}
            return _Verdict("eval" if again else "init", False, counts)
        case _:
            return _Verdict("init", False, {})


def _judge_failure(item: Return, limits: Limits) -> _Verdict:
    row, stage = item.row, _stage(item.row)
    excused = item.outage and row.outages < MAX_OUTAGES
    counted = not excused if item.outage else item.counts
    if not counted:
        return _Verdict(item.to or stage, False, {"outages": row.outages + 1} if excused else {})
    failures = getattr(row, f"failures_{stage}") + 1
    retried = item.retryable and failures < limits.attempts(stage)
    return _Verdict((item.to or stage) if retried else None, True, {f"failures_{stage}": failures})


def _stage(row: HeldRollout) -> StageName:
    stage = row.state.stage
    assert stage is not None, f"{row.id} has ended"
    return stage


def requeue(tx: Transaction, items: Sequence[Return], *, max_expiries: int = MAX_EXPIRIES) -> None:
    """Return unfinished rollouts to the queues, or end those whose attempts are used up.

    Args:
        tx: The transaction that has read and locked the rows.
        items: The rollouts, each at most once.
        max_expiries: The number of leases of a rollout that may be lost.
    """
    if not items:
        return
    # Every change of several rows goes in the order of the ids, since two replicas could deadlock otherwise.
    ordered = sorted(items, key=lambda item: str(item.row.id))
    limits = _limits(tx, {item.row.job_id for item in ordered if item.cause is Cause.FAILURE})
    changes: list[dict[str, Any]] = []
    dropped: list[dict[str, str]] = []
    endings: list[Ending] = []
    for item in ordered:
        _trace(tx, item)
        row = item.row
        verdict = _judge(item, limits, max_expiries)
        timings = _timings(tx, item, verdict.to)
        changes.append(_changed(tx, item, verdict, timings))
        if verdict.to is None:
            endings.append(_ending(item, timings))
            continue
        if verdict.to == "init":
            dropped.append({"b_id": row.id})
        event = {"stage": verdict.to, "status": "queued", "reward": None, "reason": item.reason}
        tx.emit(row.job_id, rollout=row.id, **event)
    tx.conn.execute(_RETURN, changes)
    if dropped:
        # What earlier stages left is of no use, because a rollout at Init starts again.
        tx.conn.execute(_DROP_PAYLOADS, dropped)
    tx.wake(QUEUE)
    if endings:
        end(tx, endings)


def _limits(tx: Transaction, ids: Iterable[int]) -> dict[int, Limits]:
    wanted = sorted(ids)
    if not wanted:
        return {}
    return {row.id: row.limits for row in tx.conn.execute(_LIMITS, {"b_ids": wanted})}


def _timings(tx: Transaction, item: Return, to: StageName | None) -> str:
    row, since = item.row, _seconds(tx, item.row)
    step = None if to is None else timing.Step(row.state, row.since, RolloutState.queued(to), tx.now)
    if row.state.is_leased:
        return timing.add(row.timings, _stage(row), active=since, worker=item.times, step=step)
    return timing.add(row.timings, _stage(row), queued=since, step=step)


def _seconds(tx: Transaction, row: HeldRollout) -> float:
    return max(0.0, tx.now - row.since)


def _changed(tx: Transaction, item: Return, verdict: _Verdict, timings: str) -> dict[str, Any]:
    """Return the new values of the row's columns.

    A rollout at Init starts without a sandbox. In the other stages it keeps its sandbox and the node of it.
    """
    row = item.row
    kept = verdict.to != "init" and row.sandbox is not None
    counters = ("failures_init", "failures_run", "failures_eval", "expiries", "eval_expiries", "outages")
    return {
        "b_id": row.id,
        "b_state": row.state if verdict.to is None else RolloutState.queued(verdict.to),
        "b_node": loads(row.sandbox)["node"] if kept and row.sandbox is not None else "",
        "b_since": tx.now,
        "b_settled": row.settled if item.settled is None else item.settled,
        "b_timings": timings,
        "b_sandbox_id": row.sandbox_id if kept else None,
        "b_sandbox": row.sandbox if kept else None,
        **{f"b_{name}": verdict.changes.get(name, getattr(row, name)) for name in counters},
        "b_attempts": attempts.added(row.attempts, _attempt(tx, item, verdict.counted)),
    }


def _attempt(tx: Transaction, item: Return, counted: bool) -> dict[str, Any]:
    row, stage = item.row, _stage(item.row)
    if row.state.is_leased and row.worker:
        tx.trouble(row.job_id, row.worker, row.id, item.reason, item.message)
    return attempts.attempt(
        stage=stage,
        number=timing.tries(row.timings, stage),
        reason=item.reason,
        message=item.message,
        # While a rollout waits in a queue, its row names the worker of the stage before.
        worker=(row.worker or "") if row.state.is_leased else "",
        node=row.node,
        started=row.since,
        seconds=_seconds(tx, row),
        counted=counted,
    )


def _ending(item: Return, timings: str) -> Ending:
    row, message = item.row, item.message
    if item.cause is Cause.LEASE_LOST:
        message = f"{row.expiries + 1} leases were lost; the last was held by {row.worker}"
    return Ending(
        rollout=row.id,
        job_id=row.job_id,
        group_no=row.group_no,
        state=RolloutState.FAILED,
        stage=_stage(row),
        reason=item.reason,
        message=message or None,
        timings=timings,
        settled=row.settled if item.settled is None else item.settled,
    )


def _trace(tx: Transaction, item: Return) -> None:
    """Add the span of the state that ends now."""
    row, stage = item.row, _stage(item.row)
    if row.state.is_leased:
        spans.worked(
            tx, row.id, stage, row.token, row.since, worker=row.worker, node=row.node, error=item.reason
        )
    else:
        spans.waited(tx, row.id, stage, row.since, reason=item.reason)
