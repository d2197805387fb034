"""The summary of a run: counts, rewards, tokens and times, computed from its trajectories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rollyard_crds import STAGES
from rollyard_crds.fields.signals import has_signal
from rollyard_crds.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class StageSummary:
    """The number of rollouts that worked in one stage, and their seconds of work and of waiting."""

    rollouts: int = 0
    worked_seconds: float = 0.0
    queued_seconds: float = 0.0

    @property
    def mean_worked(self) -> float:
        """The average seconds of work of one rollout."""
        return self.worked_seconds / self.rollouts if self.rollouts else 0.0

    @property
    def mean_queued(self) -> float:
        """The average seconds of one rollout in the queue."""
        return self.queued_seconds / self.rollouts if self.rollouts else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a finished job."""

    rollouts: int
    succeeded: int
    failed: int
    cancelled: int
    truncated: int
    reward_mean: float | None
    groups: int
    groups_informative: int
    tokens_sampled: int
    turns_mean: float
    wall_seconds: float
    stages: dict[str, StageSummary]

    @property
    def tokens_per_second(self) -> float:
        """The sampled tokens of all rollouts per second of wall time."""
        return self.tokens_sampled / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the document of summary.json, whose numbers are rounded to meaningful digits."""
        document = asdict(self)
        document["wall_seconds"] = round(self.wall_seconds, 3)
        document["tokens_per_second"] = round(self.tokens_per_second, 1)
        return document


def summarize(trajectories: Iterable[Trajectory], wall_seconds: float) -> Summary:
    """Return the summary of a job's trajectories, which are read once.

    A group is informative if its rewards differ by more than rounding.
    """
    statuses: defaultdict[str, int] = defaultdict(int)
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    groups: set[str] = set()
    worked: defaultdict[str, float] = defaultdict(float)
    queued: defaultdict[str, float] = defaultdict(float)
    entered: defaultdict[str, int] = defaultdict(int)
    tokens = turns = truncated = total = 0
    for trajectory in trajectories:
        total += 1
        statuses[trajectory.status] += 1
        groups.add(trajectory.group_id)
        if trajectory.reward is not None:
            rewards[trajectory.group_id].append(trajectory.reward)
        tokens += trajectory.sampled_tokens
        turns += len(trajectory.turns)
        truncated += trajectory.truncated
        for stage in STAGES:
            timing = getattr(trajectory.timings, stage)
            entered[stage] += timing.attempts > 0 or timing.active_seconds > 0
            worked[stage] += timing.active_seconds
            queued[stage] += timing.queued_seconds
    values = [value for group in rewards.values() for value in group]
    return Summary(
        rollouts=total,
        succeeded=statuses["succeeded"],
        failed=statuses["failed"],
        cancelled=statuses["cancelled"],
        truncated=truncated,
        reward_mean=sum(values) / len(values) if values else None,
        groups=len(groups),
        groups_informative=sum(has_signal(group) for group in rewards.values()),
        tokens_sampled=tokens,
        turns_mean=turns / total if total else 0.0,
        wall_seconds=wall_seconds,
        stages={stage: StageSummary(entered[stage], worked[stage], queued[stage]) for stage in STAGES},
    )
