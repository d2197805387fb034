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

from rollyard_api.storage.database import Transaction


def waited(tx: Transaction, rollout: str, stage: str, since: float, *, reason: str = "") -> None:
    """Add the span of a wait in a stage's queue, which ends now.

    Args:
        tx: The transaction that ends it.
        rollout: The id of the rollout.
        stage: The stage in whose queue it waited.
        since: When the wait began, in seconds since the epoch.
        reason: Why it ended without a lease, or "".
    """
    if not _traced(tx, rollout):
        return
    attributes: dict[str, Value] = {names.STAGE: stage}
    if reason:
        attributes[names.REASON] = reason
    tx.spans.append(
        TraceSpan(
            trace=trace_id(rollout),
            id=queue_span_id(rollout, stage, since),
            parent=root_span_id(rollout),
            name=f"{names.QUEUE_SPAN} {stage}",
            start=since,
            end=max(since, tx.now),
            attributes=attributes,
        )
    )


def worked(
    tx: Transaction,
    rollout: str,
    stage: str,
    token: int,
    since: float,
    *,
    worker: str | None = None,
    node: str = "",
    error: str = "",
) -> None:
    """Add the span of a stage under one lease, which ends now.

    Args:
        tx: The transaction that ends it.
        rollout: The id of the rollout.
        stage: The stage.
        token: The fencing token of the lease.
        since: When the lease was granted, in seconds since the epoch.
        worker: The worker that held the lease, if it is known.
        node: The node of that worker.
        error: The reason why the stage came to no result, or "".
    """
    if not _traced(tx, rollout):
        return
    attributes: dict[str, Value] = {names.STAGE: stage, names.TOKEN: token}
    if worker:
        attributes[names.WORKER] = worker
    if node:
        attributes[names.NODE] = node
    if error:
        attributes[names.ERROR_TYPE] = error
    tx.spans.append(
        TraceSpan(
            trace=trace_id(rollout),
            id=stage_span_id(rollout, stage, token),
            parent=root_span_id(rollout),
            name=stage,
            start=since,
            end=max(since, tx.now),
            attributes=attributes,
            error=error,
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
