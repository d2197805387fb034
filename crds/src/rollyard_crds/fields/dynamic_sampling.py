"""Dynamic sampling: a job runs until enough of its groups have a signal."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import ConfigDict, Field, model_validator

from rollyard_crds.base import Model, cel

REWARD: Final = "reward"
"""The metric that stands for the reward itself."""
MIN_STD: Final = 1e-9
"""The largest standard deviation of values that differ only by the rounding of sums."""
MAX_STEP_GROUPS: Final = 100_000
"""The largest target of one step, in groups."""
MAX_IN_FLIGHT_ROLLOUTS: Final = 16_384
"""The largest product of `maxInFlightGroups` and `samplesPerTask`."""
TARGET_MET: Final = "TargetMet"
"""The reason of a job that reached its target, and of the rollouts that were cancelled because of it."""
TARGET_NOT_MET: Final = "TargetNotMet"
"""The reason of a job that ran out of groups before it reached its target."""
_ORDERED: Final = "'maxGroups' must be at least 'targetGroups'"
_NEEDS_SAMPLES: Final = (
    "'dynamicSampling' compares the samples of a task: 'samplesPerTask' must be at least 2"
)
_TOO_MANY: Final = (
    f"'dynamicSampling.maxInFlightGroups' times 'samplesPerTask' must be at most {MAX_IN_FLIGHT_ROLLOUTS}"
)
JOB_RULES: Final = (
    (
        "has(self.dynamicSampling) == has(oldSelf.dynamicSampling)",
        "'dynamicSampling' is immutable: delete the job and create it again",
    ),
    ("!has(self.dynamicSampling) || self.samplesPerTask >= 2", _NEEDS_SAMPLES),
    (
        "!has(self.dynamicSampling) || !has(self.dynamicSampling.maxInFlightGroups) || "
        f"self.dynamicSampling.maxInFlightGroups * self.samplesPerTask <= {MAX_IN_FLIGHT_ROLLOUTS}",
        _TOO_MANY,
    ),
)
"""CEL rules of a job's spec, which say the same as `DynamicSampling.check`."""


class DynamicSampling(Model):
    """How many groups with a signal are wanted, and how many groups are tried at once and in all."""

    model_config = ConfigDict(
        json_schema_extra=cel(("!has(self.maxGroups) || self.maxGroups >= self.targetGroups", _ORDERED))
    )

    target_groups: Annotated[int, Field(ge=1, le=MAX_STEP_GROUPS)]
    """The job ends when this many groups have a signal. In a stream: the target of a step that names none."""
    max_in_flight_groups: Annotated[int, Field(ge=1, le=8192)] | None = None
    """Groups that are in flight at once until the target is met; default: twice `targetGroups`. Together
    with `samplesPerTask` it bounds what is thrown away at the end."""
    metric: Annotated[str, Field(min_length=1, max_length=128)] = REWARD
    """What must differ within a group: `reward`, or the name of a reward component."""
    min_std: Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)] = MIN_STD
    """A group has a signal if the standard deviation of its metric is larger than this. The default is the
    rounding of sums, such as 0.1 + 0.2."""
    max_groups: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """The most groups that are started in all; in a stream, in all steps together. Default: all tasks."""

    @model_validator(mode="after")
    def _reachable(self) -> DynamicSampling:
        if self.max_groups is not None and self.max_groups < self.target_groups:
            raise ValueError(_ORDERED)
        return self

    def in_flight(self, samples: int) -> int:
        """Return how many groups of `samples` rollouts are in flight at once: the field or its default."""
        if self.max_in_flight_groups is not None:
            return self.max_in_flight_groups
        return max(1, min(2 * self.target_groups, MAX_IN_FLIGHT_ROLLOUTS // samples))

    def check(self, samples: int) -> None:
        """Check the fields against the job's number of samples per task.

        Raises:
            ValueError: There is nothing to compare, or too many rollouts would be in flight.
        """
        if samples < 2:
            raise ValueError(_NEEDS_SAMPLES)
        if self.in_flight(samples) * samples > MAX_IN_FLIGHT_ROLLOUTS:
            raise ValueError(_TOO_MANY)


class DynamicSamplingStatus(Model):
    """How far dynamic sampling has got, and what it has thrown away."""

    target_groups: Annotated[int, Field(ge=0)] = 0
    """The target number of groups with a signal; in a stream, the sum over all steps so far."""
    informative_groups: Annotated[int, Field(ge=0)] = 0
    """Groups that ended with a signal."""
    uninformative_groups: Annotated[int, Field(ge=0)] = 0
    """Groups that ended without a signal."""
    dropped_groups: Annotated[int, Field(ge=0)] = 0
    """Groups that ended with too few rewards, for infrastructure reasons or because somebody asked."""
    surplus_groups: Annotated[int, Field(ge=0)] = 0
    """Groups that were cancelled because the target was met."""
    in_flight_groups: Annotated[int, Field(ge=0)] = 0
    """Groups that have started and have not ended."""
    waiting_groups: Annotated[int, Field(ge=0)] = 0
    """Tasks whose group has not started."""
    surplus_rollouts: Annotated[int, Field(ge=0)] = 0
    """Rollouts that were cancelled because the target was met. They count in no fraction of failures."""
    discarded_tokens: Annotated[int, Field(ge=0)] = 0
    """Sampled tokens of groups that ended without being informative, from Runs that were complete."""
