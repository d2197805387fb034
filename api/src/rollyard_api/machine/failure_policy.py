"""What becomes of a rollout whose stage was not completed: rules as data; the first that matches decides.

A bounded rule no longer matches once its bound is reached, and a later rule then decides.
`scripts/machine_docs.py` writes the rules into the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from rollyard_crds.names import NO_TOOL_PARSER
from rollyard_crds.rolloutjob import STAGES, StageName

from rollyard_api.machine.events import (
    BackendAwaited,
    Failed,
    LeaseLost,
    NewWeights,
    NodeLost,
    RewardAwaited,
)
from rollyard_api.machine.limits import Limits

MAX_EXPIRIES: Final = 10
"""The number of leases of a rollout that may be lost. One more ends it."""
MAX_EVAL_EXPIRIES: Final = 1
"""The number of Eval leases that may be lost before the sandbox is no longer trusted and the rollout returns
to Init."""
MAX_OUTAGES: Final = 20
"""The number of attempts of a rollout that outages of its pool excuse. Further ones count as failures, so a
backend that is only ready for moments cannot keep a rollout for ever."""

Mishap = Failed | LeaseLost | NodeLost | NewWeights | BackendAwaited | RewardAwaited
"""The events after which a stage was not completed."""


class Action(StrEnum):
    """What a rule does with a rollout."""

    RETRY = "repeat the stage"
    """Repeat the stage, or start from the earlier one that a report names."""
    RESTART = "start again at Init"
    FAIL = "end as failed"
    CANCEL = "end as cancelled"


class Counter(StrEnum):
    """The counters of a rollout, which bound the rules. The values are the names of its row's columns."""

    FAILURES = "failures"
    """The failures of one stage. The names of the columns end with that of the stage."""
    OUTAGES = "outages"
    EXPIRIES = "expiries"
    """The lost leases."""
    EVAL_EXPIRIES = "eval_expiries"
    """The lost Eval leases in one sandbox."""

    def column(self, stage: StageName) -> str:
        """Return the name of the column that holds this counter of a rollout in a stage."""
        return f"{self.value}_{stage}" if self is Counter.FAILURES else self.value


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """One rule. It matches events in some stages whose attributes have the given values."""

    name: str
    action: Action
    meaning: str
    """What has happened, in the words of the documentation."""
    when: Mapping[str, object] = field(default_factory=dict)
    stages: tuple[StageName, ...] = STAGES
    raises: tuple[Counter, ...] = ()
    """The counters that rise by one. The rule matches while none of them has reached its bound."""
    resets: tuple[Counter, ...] = ()
    counted: bool = False
    """Whether the attempt counts as a failure of its stage."""
    ends_job: bool = False

    def matches(self, event: Mishap, stage: StageName) -> bool:
        """Return whether the rule is for this event in this stage, whatever its bounds are."""
        return stage in self.stages and all(
            getattr(event, name) == value for name, value in self.when.items()
        )


def bound(counter: Counter, stage: StageName, limits: Limits | None) -> int:
    """Return how far a counter may rise before the rules that raise it no longer match."""
    match counter:
        case Counter.FAILURES:
            assert limits is not None, "a failure is judged by the limits of its job"
            return limits.max_attempts[stage] - 1
        case Counter.OUTAGES:
            return MAX_OUTAGES
        case Counter.EVAL_EXPIRIES:
            return MAX_EVAL_EXPIRIES
        case Counter.EXPIRIES:
            return MAX_EXPIRIES


RULES: Final[Mapping[type[Mishap], tuple[PolicyRule, ...]]] = {
    Failed: (
        PolicyRule(
            "NoToolParser",
            Action.FAIL,
            "no parser reads the tool calls of the job's model, which every rollout would find",
            when={"reason": NO_TOOL_PARSER},
            counted=True,
            ends_job=True,
        ),
        PolicyRule(
            "Outage",
            Action.RETRY,
            "a Run failed while the pool had no ready backend",
            when={"is_outage": True},
            raises=(Counter.OUTAGES,),
        ),
        PolicyRule(
            "HandOver",
            Action.RETRY,
            "a worker hands the rollout over, because it drains or is preempted",
            when={"counts": False, "is_outage": False},
        ),
        PolicyRule(
            "FinalFailure",
            Action.FAIL,
            "a worker reports a failure that every attempt would have",
            when={"retryable": False},
            counted=True,
        ),
        PolicyRule(
            "Failure", Action.RETRY, "a worker reports a failure", raises=(Counter.FAILURES,), counted=True
        ),
        PolicyRule(
            "AttemptsUsedUp",
            Action.FAIL,
            "a worker reports a failure, and the stage has had all its attempts",
            counted=True,
        ),
    ),
    LeaseLost: (
        PolicyRule(
            "EvalLeaseLost",
            Action.RETRY,
            "an Eval lease expired, or its worker died",
            stages=("eval",),
            raises=(Counter.EXPIRIES, Counter.EVAL_EXPIRIES),
        ),
        PolicyRule(
            "LeaseLost",
            Action.RESTART,
            "a lease expired, or its worker died",
            raises=(Counter.EXPIRIES,),
            resets=(Counter.EVAL_EXPIRIES,),
        ),
        PolicyRule(
            "TooManyLostLeases", Action.FAIL, "a lease was lost, and as many were lost before as may be"
        ),
    ),
    NodeLost: (PolicyRule("NodeLost", Action.RESTART, "the sandboxes of a node are gone"),),
    NewWeights: (
        PolicyRule(
            "NewWeights", Action.RESTART, "the rollout is too old for new weights", when={"cancel": False}
        ),
        PolicyRule(
            "TooStale",
            Action.CANCEL,
            "the rollout is too old for new weights, and its job says `staleRollouts: Cancel`",
            when={"cancel": True},
        ),
    ),
    BackendAwaited: (
        PolicyRule("BackendAwaited", Action.FAIL, "the rollout has waited for a backend for too long"),
    ),
    RewardAwaited: (
        PolicyRule(
            "RewardAwaited", Action.FAIL, "the trainer has not handed in the rollout's reward in time"
        ),
    ),
}
"""The rules, by the events that they match."""
