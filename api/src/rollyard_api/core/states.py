"""The states a rollout passes through, as small integers that indexes sort well.

Even: waiting in a stage's queue; odd: leased by a worker of that stage; 6 and above: ended.
"""

from __future__ import annotations

from typing import Final

from rollyard_crds.rolloutjob import STAGES, StageName

SUCCEEDED: Final = 6
FAILED: Final = 7
CANCELLED: Final = 8

LEASED: Final[tuple[int, ...]] = (1, 3, 5)
ENDED: Final[dict[int, str]] = {SUCCEEDED: "succeeded", FAILED: "failed", CANCELLED: "cancelled"}
STATUSES: Final[tuple[str, ...]] = ("queued", "leased", "succeeded", "failed", "cancelled")


def queued(stage: StageName) -> int:
    """State of a rollout that waits for `stage`."""
    return 2 * STAGES.index(stage)


def leased(stage: StageName) -> int:
    """State of a rollout that a worker of `stage` holds."""
    return 2 * STAGES.index(stage) + 1


def stage_of(state: int) -> StageName | None:
    """The stage of a state; None once the rollout has ended."""
    return STAGES[state // 2] if state < SUCCEEDED else None


def status_of(state: int) -> str:
    """`queued`, `leased`, or how the rollout ended."""
    return ENDED.get(state) or ("leased" if state % 2 else "queued")


def states_matching(stage: StageName | None, status: str | None) -> list[int]:
    """All states with this stage and this status; None matches every one."""
    return [
        state
        for state in range(CANCELLED + 1)
        if (stage is None or stage_of(state) == stage) and (status is None or status_of(state) == status)
    ]
