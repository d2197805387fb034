"""The spans that the control plane sends: a rollout as a whole, its waits, and its stages.

They are made where the timings are added up, from the same two times, and leave with the commit. A rollout's
spans therefore add up to its timings, and they are complete whatever became of the workers: those only add
what happened within a stage. How long a rollout has existed follows from its timings, because the states of a
rollout follow each other without a gap.
"""

from __future__ import annotations

from rollyard_process.telemetry import conventions as names
from rollyard_process.telemetry.identity import (
    is_sampled,
    queue_span_id,
    root_span_id,
    stage_span_id,
    trace_id,
)
from rollyard_process.telemetry.spans import TraceSpan, Value

from rollyard_api.machine.rollout import Rollout, Transition
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.jobs import EndedCounts


def left(tx: Transaction, rollout: Rollout, *, reason: str = "") -> None:
    """Add the span of the state that a rollout leaves now: a wait in a queue, or a stage under one lease.

    Args:
        tx: The transaction.
        rollout: The rollout as its row is.
        reason: Why the wait ended without a lease, or the stage without a result, or "".
    """
    if not _traced(tx, rollout.id):
        return
    stage, leased = rollout.stage, rollout.state.is_leased
    attributes: dict[str, Value] = {names.STAGE: stage}
    if leased:
        attributes[names.TOKEN] = rollout.token
        if rollout.worker:
            attributes[names.WORKER] = rollout.worker
        if rollout.node:
            attributes[names.NODE] = rollout.node
    if reason:
        attributes[names.ERROR_TYPE if leased else names.REASON] = reason
    tx.spans.append(
        TraceSpan(
            trace=trace_id(rollout.id),
            id=stage_span_id(rollout.id, stage, rollout.token)
            if leased
            else queue_span_id(rollout.id, stage, rollout.since),
            parent=root_span_id(rollout.id),
            name=stage if leased else f"{names.QUEUE_SPAN} {stage}",
            start=rollout.since,
            end=max(rollout.since, tx.now),
            attributes=attributes,
            error=reason if leased else "",
        )
    )


def ended(tx: Transaction, rollout: str, job: EndedCounts, transition: Transition, seconds: float) -> None:
    """Add the root span of a rollout, which ends now and has existed for so many seconds by its timings."""
    if not _traced(tx, rollout):
        return
    attributes: dict[str, Value] = {
        names.OPERATION: names.INVOKE_AGENT,
        names.PROVIDER: names.PROVIDER_NAME,
        names.AGENT: job.name,
        names.CONVERSATION: rollout,
        names.NAMESPACE: job.namespace,
        names.JOB: job.name,
        names.STATUS: transition.after.status,
    }
    if transition.reward is not None:
        attributes[names.REWARD] = transition.reward
    if transition.reason:
        attributes[names.REASON] = transition.reason
    error = (transition.reason or "Failed") if transition.after == RolloutState.FAILED else ""
    if error:
        attributes[names.ERROR_TYPE] = error
    tx.spans.append(
        TraceSpan(
            trace=trace_id(rollout),
            id=root_span_id(rollout),
            parent="",
            name=f"{names.INVOKE_AGENT} {job.name}",
            start=tx.now - seconds,
            end=tx.now,
            attributes=attributes,
            error=error,
        )
    )


def _traced(tx: Transaction, rollout: str) -> bool:
    return tx.trace_sample > 0.0 and is_sampled(rollout, tx.trace_sample)
