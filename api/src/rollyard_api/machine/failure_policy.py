"""What becomes of a rollout that was not done: rules as data, of which the first one that matches decides.

A rule that is bounded does not match any more once its bound is reached, and a later rule decides then.
`table` prints the rules for the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rollyard_crds.names import NO_TOOL_PARSER
from rollyard_crds.rolloutjob import STAGES, StageName

from rollyard_api.machine.events import (
    NO_BACKEND,
    BackendAwaited,
    Failed,
    LeaseLost,
    NewWeights,
    NodeLost,
)
from rollyard_api.machine.limits import Limits

BACKEND_UNAVAILABLE: Final = "BackendUnavailable"
"""The reason of a Run whose backend did not answer."""
MAX_EXPIRIES: Final = 10
"""The number of leases of a rollout that may be lost, unless the control plane is set to another. One more
ends it."""
MAX_EVAL_EXPIRIES: Final = 1
"""The number of Eval leases that may be lost before the sandbox is no longer trusted and the rollout returns
to Init."""
MAX_OUTAGES: Final = 20
"""The number of attempts of a rollout that outages of its pool excuse. Further ones count as failures, so a
backend that is ready for moments only cannot keep a rollout for ever."""

Mishap = Failed | LeaseLost | NodeLost | NewWeights | BackendAwaited
"""The events after which a rollout is not done."""


class Action(StrEnum):
    """What a rule does with a rollout."""

    RETRY = "repeat the stage, or start from the earlier one that the report names"
    RESTART = "start again at Init"
    FAIL = "end as failed"
    CANCEL = "end as cancelled"


class Counter(StrEnum):
    """What is counted of a rollout, and bounds the rules."""

    FAILURES = "failures of the stage"
    OUTAGES = "outages"
    EXPIRIES = "lost leases"
    EVAL_EXPIRIES = "lost Eval leases in one sandbox"


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """One rule. A condition that is None, or a tuple that is empty, matches everything."""

    name: str
    on: type[Mishap]
    meaning: str
    """What has happened, in the words of the documentation."""
    action: Action
    stages: tuple[StageName, ...] = STAGES
    reasons: tuple[str, ...] = ()
    retryable: bool | None = None
    counts: bool | None = None
    outage: bool | None = None
    cancel: bool | None = None
    raises: tuple[Counter, ...] = ()
    """The counters that rise by one. The rule matches while none of them has reached its bound."""
    counted: bool = False
    """Whether the attempt counts as a failure of its stage."""
    resets: tuple[Counter, ...] = ()
    ends_job: bool = False

    def matches(self, event: Mishap, stage: StageName) -> bool:
        """Return whether the rule is for this event in this stage, whatever its bounds are."""
        if type(event) is not self.on or stage not in self.stages:
            return False
        if self.reasons and event.reason not in self.reasons:
            return False
        if isinstance(event, Failed):
            return (
                self.retryable in (None, event.retryable)
                and self.counts in (None, event.counts)
                and self.outage in (None, is_outage(event))
            )
        return not isinstance(event, NewWeights) or self.cancel in (None, event.cancel)


def is_outage(event: Failed) -> bool:
    """Return whether a Run failed because its pool had no ready backend.

    A worker that knows this reports the reason NoBackend. The others report BackendUnavailable, and the pool
    is looked at.
    """
    if event.stage != "run":
        return False
    return event.reason == NO_BACKEND or (event.pool_is_down and event.reason == BACKEND_UNAVAILABLE)


def bound(counter: Counter, event: Mishap, stage: StageName, limits: Limits | None) -> int:
    """Return how far a counter may rise before the rules that raise it match no more."""
    match counter:
        case Counter.FAILURES:
            assert limits is not None, "a failure is judged by the limits of its job"
            return limits.attempts(stage) - 1
        case Counter.OUTAGES:
            return MAX_OUTAGES
        case Counter.EVAL_EXPIRIES:
            return MAX_EVAL_EXPIRIES
        case Counter.EXPIRIES:
            return event.most if isinstance(event, LeaseLost) else 0


RULES: Final = (
    PolicyRule(
        name="NoToolParser",
        on=Failed,
        meaning="no parser reads the tool calls of the job's model, which every rollout would find",
        reasons=(NO_TOOL_PARSER,),
        action=Action.FAIL,
        counted=True,
        ends_job=True,
    ),
    PolicyRule(
        name="Outage",
        on=Failed,
        meaning="a Run failed while the pool had no ready backend",
        stages=("run",),
        outage=True,
        action=Action.RETRY,
        raises=(Counter.OUTAGES,),
    ),
    PolicyRule(
        name="HandOver",
        on=Failed,
        meaning="a worker hands the rollout over, because it drains or is preempted",
        counts=False,
        outage=False,
        action=Action.RETRY,
    ),
    PolicyRule(
        name="FinalFailure",
        on=Failed,
        meaning="a worker reports a failure that every attempt would have",
        retryable=False,
        action=Action.FAIL,
        counted=True,
    ),
    PolicyRule(
        name="Failure",
        on=Failed,
        meaning="a worker reports a failure",
        action=Action.RETRY,
        raises=(Counter.FAILURES,),
        counted=True,
    ),
    PolicyRule(
        name="AttemptsUsedUp",
        on=Failed,
        meaning="a worker reports a failure, and the stage has had all its attempts",
        action=Action.FAIL,
        counted=True,
    ),
    PolicyRule(
        name="EvalLeaseLost",
        on=LeaseLost,
        meaning="an Eval lease expired, or its worker died",
        stages=("eval",),
        action=Action.RETRY,
        raises=(Counter.EXPIRIES, Counter.EVAL_EXPIRIES),
    ),
    PolicyRule(
        name="LeaseLost",
        on=LeaseLost,
        meaning="a lease expired, or its worker died",
        action=Action.RESTART,
        raises=(Counter.EXPIRIES,),
        resets=(Counter.EVAL_EXPIRIES,),
    ),
    PolicyRule(
        name="TooManyLostLeases",
        on=LeaseLost,
        meaning="a lease was lost, and as many were lost before as may be",
        action=Action.FAIL,
    ),
    PolicyRule(
        name="NodeLost",
        on=NodeLost,
        meaning="the sandboxes of a node are gone",
        action=Action.RESTART,
    ),
    PolicyRule(
        name="NewWeights",
        on=NewWeights,
        meaning="the rollout is too old for new weights",
        cancel=False,
        action=Action.RESTART,
    ),
    PolicyRule(
        name="TooStale",
        on=NewWeights,
        meaning="the rollout is too old for new weights, and its job says `staleRollouts: Cancel`",
        cancel=True,
        action=Action.CANCEL,
    ),
    PolicyRule(
        name="BackendAwaited",
        on=BackendAwaited,
        meaning="the rollout has waited for a backend for too long",
        action=Action.FAIL,
    ),
)
_BOUNDS: Final = {
    Counter.FAILURES: "`maxAttempts` of the stage, less one",
    Counter.OUTAGES: str(MAX_OUTAGES),
    Counter.EXPIRIES: str(MAX_EXPIRIES),
    Counter.EVAL_EXPIRIES: str(MAX_EVAL_EXPIRIES),
}


def table() -> str:
    """Return the rules as a table in Markdown, for the documentation."""
    lines = [
        "| rule | what has happened | what follows | counts as an attempt | how often for one rollout |",
        "|---|---|---|---|---|",
    ]
    for rule in RULES:
        follows = f"{rule.action.value}, and the job with it" if rule.ends_job else rule.action.value
        often = "; ".join(f"{counter.value}: {_BOUNDS[counter]}" for counter in rule.raises) or "-"
        counted = "yes" if rule.counted else "no"
        lines.append(f"| {rule.name} | {rule.meaning} | {follows} | {counted} | {often} |")
    return "\n".join(lines) + "\n"
