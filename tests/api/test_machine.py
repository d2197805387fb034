"""The decisions about a rollout keep the invariants whatever happens, and never leave the table of states.

No database and no clock take part, so thousands of steps take little time.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rollyard_api.machine import events, failure_policy
from rollyard_api.machine.limits import Limits
from rollyard_api.machine.rollout import Rejection, Rollout, Transition, decide
from rollyard_api.machine.states import BY_NUMBER, TRANSITIONS, RolloutState
from rollyard_crds.names import NO_TOOL_PARSER, STAGES

LIMITS = Limits(max_attempts={"init": 2, "run": 3, "eval": 1}, samples=2, min_group_size=1)
FIELDS = set(Rollout.__struct_fields__)
NEW = Rollout(
    id="job-1-0",
    job_id=1,
    group_no=0,
    sample=0,
    state=RolloutState.QUEUED_INIT,
    node="",
    token=0,
    since=0.0,
    worker=None,
    backend=None,
    policy_index=None,
    settled="",
    timings="{}",
    sandbox_id=None,
    sandbox=None,
    attempts=None,
    failures_init=0,
    failures_run=0,
    failures_eval=0,
    expiries=failure_policy.MAX_EXPIRIES - 3,
    eval_expiries=0,
    outages=0,
)
SANDBOX = events.InitSandbox("s", "node-1", b'{"node": "node-1"}')
REASONS = st.sampled_from(["Broken", "NoBackend", "BackendUnavailable", "SandboxLost"])
DONE: dict[str, Any] = {
    "init": lambda token: events.InitDone(token, SANDBOX),
    "run": lambda token: events.RunDone(token, b"{}", counts=events.RunCounts(sampled_tokens=3)),
    "eval": lambda token: events.Scored(token, 1.0),
}


def others(token: int) -> list[events.Event]:
    """Return one event of each kind that needs nothing but a token."""
    return [
        events.Leased("w", "n", 9.0),
        *(done(token) for done in DONE.values()),
        events.RunDone(token, b"{}", trainer_scores=True),
        *(events.Failed(token, stage, "Broken") for stage in STAGES),
        events.LeaseLost("LeaseExpired", "it expired"),
        events.NodeLost("it is gone"),
        events.NewWeights("PolicyTooStale", "too old"),
        events.NewWeights("PolicyTooStale", "too old", cancel=True),
        events.BackendAwaited("for too long"),
        events.Rewarded(None, 1.0),
        events.RewardAwaited("for too long"),
        events.Cancelled("Cancelled"),
        events.Moved(token, "http://b"),
        events.Blamed(token, "http://a"),
    ]


class Life(RuleBasedStateMachine):
    """One rollout, what happens to it, and what it may never become."""

    def __init__(self) -> None:
        super().__init__()
        self.rollout = NEW
        self.now = 0.0
        self.accepted: set[str] = set()

    def happens(self, event: events.Event) -> Transition | Rejection:
        """Decide about an event, check what every decision must keep, and take the step."""
        self.now += 1.0
        before = self.rollout
        decision = decide(before, event, LIMITS, self.now)
        if isinstance(decision, Rejection):
            return decision
        assert not before.state.has_ended
        assert decision.after in TRANSITIONS[type(event)][before.state]
        assert decision.changes.get("state", before.state) == decision.after
        known = {name: value for name, value in decision.changes.items() if name in FIELDS}
        after = self.rollout = msgspec.structs.replace(before, **known)
        assert after.token == before.token + isinstance(event, events.Leased)
        gives_reward = isinstance(event, events.Scored | events.Rewarded)
        assert ("reward" in decision.changes) == gives_reward
        assert (decision.after == RolloutState.SUCCEEDED) == gives_reward
        waits = decision.after == RolloutState.UNSCORED
        assert waits == (isinstance(event, events.RunDone) and event.trainer_scores)
        assert ("unscored_seq" in decision.changes) == (before.state == RolloutState.UNSCORED)
        failed = sum(after.failures(stage) - before.failures(stage) for stage in STAGES)
        assert failed == (decision.rule is not None and decision.rule.counted)
        assert not failed or isinstance(event, events.Failed)
        if decision.after in (RolloutState.QUEUED_INIT, RolloutState.UNSCORED):
            assert (after.sandbox_id, after.sandbox, after.node) == (None, None, "")
        if not decision.after.is_leased:
            assert decision.changes.get("lease_expires", 0) is None or not before.state.is_leased
        if isinstance(event, events.Report):
            mark = ("f" if isinstance(event, events.Failed) else "c") + str(event.token)
            assert mark not in self.accepted, "one report was accepted twice"
            self.accepted.add(mark)
            assert decide(after, event, LIMITS, self.now) is Rejection.REPEATED
        return decision

    @precondition(lambda self: not self.rollout.state.is_leased)
    @rule(backend=st.sampled_from([None, "http://a", "http://b"]))
    def lease(self, backend: str | None) -> None:
        decision = self.happens(events.Leased("w", "node-1", self.now + 30, backend, 1 if backend else None))
        assert isinstance(decision, Transition) != (
            decision is Rejection.STALE or decision is Rejection.CANCELLED
        )

    @precondition(lambda self: self.rollout.state.is_leased)
    @rule(trainer_scores=st.booleans())
    def complete(self, trainer_scores: bool) -> None:
        event = DONE[self.rollout.stage](self.rollout.token)
        if isinstance(event, events.RunDone):
            event = msgspec.structs.replace(event, trainer_scores=trainer_scores)
        assert isinstance(self.happens(event), Transition)

    @precondition(lambda self: self.rollout.state == RolloutState.UNSCORED)
    @rule(ago=st.integers(0, 2))
    def reward(self, ago: int) -> None:
        decision = self.happens(events.Rewarded(self.rollout.token - ago, 0.5))
        assert isinstance(decision, Transition) == (ago == 0), "a reward for an earlier Run was taken"

    @rule(
        stage=st.sampled_from(STAGES),
        reason=REASONS,
        back=st.sampled_from([None, *STAGES]),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    )
    def fail(self, stage: Any, reason: str, back: Any, flags: tuple[bool, bool, bool]) -> None:
        retryable, counts, down = flags
        event = events.Failed(
            self.rollout.token,
            self.rollout.state.stage or stage,
            reason,
            return_to=back,
            retryable=retryable,
            counts=counts,
            pool_is_down=down,
        )
        self.happens(event)

    @rule(ago=st.integers(1, 3), which=st.integers(0, 100))
    def a_fenced_off_holder_changes_nothing(self, ago: int, which: int) -> None:
        late = [event for event in others(self.rollout.token - ago) if hasattr(event, "token")]
        before = self.rollout
        assert isinstance(self.happens(late[which % len(late)]), Rejection)
        assert self.rollout == before

    @rule(which=st.integers(0, 100))
    def anything(self, which: int) -> None:
        possible = others(self.rollout.token)
        self.happens(possible[which % len(possible)])

    @rule(which=st.sampled_from([-1, -2, -3, -4]))
    def less_final(self, which: int) -> None:
        lost = events.LeaseLost("WorkerDied", "")
        self.happens((lost, events.NodeLost("n"), events.Moved(self.rollout.token, "http://c"), lost)[which])

    @invariant()
    def counters_are_bounded(self) -> None:
        rollout = self.rollout
        assert rollout.expiries <= failure_policy.MAX_EXPIRIES
        assert rollout.eval_expiries <= failure_policy.MAX_EVAL_EXPIRIES
        assert rollout.outages <= failure_policy.MAX_OUTAGES
        for stage in STAGES:
            assert rollout.failures(stage) <= LIMITS.max_attempts[stage]
            assert rollout.state.has_ended or rollout.failures(stage) < LIMITS.max_attempts[stage]

    @invariant()
    def there_is_a_way_to_an_end(self) -> None:
        rollout = self.rollout
        for _ in range(2 * len(STAGES)):
            if rollout.state.has_ended:
                return
            event: events.Event = events.Leased("w", "n", 1.0)
            if rollout.state.is_leased:
                event = DONE[rollout.stage](rollout.token)
            elif rollout.state == RolloutState.UNSCORED:
                event = events.Rewarded(rollout.token, 1.0)
            decision = decide(rollout, event, LIMITS, self.now)
            assert isinstance(decision, Transition)
            known = {name: value for name, value in decision.changes.items() if name in FIELDS}
            rollout = msgspec.structs.replace(rollout, **known)
        assert rollout.state == RolloutState.SUCCEEDED


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("state", BY_NUMBER, ids=lambda state: state.name)
def test_every_event_is_decided_in_every_state(state: RolloutState) -> None:
    rollout = msgspec.structs.replace(NEW, state=state, token=1, backend="http://a")
    for event in others(1):
        decision = decide(rollout, event, LIMITS, 1.0)
        allowed = TRANSITIONS[type(event)]
        if isinstance(event, events.Failed) and event.stage != state.stage:
            allowed = {}
        if state in allowed:
            assert isinstance(decision, Transition)
            assert decision.after in allowed[state]
        else:
            assert decision is (Rejection.CANCELLED if state == RolloutState.CANCELLED else Rejection.STALE)


def test_outages_excuse_so_many_attempts_and_no_more() -> None:
    held = msgspec.structs.replace(NEW, state=RolloutState.LEASED_RUN, token=1)
    event = events.Failed(1, "run", "BackendUnavailable", pool_is_down=True)
    most = failure_policy.MAX_OUTAGES
    excused = decide(msgspec.structs.replace(held, outages=most - 1), event, LIMITS, 1.0)
    counted = decide(msgspec.structs.replace(held, outages=most), event, LIMITS, 1.0)
    assert isinstance(excused, Transition)
    assert isinstance(counted, Transition)
    assert (excused.changes["outages"], "failures_run" in excused.changes) == (most, False)
    assert ("outages" in counted.changes, counted.changes["failures_run"]) == (False, 1)


def test_hand_over_that_names_an_outage_counts_once_no_outage_is_excused() -> None:
    """A hand-over is never counted, so a pool without a backend must not be able to pass for one."""
    held = msgspec.structs.replace(
        NEW, state=RolloutState.LEASED_RUN, token=1, outages=failure_policy.MAX_OUTAGES
    )
    decision = decide(held, events.Failed(1, "run", "NoBackend", counts=False), LIMITS, 1.0)
    assert isinstance(decision, Transition)
    assert decision.changes["failures_run"] == 1


def test_no_stage_is_skipped_by_a_failure() -> None:
    held = msgspec.structs.replace(NEW, state=RolloutState.LEASED_INIT, token=1)
    decision = decide(held, events.Failed(1, "init", "Broken", return_to="eval"), LIMITS, 1.0)
    assert isinstance(decision, Transition)
    assert decision.after == RolloutState.QUEUED_INIT


def test_missing_tool_parser_ends_the_job() -> None:
    held = msgspec.structs.replace(NEW, state=RolloutState.LEASED_RUN, token=1)
    decision = decide(held, events.Failed(1, "run", NO_TOOL_PARSER, retryable=False), LIMITS, 1.0)
    assert isinstance(decision, Transition)
    assert decision.rule is not None
    assert (decision.rule.ends_job, decision.after) == (True, RolloutState.FAILED)
