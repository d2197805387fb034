"""The next step of a job: which groups start, whether it pauses, and when it is over.

With dynamic sampling, groups without a signal are filtered, and others start until the target is met. While
it is not met, as many groups as the job allows are in flight: any of them may prove to be without a signal,
so each of them may still be needed.
"""

from __future__ import annotations

from msgspec import Struct
from rollyard_crds.fields.dynamic_sampling import TARGET_MET, TARGET_NOT_MET

from rollyard_api.machine.limits import Limits


def prefix_of(name: str, uid: str) -> str:
    """Return the beginning of the ids of a job's rollouts."""
    return f"{name}-{uid[:8]}"


class SamplingState(Struct, frozen=True):
    """What the next step of a job with dynamic sampling depends on. The fields have the names of columns."""

    name: str
    uid: str
    limits: Limits
    groups: int
    """The groups of the job, of which those with a number below `started` have rollouts."""
    started: int
    groups_ended: int
    informative: int
    target: int
    """The target number of informative groups in all steps together."""
    closed: bool
    """Whether no more tasks or steps come."""
    holding: bool
    """Whether no rollout may begin; see `Step.holds`."""


class Step(Struct, frozen=True):
    """What a job with dynamic sampling does next."""

    start: range = range(0)
    """The numbers of the groups that start now."""
    holds: bool = False
    """Whether no rollout may begin, because the target of the stream's last step is met."""
    concludes: str | None = None
    """The reason with which the job ends now, or None."""


def next_step(job: SamplingState) -> Step:
    """Return which groups start, or why the job is concluded."""
    rules = job.limits.sampling
    assert rules is not None, f"{job.name} has no dynamic sampling"
    if job.informative >= job.target:
        return Step(concludes=TARGET_MET) if job.closed else Step(holds=True)
    most = job.groups if rules.max_groups is None else min(job.groups, rules.max_groups)
    in_flight = job.started - job.groups_ended
    starting = min(most - job.started, rules.groups_in_flight - in_flight)
    if starting > 0:
        return Step(start=range(job.started, job.started + starting))
    if in_flight == 0 and (job.closed or most == rules.max_groups):
        return Step(concludes=TARGET_NOT_MET)
    return Step()
