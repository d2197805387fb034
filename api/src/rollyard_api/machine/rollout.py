"""One rollout and the decision about it: `decide` takes an event and says what becomes of the rollout.

Exactly one result follows from these rules. Every lease raises the fencing token, and a report is accepted
only from the holder of the last lease, once. A rollout that has ended never moves again. Only an evaluation
gives a reward: that of Eval, or the trainer's for a rollout that waits for it.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct
from rollyard_crds.rolloutjob import StageName

from rollyard_api.machine import events
from rollyard_api.machine.failure_policy import RULES, Action, Counter, Mishap, PolicyRule, bound
from rollyard_api.machine.limits import Limits
from rollyard_api.machine.states import TRANSITIONS, RolloutState


class Rollout(Struct, frozen=True):
    """The part of a rollout that decisions see. The fields have the names of its row's columns, in order."""

    id: str
    job_id: int
    group_no: int
    sample: int
    state: RolloutState
    node: str
    token: int
    """The fencing token of the last lease."""
    since: float
    """When the rollout entered its state, in seconds since the epoch."""
    worker: str | None
    """The worker of the last lease."""
    backend: str | None
    policy_index: int | None
    """The index of the weights under which Run began, or None before Run."""
    settled: str
    """The marks of the reports that were accepted under each token, separated by spaces."""
    timings: str
    sandbox_id: str | None
    sandbox: bytes | None
    attempts: bytes | None
    failures_init: int
    failures_run: int
    failures_eval: int
    expiries: int
    eval_expiries: int
    outages: int

    @property
    def stage(self) -> StageName:
        """The stage that an unfinished rollout waits for or is in."""
        stage = self.state.stage
        assert stage is not None, f"{self.id} has ended"
        return stage

    def failures(self, stage: StageName) -> int:
        """Return how many attempts of a stage have counted as failures."""
        count: int = getattr(self, f"failures_{stage}")
        return count

    @property
    def was_moved(self) -> bool:
        """Whether the rollout got another backend under its last lease, so its model time covers both."""
        return f"m{self.token}" in self.settled.split()


class Transition(Struct, frozen=True):
    """What becomes of a rollout. `rollouts.transitions` writes it, with everything that belongs to it."""

    event: events.Event
    after: RolloutState
    changes: dict[str, Any]
    """The new values of the row's columns, by their names."""
    rule: PolicyRule | None = None
    """The rule of the failure policy that decided, if any."""
    reason: str = ""
    """Why the rollout returned to a queue or ended without a reward, in CamelCase, or ""."""

    @property
    def reward(self) -> float | None:
        """The reward that the event gives, or None if it is not an evaluation."""
        return self.event.reward if isinstance(self.event, events.Scored | events.Rewarded) else None

    @property
    def returns(self) -> bool:
        """Whether the rollout goes back to a queue without having completed its stage."""
        return self.rule is not None and not self.after.has_ended


class Rejection(StrEnum):
    """Why an event changes nothing."""

    REPEATED = "repeated"
    """The same report was received before."""
    STALE = "stale"
    """The lease is not held with this token, or the rollout is in none of the event's states."""
    CANCELLED = "cancelled"


class _Handle(Struct):
    node: str


def decide(
    rollout: Rollout, event: events.Event, limits: Limits | None, now: float
) -> Transition | Rejection:
    """Return what an event makes of a rollout, or why it changes nothing.

    Args:
        rollout: The rollout as its row is, which the caller has locked.
        event: What has happened.
        limits: The limits of its job, which only a failure needs.
        now: The time in seconds since the epoch.
    """
    match event:
        case events.InitDone() | events.RunDone() | events.Scored() | events.Failed():
            refused = _judge(rollout, event)
            if refused is not None:
                return refused
        case events.Moved() | events.Blamed():
            if event.token != rollout.token:
                return Rejection.STALE
    if rollout.state not in TRANSITIONS[type(event)]:
        return Rejection.CANCELLED if rollout.state == RolloutState.CANCELLED else Rejection.STALE
    match event:
        case events.Leased():
            return _leased(rollout, event, now)
        case events.InitDone():
            return _initialised(rollout, event, now)
        case events.RunDone():
            return _ran(rollout, event, now)
        case events.Scored():
            return _scored(rollout, event, now)
        case events.Rewarded():
            return _rewarded(rollout, event, now)
        case events.Cancelled():
            changes = _ended(rollout, RolloutState.CANCELLED, now, event.reason)
            return Transition(event, RolloutState.CANCELLED, changes, reason=event.reason)
        case events.Moved():
            return _moved(rollout, event)
        case events.Blamed():
            return _blamed(rollout, event)
        case _:
            return _not_done(rollout, event, limits, now)


def mark_of(event: events.Report) -> str:
    """Return the mark that a row keeps of an accepted report, by which a repeat is recognised."""
    return f"{'f' if isinstance(event, events.Failed) else 'c'}{event.token}"


def _judge(rollout: Rollout, event: events.Report) -> Rejection | None:
    """Return why a report is not accepted, or None if the holder of the lease sent it for the first time."""
    if mark_of(event) in rollout.settled.split():
        return Rejection.REPEATED
    other_stage = isinstance(event, events.Failed) and rollout.state.stage not in (None, event.stage)
    return Rejection.STALE if other_stage or event.token != rollout.token else None


def _marked(rollout: Rollout, mark: str) -> str:
    return f"{rollout.settled} {mark}" if rollout.settled else mark


def _leased(rollout: Rollout, event: events.Leased, now: float) -> Transition:
    after = RolloutState.leased(rollout.stage)
    changes: dict[str, Any] = {
        "state": after,
        "node": event.node,
        "token": rollout.token + 1,
        "worker": event.worker,
        "lease_expires": event.expires,
        "since": now,
    }
    if event.backend is not None:
        changes["backend"] = event.backend
        changes["policy_index"] = event.policy_index
    return Transition(event, after, changes)


def _initialised(rollout: Rollout, event: events.InitDone, now: float) -> Transition:
    sandbox = event.sandbox
    changes = _queued(RolloutState.QUEUED_RUN, "" if sandbox is None else sandbox.node, now) | {
        "settled": _marked(rollout, mark_of(event)),
        "sandbox_id": None if sandbox is None else sandbox.id,
        "sandbox": None if sandbox is None else sandbox.handle,
    }
    return Transition(event, RolloutState.QUEUED_RUN, changes)


def _ran(rollout: Rollout, event: events.RunDone, now: float) -> Transition:
    after = RolloutState.UNSCORED if event.trainer_scores else RolloutState.QUEUED_EVAL
    changes = _queued(after, "" if event.trainer_scores else _sandbox_node(rollout), now) | {
        "settled": _marked(rollout, mark_of(event)),
        "sampled_tokens": event.counts.sampled_tokens,
    }
    if event.trainer_scores:
        # A trainer scores the record alone, so nobody needs the sandbox any more.
        changes |= {"sandbox_id": None, "sandbox": None}
    return Transition(event, after, changes)


def _scored(rollout: Rollout, event: events.Scored, now: float) -> Transition:
    changes = _ended(rollout, RolloutState.SUCCEEDED, now) | {
        "settled": _marked(rollout, mark_of(event)),
        "reward": event.reward,
        "components": event.components,
        "reward_reason": event.reason,
        "reward_output": event.output,
    }
    return Transition(event, RolloutState.SUCCEEDED, changes)


def _rewarded(rollout: Rollout, event: events.Rewarded, now: float) -> Transition | Rejection:
    """Give the rollout the trainer's reward, unless it was for an earlier Run."""
    if event.fence not in (None, rollout.token):
        return Rejection.STALE
    changes = _ended(rollout, RolloutState.SUCCEEDED, now) | {
        "reward": event.reward,
        "components": event.components,
        "reward_reason": event.reason,
    }
    return Transition(event, RolloutState.SUCCEEDED, changes)


def _moved(rollout: Rollout, event: events.Moved) -> Transition:
    changes = {"backend": event.backend}
    if not rollout.was_moved:
        changes["settled"] = _marked(rollout, f"m{rollout.token}")
    return Transition(event, rollout.state, changes)


def _blamed(rollout: Rollout, event: events.Blamed) -> Transition | Rejection:
    """Blame the backend that the rollout is assigned to, once for each lease.

    A lease holder cannot open a circuit by naming another server or by repeating its report.
    """
    mark = f"b{event.token}:{hashlib.sha256(event.backend.encode()).hexdigest()[:12]}"
    if event.backend != rollout.backend:
        return Rejection.STALE
    if mark in rollout.settled.split():
        return Rejection.REPEATED
    return Transition(event, rollout.state, {"settled": _marked(rollout, mark)})


def _not_done(rollout: Rollout, event: Mishap, limits: Limits | None, now: float) -> Transition:
    """Return what the failure policy makes of a rollout whose stage was not completed."""
    stage = rollout.stage
    rule = next(
        rule
        for rule in RULES[type(event)]
        if rule.matches(event, stage)
        and all(
            getattr(rollout, raised.column(stage)) < bound(raised, stage, limits) for raised in rule.raises
        )
    )
    match rule.action:
        case Action.RETRY:
            named = event.return_to if isinstance(event, events.Failed) else None
            # No stage is skipped: the stages before it must have been completed.
            after = min(RolloutState.queued(named or stage), RolloutState.queued(stage))
        case Action.RESTART:
            after = RolloutState.QUEUED_INIT
        case Action.FAIL:
            after = RolloutState.FAILED
        case Action.CANCEL:
            after = RolloutState.CANCELLED
    if after.has_ended:
        message = event.message
        if isinstance(event, events.LeaseLost):
            message = f"{rollout.expiries + 1} leases were lost; the last was held by {rollout.worker}"
        changes = _ended(rollout, after, now, event.reason, message or None)
    else:
        changes = _returned(rollout, after, now)
    counted = (Counter.FAILURES,) if rule.counted else ()
    for counter in (*rule.raises, *counted):
        changes[counter.column(stage)] = getattr(rollout, counter.column(stage)) + 1
    for counter in rule.resets:
        changes[counter.column(stage)] = 0
    if isinstance(event, events.Failed):
        changes["settled"] = _marked(rollout, mark_of(event))
    return Transition(event, after, changes, rule, event.reason)


def _queued(after: RolloutState, node: str, now: float) -> dict[str, Any]:
    """Return the values of a rollout that enters a queue, for the workers of `node` or for any with ""."""
    return {"state": after, "node": node, "since": now, "lease_expires": None}


def _returned(rollout: Rollout, after: RolloutState, now: float) -> dict[str, Any]:
    """Return the values of a rollout that goes back to a queue.

    A rollout at Init starts without a sandbox. In the other stages it keeps its sandbox and its node.
    """
    if after == RolloutState.QUEUED_INIT:
        return _queued(after, "", now) | {"sandbox_id": None, "sandbox": None} | _withdrawn(rollout)
    return _queued(after, _sandbox_node(rollout), now)


def _ended(
    rollout: Rollout, after: RolloutState, now: float, reason: str | None = None, message: str | None = None
) -> dict[str, Any]:
    """Return the values of a rollout that has its result."""
    changes: dict[str, Any] = {"state": after, "node": "", "since": now, "sandbox_id": None, "pending": 1}
    if rollout.state.is_leased:
        changes["lease_expires"] = None
    if reason is not None:
        changes |= {"reason": reason, "message": message}
    return changes | _withdrawn(rollout)


def _withdrawn(rollout: Rollout) -> dict[str, Any]:
    """Return the value that takes a rollout out of the list of those that wait for the trainer's reward."""
    return {"unscored_seq": None} if rollout.state == RolloutState.UNSCORED else {}


def _sandbox_node(rollout: Rollout) -> str:
    """Return the node whose workers reach the rollout's sandbox, or "" if it has none."""
    return "" if rollout.sandbox is None else msgspec.json.decode(rollout.sandbox, type=_Handle).node
