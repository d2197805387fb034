"""The spans that the control plane sends: a rollout as a whole, its waits, and its stages.

They are made where the timings are added up, from the same two times, and leave with the commit. A rollout's
spans therefore add up to its timings, and they are complete whatever became of the workers: those only add
what happened within a stage. How long a rollout has existed follows from its timings, because the states of a
rollout follow each other without a gap.
"""

from __future__ import annotations

from rollyard_crds.telemetry import conventions as names
from rollyard_crds.telemetry.identity import is_sampled, queue_span_id, root_span_id, stage_span_id, trace_id
from rollyard_crds.telemetry.spans import TraceSpan, Value

from rollyard_api.machine.rollout import Rollout
from rollyard_api.storage.database import Transaction


def left(tx: Transaction, rollout: Rollout, *, reason: str = "") -> None:
    """Add the span of the state that a rollout leaves now: a wait in a queue, or a stage under one lease.

    Args:
        tx: The transaction.
        rollout: The rollout as its row is.
        reason: Why the wait ended without a lease, or the stage without a result, or "".
    """
    if not _traced(tx, rollout.id):
        return
    stage, held = rollout.stage, rollout.state.is_leased
    attributes: dict[str, Value] = {names.STAGE: stage}
    if held:
        attributes[names.TOKEN] = rollout.token
        if rollout.worker:
            attributes[names.WORKER] = rollout.worker
        if rollout.node:
            attributes[names.NODE] = rollout.node
    if reason:
        attributes[names.ERROR_TYPE if held else names.REASON] = reason
    tx.spans.append(
        TraceSpan(
            trace=trace_id(rollout.id),
            id=stage_span_id(rollout.id, stage, rollout.token)
            if held
            else queue_span_id(rollout.id, stage, rollout.since),
            parent=root_span_id(rollout.id),
            name=stage if held else f"{names.QUEUE_SPAN} {stage}",
            start=rollout.since,
            end=max(rollout.since, tx.now),
            attributes=attributes,
            error=reason if held else "",
        )
    )


def ended(
    tx: Transaction,
    rollout: str,
    *,
    namespace: str,
    job: str,
    status: str,
    seconds: float,
    reward: float | None,
    reason: str,
) -> None:
    """Add the root span of a rollout, which ends now.

    Args:
        tx: The transaction that ends the rollout.
        rollout: The id of the rollout.
        namespace: The namespace of its job.
        job: The name of its job.
        status: How it ended: `succeeded`, `failed` or `cancelled`.
        seconds: How long it has existed, which is the sum of its timings.
        reward: Its reward, or None.
        reason: Why it failed or was cancelled, or "".
    """
    if not _traced(tx, rollout):
        return
    attributes: dict[str, Value] = {
        names.OPERATION: names.INVOKE_AGENT,
        names.PROVIDER: names.PROVIDER_NAME,
        names.AGENT: job,
        names.CONVERSATION: rollout,
        names.NAMESPACE: namespace,
        names.JOB: job,
        names.STATUS: status,
    }
    if reward is not None:
        attributes[names.REWARD] = reward
    if reason:
        attributes[names.REASON] = reason
    failed = status == "failed"
    if failed:
        attributes[names.ERROR_TYPE] = reason or "Failed"
    tx.spans.append(
        TraceSpan(
            trace=trace_id(rollout),
            id=root_span_id(rollout),
            parent="",
            name=f"{names.INVOKE_AGENT} {job}",
            start=tx.now - seconds,
            end=tx.now,
            attributes=attributes,
            error=(reason or "Failed") if failed else "",
        )
    )


def _traced(tx: Transaction, rollout: str) -> bool:
    return tx.trace_sample > 0.0 and is_sampled(rollout, tx.trace_sample)
