"""Workers report that leases are complete or have failed; the fencing token decides what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from rollyard_crds.names import NO_TOOL_PARSER
from rollyard_crds.rolloutjob import StageName
from sqlalchemy import bindparam
from sqlalchemy.dialects import postgresql, sqlite

from rollyard_api.backends import assignment, circuits
from rollyard_api.core.codec import loads
from rollyard_api.core.wakeups import queue_topic
from rollyard_api.machine import events
from rollyard_api.machine.events import Failed, InitDone, RunCounts, RunDone, Scored
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import malformed_calls, outages, timing
from rollyard_api.rollouts.ending import Ending, close, end
from rollyard_api.rollouts.requeue import HELD_COLUMNS, Cause, Return, requeue
from rollyard_api.rollouts.wire import Report
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import HeldRollout, read_all
from rollyard_api.storage.schema import payloads, rollouts
from rollyard_api.trajectories import spans

_HELD = (
    sa.select(*HELD_COLUMNS)
    .where(rollouts.c.id.in_(bindparam("b_ids", expanding=True)))
    .order_by(rollouts.c.id)
    .with_for_update()
)
_ADVANCE = (
    sa.update(rollouts)
    .where(rollouts.c.id == bindparam("b_id"))
    .values(
        state=bindparam("b_state"),
        node=bindparam("b_node"),
        lease_expires=None,
        since=bindparam("b_now"),
        settled=bindparam("b_settled"),
        timings=bindparam("b_timings"),
        sandbox_id=bindparam("b_sandbox_id"),
        sandbox=bindparam("b_sandbox"),
        sampled_tokens=bindparam("b_sampled_tokens"),
    )
)


def _upsert(module: Any, *names: str) -> Any:
    insert = module.insert(payloads)
    return insert.on_conflict_do_update(
        index_elements=[payloads.c.rollout_id], set_={name: insert.excluded[name] for name in names}
    )


_RUN = ("trajectory", "segments", "tokens_in_eval")
_KEEP = {
    (dialect, columns): _upsert(module, *columns)
    for dialect, module in (("sqlite", sqlite), ("postgresql", postgresql))
    for columns in (("carry",), _RUN, ("carry", *_RUN))
}


def keep(tx: Transaction, rows: Sequence[dict[str, Any]]) -> None:
    """Store carries and what Runs recorded between stages.

    Each row has the key "rollout_id", and "carry" or the columns of what a Run recorded, or both.
    """
    dialect = "sqlite" if tx.sqlite else "postgresql"
    for names in (("carry",), _RUN, ("carry", *_RUN)):
        some = [row for row in rows if row.keys() - {"rollout_id"} == set(names)]
        if some:
            tx.conn.execute(_KEEP[dialect, names], some)


def _advanced(row: HeldRollout, now: float, state: RolloutState, **changes: Any) -> dict[str, Any]:
    """Return the parameters of the update that takes a row to `state` and changes only the named columns."""
    return {
        "b_id": row.id,
        "b_state": state,
        "b_node": changes.get("node", row.node),
        "b_now": now,
        "b_settled": changes.get("settled", row.settled),
        "b_timings": changes.get("timings", row.timings),
        "b_sandbox_id": changes.get("sandbox_id", row.sandbox_id),
        "b_sandbox": changes.get("sandbox", row.sandbox),
        "b_sampled_tokens": changes.get("sampled_tokens", row.sampled_tokens),
    }


_FOLLOWING = {"init": RolloutState.QUEUED_RUN, "run": RolloutState.QUEUED_EVAL}
_BACKENDS_FAULT = ("BackendMismatch",)
"""The reasons of Run failures that count for a circuit. Calls of `route` report unreachable backends."""


def _stage(event: events.Report) -> StageName:
    """Return the stage that an event reports."""
    match event:
        case InitDone():
            return "init"
        case RunDone():
            return "run"
        case Scored():
            return "eval"
        case Failed(stage=stage):
            return stage


def _judge(row: HeldRollout | None, event: events.Report, mark: str) -> str:
    """Return the outcome of a report before anything is changed; `accepted` means that the holder sent it."""
    if row is None:
        return "unknown"
    if f"{mark}{event.token}" in row.settled.split():
        return "repeated"
    if event.token != row.token:
        return "stale"
    if row.state == RolloutState.CANCELLED:
        return "cancelled"
    return "accepted" if row.state == RolloutState.leased(_stage(event)) else "stale"


class _Batch:
    """The changes of one request, which are gathered and then made with one statement each."""

    def __init__(self, tx: Transaction, reports: Sequence[Report]) -> None:
        self.tx = tx
        found = tx.conn.execute(_HELD, {"b_ids": sorted({report.rollout for report in reports})})
        self.rows = {row.id: row for row in read_all(HeldRollout, found)}
        self.changes: list[dict[str, Any]] = []
        self.kept: list[dict[str, Any]] = []
        self.returns: list[Return] = []
        self.endings: list[Ending] = []
        self.seen: set[str] = set()
        self.answering: set[tuple[int, str]] = set()
        self.counts: list[tuple[int, RunCounts]] = []

    def judge(self, report: Report, mark: str) -> str:
        """Return what `_judge` returns, but `repeated` for a rollout that the request names a second time."""
        outcome = _judge(self.rows.get(report.rollout), report.event, mark)
        if outcome == "accepted":
            if report.rollout in self.seen:
                return "repeated"
            self.seen.add(report.rollout)
        return outcome

    def write(self) -> None:
        if self.changes:
            self.tx.conn.execute(_ADVANCE, self.changes)
        keep(self.tx, self.kept)
        requeue(self.tx, self.returns)
        circuits.completed(self.tx, self.answering)
        malformed_calls.count(self.tx, self.counts)
        if self.endings:
            end(self.tx, self.endings)


def complete(tx: Transaction, reports: Sequence[Report]) -> list[dict[str, str]]:
    """Accept the stage results of the current holders, and return one outcome per result, in their order."""
    batch = _Batch(tx, reports)
    outcomes = []
    for report in reports:
        outcome = batch.judge(report, "c")
        if outcome == "accepted":
            _accept(batch, batch.rows[report.rollout], report.event)
        outcomes.append({"rollout": report.rollout, "outcome": outcome})
    batch.write()
    return outcomes


def _accept(batch: _Batch, row: HeldRollout, event: events.Report) -> None:
    tx, stage = batch.tx, _stage(event)
    settled = f"{row.settled} c{event.token}".strip()
    active = max(0.0, tx.now - row.since)
    timings = timing.add(
        row.timings,
        stage,
        active=active,
        worker=event.times,
        step=None if stage == "eval" else timing.Step(row.state, row.since, _FOLLOWING[stage], tx.now),
        counts=event.counts if isinstance(event, RunDone) else None,
    )
    tx.count("stage_seconds", stage, value=active)
    spans.worked(tx, row.id, stage, row.token, row.since, worker=row.worker, node=row.node)
    match event:
        case Scored():
            _score(batch, row, event, timings, settled)
        case InitDone():
            sandbox = event.sandbox
            batch.changes.append(
                _advanced(
                    row,
                    tx.now,
                    RolloutState.QUEUED_RUN,
                    node="" if sandbox is None else sandbox.node,
                    sandbox_id=None if sandbox is None else sandbox.id,
                    sandbox=None if sandbox is None else sandbox.handle,
                    settled=settled,
                    timings=timings,
                )
            )
            if event.carry is not None:
                batch.kept.append({"rollout_id": row.id, "carry": event.carry})
            _queued(tx, row, "run")
        case RunDone():
            _ran(batch, row, event, active, timings=timings, settled=settled)
            _queued(tx, row, "eval")


def _queued(tx: Transaction, row: HeldRollout, stage: StageName) -> None:
    """Announce that a rollout waits for its next stage."""
    tx.wake(queue_topic(stage))
    tx.emit(row.job_id, rollout=row.id, stage=stage, status="queued", reward=None, reason="")


def _score(batch: _Batch, row: HeldRollout, event: Scored, timings: str, settled: str) -> None:
    batch.endings.append(
        Ending(
            rollout=row.id,
            job_id=row.job_id,
            group_no=row.group_no,
            state=RolloutState.SUCCEEDED,
            stage="eval",
            reward=event.reward,
            components=event.components,
            reward_reason=event.reason,
            reward_output=event.output,
            timings=timings,
            settled=settled,
        )
    )


def _ran(
    batch: _Batch, row: HeldRollout, event: RunDone, active: float, *, timings: str, settled: str
) -> None:
    tx, counts = batch.tx, event.counts
    batch.changes.append(
        _advanced(
            row,
            tx.now,
            RolloutState.QUEUED_EVAL,
            node="" if row.sandbox is None else loads(row.sandbox)["node"],
            settled=settled,
            timings=timings,
            sampled_tokens=counts.sampled_tokens,
        )
    )
    recorded = {
        "trajectory": event.record, "segments": event.segments, "tokens_in_eval": event.tokens_in_eval
    }  # fmt: skip
    carried = {} if event.carry is None else {"carry": event.carry}
    batch.kept.append({"rollout_id": row.id, **carried, **recorded})
    batch.counts.append((row.job_id, counts))
    if counts.template_breaks:
        tx.count("template_breaks", value=counts.template_breaks)
    tx.count("sampled_tokens", value=counts.sampled_tokens)
    if row.backend is not None:
        batch.answering.add((row.job_id, row.backend))
        if not assignment.moved(row.settled, row.token):
            tx.measure(row.backend, counts.spent_tokens, event.times.model_seconds, active)
    tx.wake(queue_topic("run"))  # The backend has room for another one.


def fail(tx: Transaction, reports: Sequence[Report]) -> list[dict[str, str]]:
    """Accept failures from the current holders, and return one outcome per failure, in their order.

    A failed rollout returns to a queue while it has attempts left; otherwise it ends. A failure that every
    rollout of the job would have ends the job.
    """
    batch = _Batch(tx, reports)
    known = [
        (batch.rows[report.rollout].job_id, report) for report in reports if report.rollout in batch.rows
    ]
    excused = outages.excused(tx, known)
    outcomes = []
    for report in reports:
        outcome = batch.judge(report, "f")
        if outcome == "accepted" and isinstance(report.event, Failed):
            _take_failure(batch, batch.rows[report.rollout], report.event, outage=report.rollout in excused)
        outcomes.append({"rollout": report.rollout, "outcome": outcome})
    batch.write()
    return outcomes


def _take_failure(batch: _Batch, row: HeldRollout, event: Failed, *, outage: bool) -> None:
    tx = batch.tx
    tx.count("failures", event.stage, event.reason)
    if event.reason == NO_TOOL_PARSER:
        close(tx, row.job_id, event.reason)
    if event.stage == "run" and event.reason in _BACKENDS_FAULT and row.backend is not None:
        circuits.failed(tx, row.job_id, row.backend)
    batch.returns.append(
        Return(
            row=row,
            cause=Cause.FAILURE,
            reason=event.reason,
            message=event.message,
            to=event.return_to,
            retryable=event.retryable,
            counts=event.counts,
            outage=outage,
            settled=f"{row.settled} f{event.token}".strip(),
            times=event.times,
        )
    )
