"""Reports of workers about their leases, as checked events; the fencing token decides which are accepted.

An event has what is stored already packed, so that the database's writer need not do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from rollyard_crds.lease import CompleteRequest, FailRequest, StageFailure, StageResult
from rollyard_crds.trajectory import MALFORMED_CALL, RunRecord, SegmentSizes, Turn

from rollyard_api.backends.assignment import without_backend
from rollyard_api.core.codec import MAX_PROBLEMS, dumps, pack, validated
from rollyard_api.core.problems import Invalid
from rollyard_api.machine import events
from rollyard_api.machine.events import (
    BACKEND_UNAVAILABLE,
    Failed,
    InitDone,
    InitSandbox,
    RunCounts,
    RunDone,
    Scored,
)
from rollyard_api.machine.rollout import Rejection, decide
from rollyard_api.machine.signs import doubtful_kind
from rollyard_api.rollouts import staleness, transitions
from rollyard_api.rollouts.conversations import record_problems
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.trajectories import packed
from rollyard_api.trajectories.traces import MAX_REASON

MAX_CARRY_BYTES: Final = 1 << 20


class ReportedEvent(NamedTuple):
    """What a worker reports about one rollout."""

    rollout: str
    event: events.Report


def check_results(document: Any) -> tuple[list[ReportedEvent], list[str]]:
    """Return the checked results of a CompleteRequest, and the ids of the sandboxes that they name.

    Args:
        document: The decoded body.

    Raises:
        Invalid: A result is wrong. None of the results is accepted in this case.
    """
    request = validated(CompleteRequest, document, strict=True)
    problems: list[str] = []
    reports = []
    for index, result in enumerate(request.results):
        carry = dumps(result.carry) if result.carry else b""
        problems += _problems(result, carry, f"results[{index}]")
        if len(problems) >= MAX_PROBLEMS:
            break
        if not problems:
            reports.append(ReportedEvent(result.rollout, _event(result, document["results"][index], carry)))
    if problems:
        raise Invalid.of(*problems[:MAX_PROBLEMS])
    return reports, [result.sandbox.id for result in request.results if result.sandbox is not None]


def _problems(result: StageResult, carry: bytes, name: str) -> Iterator[str]:
    """Yield what is wrong with a result whose fields have the right types."""
    if len(carry) > MAX_CARRY_BYTES:
        yield f"{name}.carry: is longer than {MAX_CARRY_BYTES} bytes"
    if result.stage != "run":
        for field in ("trajectory", "segments", "tokens_in_eval"):
            if getattr(result, field):
                yield f"{name}.{field}: only the Run stage gives one"
    elif result.trajectory is None:
        yield f"{name}.trajectory: is required in stage run and must be an object"
    else:
        yield from record_problems(result.trajectory, result.segments, f"{name}.trajectory")
    if result.stage != "eval":
        for field in ("reward", "reward_reason", "reward_output"):
            if getattr(result, field) not in (None, ""):
                yield f"{name}.{field}: only the Eval stage gives one"
    elif result.reward is None:
        yield f"{name}.reward: must be a finite number in stage eval (got None)"


def _event(result: StageResult, document: dict[str, Any], carry: bytes) -> events.Report:
    """Return the event of a result that was checked; `document` is the result as received."""
    stored = pack(carry) if carry else None
    if result.trajectory is not None:
        sizes = [segment.sizes for segment in result.segments]
        # Only the sizes are added to what was received, so that a record has the fields that Run gave.
        record = document["trajectory"] | {"segment_sizes": [size.model_dump() for size in sizes]}
        return RunDone(
            token=result.token,
            record=pack(dumps(record)),
            segments=packed.of_segments(result.segments) if result.segments else None,
            tokens_in_eval=result.tokens_in_eval,
            carry=stored,
            counts=_counts(result, result.trajectory, sizes),
            times=result.times,
        )
    if result.reward is not None:
        return Scored(
            token=result.token,
            reward=result.reward,
            components=dumps(result.reward_components) if result.reward_components else None,
            reason=result.reward_reason or None,
            output=result.reward_output or None,
            times=result.times,
        )
    sandbox = None
    if result.sandbox is not None:
        sandbox = InitSandbox(result.sandbox.id, result.sandbox.node, dumps(document["sandbox"]))
    return InitDone(token=result.token, sandbox=sandbox, carry=stored, times=result.times)


def _counts(result: StageResult, trajectory: RunRecord, sizes: Sequence[SegmentSizes]) -> RunCounts:
    """Return what is counted in a Run.

    Replayed calls are not the policy's. An entry that names no tool, such as the one for calls beyond the
    largest number of a turn, is a call of the policy only if it is malformed.
    """
    calls = [
        (call.name, (call.error or "").startswith(MALFORMED_CALL))
        for turn in trajectory.every_turn
        if turn.finish_reason != "replayed"
        for call in turn.tool_calls
    ]
    malformed = sum(wrong for _, wrong in calls)
    sampled = sum(size.sampled_tokens for size in sizes)
    sampling = trajectory.sampling
    return RunCounts(
        turns=sum(1 for _ in trajectory.every_turn),
        tool_calls=sum(len(turn.tool_calls) for turn in trajectory.every_turn),
        cut=trajectory.truncated_reason[:MAX_REASON],
        open_thought=bool(trajectory.turns) and _ends_in_a_thought(trajectory.turns[-1]),
        logprobs="" if sampling is None else doubtful_kind(sampling.logprobs_mode),
        written_calls=malformed + sum(bool(name) and not wrong for name, wrong in calls),
        malformed_calls=malformed,
        template_breaks=trajectory.template_breaks,
        sampled_tokens=sampled,
        spent_tokens=(result.stats.sampled_tokens or sampled) + result.stats.discarded_tokens,
        gateway=result.stats.gateway,
    )


def _ends_in_a_thought(turn: Turn) -> bool:
    """Return whether a turn was cut inside a thought that had not ended."""
    cut = turn.finish_reason in ("length", "abort")
    return cut and turn.thought is not None and not turn.thought.closed


def check_failures(document: Any) -> list[ReportedEvent]:
    """Return the checked failures of a FailRequest.

    Args:
        document: The decoded body.

    Raises:
        Invalid: A failure is wrong. None of the failures is accepted in this case.
    """
    request = validated(FailRequest, document, strict=True)
    return [ReportedEvent(failure.rollout, _failed(failure)) for failure in request.failures]


def _failed(failure: StageFailure) -> Failed:
    return Failed(
        token=failure.token,
        stage=failure.stage,
        reason=failure.reason,
        message=failure.message,
        return_to=failure.return_to,
        retryable=failure.retryable,
        counts=failure.counts,
        times=failure.times,
    )


def accept(tx: Transaction, reports: Sequence[ReportedEvent]) -> list[dict[str, str]]:
    """Accept reports of the current holders of leases, and return one outcome for each, in their order.

    A failed rollout returns to a queue while it has attempts left; otherwise it ends. Rollouts that have left
    Run and are too old for Eval are taken back.

    Args:
        tx: The transaction.
        reports: The ids of rollouts, each with what a worker reports about it. Of several reports of one
            rollout the first that is accepted counts.
    """
    rows = rollout_rows.named(tx, (name for name, _ in reports))
    asking = {
        rows[name].job_id for name, event in reports if isinstance(event, RunDone | Failed) and name in rows
    }
    jobs = rollout_rows.jobs_of(tx, asking) if asking else {}
    down: set[int] = set()
    if any(isinstance(event, Failed) and event.reason == BACKEND_UNAVAILABLE for _, event in reports):
        pools = {job_id: (job.namespace, job.pool) for job_id, job in jobs.items() if job.pool is not None}
        lost = without_backend(tx, set(pools.values()))
        down = {job_id for job_id, key in pools.items() if key in lost}
    accepted: dict[str, transitions.Decided] = {}
    outcomes = []
    for name, event in reports:
        outcome, row = "unknown", rows.get(name)
        if row is not None:
            if row.job_id in down and isinstance(event, Failed):
                event = msgspec.structs.replace(event, pool_is_down=True)
            limits = jobs[row.job_id].limits if row.job_id in jobs else None
            if isinstance(event, RunDone) and limits is not None:
                scores = limits.trainer_reward_seconds is not None
                event = msgspec.structs.replace(event, trainer_scores=True) if scores else event
            decision = decide(row, event, limits, tx.now)
            if isinstance(decision, Rejection):
                outcome = decision.value
            elif name in accepted:
                outcome = Rejection.REPEATED.value
            else:
                accepted[name] = row, decision
                outcome = "accepted"
        outcomes.append({"rollout": name, "outcome": outcome})
    transitions.apply(tx, accepted.values())
    ran = [
        row.id
        for row, transition in accepted.values()
        if isinstance(transition.event, RunDone) and row.policy_index is not None
    ]
    if ran:
        for namespace, pool in rollout_rows.stale_pools(tx, ran):
            staleness.enforce(tx, namespace, pool)
    return outcomes
