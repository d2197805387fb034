"""The states of a rollout, and the events that may take it from one to another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final

from rollyard_crds.rolloutjob import STAGES, StageName

from rollyard_api.machine import events


class RolloutState(IntEnum):
    """The state of a rollout. The numbers are stored, and indexes sort by them.

    A rollout that waits in a stage's queue has an even number. A rollout that a worker of the stage holds has
    the odd number that follows. UNSCORED takes the place of Eval in jobs whose rewards the trainer gives:
    such a rollout waits, and no worker leases it. The numbers after it mean that the rollout has ended.
    """

    QUEUED_INIT = 0
    LEASED_INIT = 1
    QUEUED_RUN = 2
    LEASED_RUN = 3
    QUEUED_EVAL = 4
    LEASED_EVAL = 5
    UNSCORED = 6
    SUCCEEDED = 7
    FAILED = 8
    CANCELLED = 9

    @classmethod
    def queued(cls, stage: StageName) -> RolloutState:
        """Return the state of a rollout that waits for `stage`."""
        return _QUEUED[stage]

    @classmethod
    def leased(cls, stage: StageName) -> RolloutState:
        """Return the state of a rollout that a worker of `stage` holds."""
        return _LEASED[stage]

    @classmethod
    def matching(cls, stage: StageName | None = None, status: str | None = None) -> list[RolloutState]:
        """Return all states with this stage and this status; None matches every stage or status."""
        return [state for state in cls if stage in (None, state.stage) and status in (None, state.status)]

    @property
    def has_ended(self) -> bool:
        """Whether the rollout has its result."""
        return self >= _FIRST_ENDED

    @property
    def is_leased(self) -> bool:
        """Whether a worker holds the rollout."""
        return not self.has_ended and self % 2 == 1

    @property
    def stage(self) -> StageName | None:
        """The stage that the rollout waits for or is in; None once it has ended."""
        return _STAGES[self]

    @property
    def status(self) -> str:
        """`queued`, `leased`, `succeeded`, `failed` or `cancelled`."""
        return _STATUSES[self]


# These are looked up for every lease and report, where computing them would be noticeably slow.
BY_NUMBER: tuple[RolloutState, ...] = tuple(RolloutState)
_FIRST_ENDED: Final = int(RolloutState.SUCCEEDED)
_QUEUED: Final = {stage: BY_NUMBER[2 * index] for index, stage in enumerate(STAGES)}
_LEASED: Final = {stage: BY_NUMBER[2 * index + 1] for index, stage in enumerate(STAGES)}
_STAGES: tuple[StageName | None, ...] = (
    *(stage for stage in STAGES for _ in range(2)),
    "eval",
    None,
    None,
    None,
)
_STATUSES: Final = ("queued", "leased") * len(STAGES) + ("queued", "succeeded", "failed", "cancelled")

ENDED: tuple[RolloutState, ...] = tuple(state for state in RolloutState if state.has_ended)
UNFINISHED: tuple[RolloutState, ...] = tuple(state for state in RolloutState if not state.has_ended)

_ANY_STAGE: Final = range(len(STAGES))
_WAITING_IN_A_SANDBOX: Final = (RolloutState.QUEUED_RUN, RolloutState.QUEUED_EVAL)


def _all(before: Iterable[RolloutState], *after: RolloutState) -> dict[RolloutState, frozenset[RolloutState]]:
    return {state: frozenset(after) for state in before}


TRANSITIONS: Final[Mapping[type[events.Event], Mapping[RolloutState, frozenset[RolloutState]]]] = {
    events.Leased: {BY_NUMBER[2 * at]: frozenset({BY_NUMBER[2 * at + 1]}) for at in _ANY_STAGE},
    events.InitDone: _all([RolloutState.LEASED_INIT], RolloutState.QUEUED_RUN),
    events.RunDone: _all([RolloutState.LEASED_RUN], RolloutState.QUEUED_EVAL, RolloutState.UNSCORED),
    events.Scored: _all([RolloutState.LEASED_EVAL], RolloutState.SUCCEEDED),
    # A failed stage is repeated, or the rollout starts again from an earlier one.
    events.Failed: {
        BY_NUMBER[2 * at + 1]: frozenset({RolloutState.FAILED, *BY_NUMBER[0 : 2 * at + 1 : 2]})
        for at in _ANY_STAGE
    },
    events.LeaseLost: _all(
        [RolloutState.LEASED_INIT, RolloutState.LEASED_RUN], RolloutState.QUEUED_INIT, RolloutState.FAILED
    )
    | _all(
        [RolloutState.LEASED_EVAL], RolloutState.QUEUED_EVAL, RolloutState.QUEUED_INIT, RolloutState.FAILED
    ),
    events.NodeLost: _all(_WAITING_IN_A_SANDBOX, RolloutState.QUEUED_INIT),
    events.NewWeights: _all(
        [RolloutState.LEASED_RUN, RolloutState.QUEUED_EVAL, RolloutState.UNSCORED],
        RolloutState.QUEUED_INIT,
        RolloutState.CANCELLED,
    ),
    events.BackendAwaited: _all([RolloutState.QUEUED_INIT, RolloutState.QUEUED_RUN], RolloutState.FAILED),
    events.Rewarded: _all([RolloutState.UNSCORED], RolloutState.SUCCEEDED),
    events.RewardAwaited: _all([RolloutState.UNSCORED], RolloutState.FAILED),
    events.Cancelled: _all(UNFINISHED, RolloutState.CANCELLED),
    events.Moved: _all([RolloutState.LEASED_RUN], RolloutState.LEASED_RUN),
    events.Blamed: _all([RolloutState.LEASED_RUN], RolloutState.LEASED_RUN),
}
"""For each event, the states in which it may come, and those that may follow. It is refused in all others."""
