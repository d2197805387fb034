"""The summary of a run, made from its trajectories: counts, rewards, tokens, times and policy versions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollyard_crds import STAGES
from rollyard_crds.backendpool import BackendStatus
from rollyard_crds.fields.signals import has_signal
from rollyard_crds.trajectory import Trajectory
from rollyard_crds.weights import WeightUpdate


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
        turns += sum(1 for _ in trajectory.every_turn)
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


@dataclass(frozen=True, slots=True)
class BackendSummary:
    """The work of one backend for the job, and the backend's state when the job ended."""

    url: str
    rollouts: int
    tokens_sampled: int
    policy_version: str
    prefix_cache_hit_rate: float | None
    """The share of prompt tokens that were cached, from the server's own metrics, or None if it has none."""
    tokens_per_second: float | None
    """The sampled tokens per second of one rollout's model time."""


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """The tokens that were sampled under one policy version."""

    version: str
    rollouts: int
    """The number of rollouts with at least one token of this version."""
    tokens: int
    lag: int
    """The number of weight updates between this version and the newest one."""


@dataclass(frozen=True, slots=True)
class UpdateSummary:
    """The summary of one weight update."""

    policy_version: str
    state: str
    verified: bool
    verified_by: str
    max_difference: float | None
    """The largest difference of a log-probability from the reference over all backends, in nats."""
    paused_seconds: float | None
    """The longest time in seconds that a backend sampled nothing."""
    seconds: float | None
    """The seconds from the request until the last backend was done."""


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """The backends, policy versions and weight updates of a job."""

    backends: list[BackendSummary]
    policy_versions: list[VersionSummary]
    rollouts_of_several_versions: int
    weight_updates: list[UpdateSummary]

    def to_json(self) -> dict[str, Any]:
        """Return the part of summary.json about policy versions."""
        return asdict(self)


def summarize_policies(
    trajectories: Iterable[Trajectory], backends: Sequence[BackendStatus], updates: Sequence[WeightUpdate]
) -> PolicySummary:
    """Return the summary of a job's trajectories, which are read once.

    Args:
        trajectories: The trajectories of the job.
        backends: The backends of the pool, as its status lists them.
        updates: The weight updates in the order of their requests.
    """
    rollouts: Counter[str] = Counter()
    sampled: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    holders: Counter[str] = Counter()
    several = 0
    for trajectory in trajectories:
        rollouts[trajectory.backend] += 1
        sampled[trajectory.backend] += trajectory.sampled_tokens
        own: Counter[str] = Counter()
        for segment in trajectory.segments:
            pairs = zip(segment.policy_versions, segment.loss_mask, strict=True)
            own.update(version for version, mask in pairs if mask)
        tokens.update(own)
        holders.update(own.keys())
        several += len(own) > 1
    # A version that no update brought was on the servers from the start.
    brought = [update.policy_version for update in updates]
    order = [*(version for version in tokens if version not in brought), *brought]
    newest = len(order) - 1
    return PolicySummary(
        backends=[
            BackendSummary(
                url=backend.url,
                rollouts=rollouts[backend.url],
                tokens_sampled=sampled[backend.url],
                policy_version=backend.policy_version,
                prefix_cache_hit_rate=backend.prefix_cache_hit_rate,
                tokens_per_second=backend.tokens_per_second,
            )
            for backend in backends
        ],
        policy_versions=[
            VersionSummary(version, holders[version], tokens[version], newest - index)
            for index, version in enumerate(order)
        ],
        rollouts_of_several_versions=several,
        weight_updates=[_update(update) for update in updates],
    )


def _update(update: WeightUpdate) -> UpdateSummary:
    differences = [
        backend.max_difference for backend in update.backends if backend.max_difference is not None
    ]
    pauses = [backend.paused_seconds for backend in update.backends if backend.paused_seconds is not None]
    took = None if update.finished_at is None else (update.finished_at - update.created_at).total_seconds()
    return UpdateSummary(
        policy_version=update.policy_version,
        state=update.state,
        verified=update.verified,
        verified_by=update.verified_by,
        max_difference=max(differences, default=None),
        paused_seconds=max(pauses, default=None),
        seconds=took,
    )
