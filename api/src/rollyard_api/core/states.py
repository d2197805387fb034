"""The states through which a rollout passes."""

from __future__ import annotations

from enum import IntEnum

from rollyard_crds.rolloutjob import STAGES, StageName


class RolloutState(IntEnum):
    """The state of a rollout. The numbers are stored, and indexes sort by them.

    A rollout that waits in a stage's queue has an even number. A rollout that a worker of the stage holds has
    the odd number that follows. Numbers from 6 on mean that the rollout has ended.
    """

    QUEUED_INIT = 0
    LEASED_INIT = 1
    QUEUED_RUN = 2
    LEASED_RUN = 3
    QUEUED_EVAL = 4
    LEASED_EVAL = 5
    SUCCEEDED = 6
    FAILED = 7
    CANCELLED = 8

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


# These are looked up for every lease and every report, where the cost of computing them would be noticeable.
BY_NUMBER: tuple[RolloutState, ...] = tuple(RolloutState)
_FIRST_ENDED = int(RolloutState.SUCCEEDED)
_QUEUED = {stage: BY_NUMBER[2 * place] for place, stage in enumerate(STAGES)}
_LEASED = {stage: BY_NUMBER[2 * place + 1] for place, stage in enumerate(STAGES)}
_STAGES: tuple[StageName | None, ...] = (*(stage for stage in STAGES for _ in range(2)), None, None, None)
_STATUSES = ("queued", "leased") * len(STAGES) + ("succeeded", "failed", "cancelled")

ENDED: tuple[RolloutState, ...] = tuple(state for state in RolloutState if state.has_ended)
UNFINISHED: tuple[RolloutState, ...] = tuple(state for state in RolloutState if not state.has_ended)
