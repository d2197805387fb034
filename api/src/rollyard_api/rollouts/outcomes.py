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
from rollyard_api.core.codec import dumps, loads, pack
from rollyard_api.core.wakeups import queue_topic
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import malformed_calls, outages, timing
from rollyard_api.rollouts.ending import Ending, close, end
from rollyard_api.rollouts.malformed_calls import RunCalls
from rollyard_api.rollouts.requeue import HELD_COLUMNS, Cause, Return, requeue
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


_KEEP = {
    (dialect, columns): _upsert(module, *columns)
    for dialect, module in (("sqlite", sqlite), ("postgresql", postgresql))
    for columns in (("carry",), ("trajectory",), ("carry", "trajectory"))
}


def keep(tx: Transaction, rows: Sequence[dict[str, Any]]) -> None:
    """Store carries and trajectories between stages.

    Each row has the key "rollout_id" and one or both of "carry" and "trajectory".
    """
    dialect = "sqlite" if tx.sqlite else "postgresql"
    for names in (("carry",), ("trajectory",), ("carry", "trajectory")):
        some = [row for row in rows if tuple(sorted(row.keys() - {"rollout_id"})) == names]
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


def _judge(row: HeldRollout | None, item: dict[str, Any], mark: str) -> str:
    """Return the outcome of a report before anything is changed; `accepted` means that the holder sent it."""
    if row is None:
        return "unknown"
    if f"{mark}{item['token']}" in row.settled.split():
        return "repeated"
    if item["token"] != row.token:
        return "stale"
    if row.state == RolloutState.CANCELLED:
        return "cancelled"
    return "accepted" if row.state == RolloutState.leased(item["stage"]) else "stale"


class _Batch:
    """The changes of one request, which are gathered and then made with one statement each."""

    def __init__(self, tx: Transaction, ids: Sequence[str]) -> None:
        self.tx = tx
        found = tx.conn.execute(_HELD, {"b_ids": sorted(set(ids))})
        self.rows = {row.id: row for row in read_all(HeldRollout, found)}
        self.changes: list[dict[str, Any]] = []
        self.kept: list[dict[str, Any]] = []
        self.returns: list[Return] = []
        self.endings: list[Ending] = []
        self.seen: set[str] = set()
        self.answering: set[tuple[int, str]] = set()
        self.calls: list[tuple[int, RunCalls]] = []

    def judge(self, item: dict[str, Any], mark: str) -> str:
        """Return what `_judge` returns, but `repeated` for a rollout that the request names a second time."""
        outcome = _judge(self.rows.get(item["rollout"]), item, mark)
        if outcome == "accepted":
            if item["rollout"] in self.seen:
                return "repeated"
            self.seen.add(item["rollout"])
        return outcome

    def write(self) -> None:
        if self.changes:
            self.tx.conn.execute(_ADVANCE, self.changes)
        keep(self.tx, self.kept)
        requeue(self.tx, self.returns)
        circuits.completed(self.tx, self.answering)
        malformed_calls.count(self.tx, self.calls)
        if self.endings:
            end(self.tx, self.endings)


def complete(tx: Transaction, results: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Accept the stage results of the current holders, and return one outcome per result, in their order.

    Args:
        results: The StageResults as `wire.check_results` has checked them. The trajectory of a Run is already
            packed, under "packed".
    """
    batch = _Batch(tx, [item["rollout"] for item in results])
    outcomes = []
    for item in results:
        outcome = batch.judge(item, "c")
        if outcome == "accepted":
            _accept(batch, batch.rows[item["rollout"]], item)
        outcomes.append({"rollout": item["rollout"], "outcome": outcome})
    batch.write()
    return outcomes


def _accept(batch: _Batch, row: HeldRollout, item: dict[str, Any]) -> None:
    tx, stage = batch.tx, item["stage"]
    times = item.get("times") or {}
    settled = f"{row.settled} c{item['token']}".strip()
    active = max(0.0, tx.now - row.since)
    timings = timing.add(
        row.timings,
        stage,
        active=active,
        worker=times,
        step=None if stage == "eval" else timing.Step(row.state, row.since, _FOLLOWING[stage], tx.now),
        counted=item.get("counted"),
    )
    tx.count("stage_seconds", stage, value=active)
    spans.worked(tx, row.id, stage, row.token, row.since, worker=row.worker, node=row.node)
    if stage == "eval":
        components = item.get("reward_components") or None
        batch.endings.append(
            Ending(
                rollout=row.id,
                job_id=row.job_id,
                group_no=row.group_no,
                state=RolloutState.SUCCEEDED,
                stage=stage,
                reward=float(item["reward"]),
                components=None if components is None else dumps(components),
                reward_reason=item.get("reward_reason") or None,
                reward_output=item.get("reward_output") or None,
                timings=timings,
                settled=settled,
            )
        )
        return
    carry = item.get("carry")
    kept: dict[str, Any] = {"rollout_id": row.id}
    if carry:
        kept["carry"] = pack(dumps(carry))
    if stage == "init":
        sandbox = item.get("sandbox")
        batch.changes.append(
            _advanced(
                row,
                tx.now,
                RolloutState.QUEUED_RUN,
                node="" if sandbox is None else sandbox["node"],
                sandbox_id=None if sandbox is None else sandbox["id"],
                sandbox=None if sandbox is None else dumps(sandbox),
                settled=settled,
                timings=timings,
            )
        )
        next_stage: StageName = "run"
    else:
        kept["trajectory"] = item["packed"]
        node = "" if row.sandbox is None else loads(row.sandbox)["node"]
        batch.changes.append(
            _advanced(
                row,
                tx.now,
                RolloutState.QUEUED_EVAL,
                node=node,
                settled=settled,
                timings=timings,
                sampled_tokens=item.get("sampled_tokens", 0),
            )
        )
        batch.calls.append((row.job_id, item["calls"]))
        breaks = item.get("template_breaks", 0)
        if breaks:
            tx.count("template_breaks", value=breaks)
        tx.count("sampled_tokens", value=item.get("sampled_tokens", 0))
        if row.backend is not None:
            batch.answering.add((row.job_id, row.backend))
            if not assignment.moved(row.settled, row.token):
                tx.measure(row.backend, _tokens(item), float(times.get("model_seconds", 0.0)), active)
        next_stage = "eval"
        tx.wake(queue_topic("run"))  # The backend has room for another one.
    if len(kept) > 1:
        batch.kept.append(kept)
    tx.wake(queue_topic(next_stage))
    tx.emit(row.job_id, rollout=row.id, stage=next_stage, status="queued", reward=None, reason="")


def _tokens(item: dict[str, Any]) -> int:
    """Return the number of tokens that the backend sampled in this Run, kept in a trajectory or not."""
    stats = item.get("stats") or {}
    kept: int = stats.get("sampled_tokens", 0) or item.get("sampled_tokens", 0)
    discarded: int = stats.get("discarded_tokens", 0)
    return kept + discarded


def fail(tx: Transaction, failures: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Accept failures from the current holders, and return one outcome per failure, in their order.

    A failed rollout returns to a queue while it has attempts left; otherwise it ends. A failure that every
    rollout of the job would have ends the job.
    """
    batch = _Batch(tx, [item["rollout"] for item in failures])
    known = [(batch.rows[item["rollout"]].job_id, item) for item in failures if item["rollout"] in batch.rows]
    excused = outages.excused(tx, known)
    outcomes = []
    for item in failures:
        outcome = batch.judge(item, "f")
        if outcome == "accepted":
            _take_failure(batch, batch.rows[item["rollout"]], item, outage=item["rollout"] in excused)
        outcomes.append({"rollout": item["rollout"], "outcome": outcome})
    batch.write()
    return outcomes


def _take_failure(batch: _Batch, row: HeldRollout, item: dict[str, Any], *, outage: bool) -> None:
    tx, stage, reason = batch.tx, item["stage"], item["reason"]
    tx.count("failures", stage, reason)
    if reason == NO_TOOL_PARSER:
        close(tx, row.job_id, reason)
    if stage == "run" and reason in _BACKENDS_FAULT and row.backend is not None:
        circuits.failed(tx, row.job_id, row.backend)
    batch.returns.append(
        Return(
            row=row,
            cause=Cause.FAILURE,
            reason=reason,
            message=item.get("message") or "",
            to=item.get("return_to"),
            retryable=item.get("retryable", True),
            counts=item.get("counts", True),
            outage=outage,
            settled=f"{row.settled} f{item['token']}".strip(),
            times=item.get("times"),
        )
    )
