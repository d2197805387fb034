"""The course of a rollout over time: in its row, for pages that draw it, and as spans that are sent.

The key `_` of the row's timings says when the rollout entered each of its states, and records leave it out.
The times are whole milliseconds after the first of them, in one flat list: the first time in seconds since
the epoch, then a state's number and a time for each state that the rollout entered.

The spans are the rollout as a whole, its waits, and its stages. They are made where the timings are added up,
from the same two times, and leave with the commit. A rollout's spans therefore add up to its timings, and
they are complete whatever became of the workers, which only add what happened within a stage. How long a
rollout has existed follows from its timings, because its states follow each other without a gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rollyard_process.telemetry import conventions as names
from rollyard_process.telemetry.identity import (
    is_sampled,
    queue_span_id,
    root_span_id,
    stage_span_id,
    trace_id,
)
from rollyard_process.telemetry.spans import TraceSpan, Value

from rollyard_api.machine.events import RunCounts
from rollyard_api.machine.rollout import Rollout, Transition
from rollyard_api.machine.states import BY_NUMBER, RolloutState
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.jobs import EndedCounts

KEY: Final = "_"
MAX_STATES: Final = 64
"""The number of states that are kept. Of a rollout that entered more, the second and later ones are lost."""
MAX_REASON: Final = 64
_COUNTS: Final = {
    "turns": "turns",
    "tool_calls": "calls",
    "cut": "cut",
    "open_thought": "open",
    "logprobs": "logprobs",
    "written_calls": "written",
    "malformed_calls": "malformed",
}
"""The keys under which a Run's counts are kept."""


def note(
    document: dict[str, Any], before: RolloutState, since: float, after: RolloutState, now: float
) -> None:
    """Add to decoded timings that a rollout, which was in one state since a time, has entered another."""
    trace = document.setdefault(KEY, {})
    places = trace.setdefault("at", [round(since, 3), int(before), 0])
    places += (int(after), max(0, round((now - places[0]) * 1000)))
    if len(places) > 1 + 2 * MAX_STATES:
        del places[3:5]


def count(document: dict[str, Any], counts: RunCounts) -> None:
    """Add what a Run counted to decoded timings. An earlier Run's counts are replaced."""
    trace = document.setdefault(KEY, {})
    for name, key in _COUNTS.items():
        value = getattr(counts, name)
        if value or key == "turns":
            trace[key] = value
        else:
            trace.pop(key, None)


def counted(document: Mapping[str, Any]) -> RunCounts:
    """Return what decoded timings keep of the last Run's counts."""
    trace = document.get(KEY, {})
    return RunCounts(**{name: trace[key] for name, key in _COUNTS.items() if key in trace})


def spans(timings: Mapping[str, Any], end: float) -> list[tuple[str, float, float]]:
    """Return the spans of decoded timings in their order; the last ends at `end`, in seconds of the epoch.

    Each has the name, the begin and the end of a state. The name is the stage, with `-queue` if the rollout
    waited for it. A rollout that has not left its first state has none yet.
    """
    entries = timings.get(KEY, {}).get("at")
    if not entries:
        return []
    first = float(entries[0])
    states = [BY_NUMBER[number] for number in entries[1::2]]
    labels = [f"{state.stage}{'' if state.is_leased else '-queue'}" for state in states]
    starts = [first + milliseconds / 1000 for milliseconds in entries[2::2]]
    return list(zip(labels, starts, [*starts[1:], max(end, starts[-1])], strict=True))


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
    span_id = queue_span_id(rollout.id, stage, rollout.since)
    if leased:
        span_id = stage_span_id(rollout.id, stage, rollout.token)
    tx.spans.append(
        TraceSpan(
            trace=trace_id(rollout.id),
            id=span_id,
            parent=root_span_id(rollout.id),
            name=stage if leased else f"{names.QUEUE_SPAN} {stage}",
            start=rollout.since,
            end=max(rollout.since, tx.now),
            attributes=attributes,
            error=reason if leased else "",
        )
    )


def ended(tx: Transaction, rollout: str, job: EndedCounts, transition: Transition, seconds: float) -> None:
    """Add the root span of a rollout, which ends now and has existed for this many seconds by its timings."""
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
