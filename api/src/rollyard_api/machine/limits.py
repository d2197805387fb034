"""The limits of a job: the fields of its spec that decisions about its rollouts need.

They are stored beside the spec, so that the whole spec need not be read for each report.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from rollyard_crds.rolloutjob import STAGES, RolloutJobSpec, StageName

_KEPT: Final = 1024
"""The number of jobs whose decoded limits are kept in memory."""


class SamplingRules(Struct, frozen=True):
    """The rules of dynamic sampling."""

    target_groups: int
    """The target number of informative groups; in a stream, that of one step unless the step says
    otherwise."""
    groups_in_flight: int
    """The largest number of groups that have started and have not ended."""
    max_groups: int | None
    """The largest number of groups that are started at all, or None."""
    metric: str
    """The reward or the component that must differ within an informative group."""
    min_std: float
    """The standard deviation of the metric above which a group is informative."""


class Limits(Struct, frozen=True):
    """All of a job's spec that decisions about its rollouts and groups need."""

    max_attempts: Mapping[StageName, int]
    """How often each stage of a rollout may fail; the last failure ends the rollout."""
    samples: int
    """The rollouts of each group."""
    min_group_size: int
    """The fewest members with a reward with which a group is delivered."""
    deadline_seconds: int | None = None
    """How long the job may be active, or None."""
    max_policy_lag: int | None = None
    """The most weight updates since a rollout entered Run, or None."""
    stale_rollouts: Literal["Restart", "Cancel"] = "Restart"
    """What becomes of a rollout beyond `max_policy_lag`."""
    trainer_reward_seconds: int | None = None
    """How long a rollout waits for the trainer's reward after Run, or None if Eval gives the rewards."""
    reward_service: dict[str, Any] | None = None
    """The `spec.reward.service` as JSON, or None."""
    sampling: SamplingRules | None = None
    """The rules of dynamic sampling, or None if the job does not use it."""
    harness: bool = False
    """Whether the agent is a harness, whose rollouts use the gateway in Run."""

    @classmethod
    def of(cls, spec: RolloutJobSpec) -> Limits:
        """Return the limits that a spec sets."""
        reward, sampling = spec.reward, spec.dynamic_sampling
        return cls(
            max_attempts={stage: getattr(spec.stages, stage).max_attempts for stage in STAGES},
            samples=spec.samples_per_task,
            min_group_size=spec.min_group_size,
            deadline_seconds=spec.active_deadline_seconds,
            max_policy_lag=spec.max_policy_lag,
            stale_rollouts=spec.stale_rollouts,
            trainer_reward_seconds=spec.trainer_reward_seconds,
            reward_service=None if reward is None or reward.service is None else reward.service.to_json(),
            sampling=None
            if sampling is None
            else SamplingRules(
                target_groups=sampling.target_groups,
                groups_in_flight=sampling.in_flight(spec.samples_per_task),
                max_groups=sampling.max_groups,
                metric=sampling.metric,
                min_std=sampling.min_std,
            ),
            harness=spec.agent.harness is not None,
        )


@lru_cache(maxsize=_KEPT)
def decoded(stored: bytes) -> Limits:
    """Return limits that were stored as JSON. Those that were read lately are not decoded again."""
    return msgspec.json.decode(stored, type=Limits)
