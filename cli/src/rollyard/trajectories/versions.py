"""The backends that sampled a job's tokens, and the policy versions under which they did so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollyard_crds.backendpool import BackendStatus
from rollyard_crds.trajectory import Trajectory
from rollyard_crds.weights import WeightUpdate


@dataclass(frozen=True, slots=True)
class BackendSummary:
    """The work of one backend for the job, and the backend's state at the job's end."""

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
    # A version that no update brought was in the servers from the start.
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
