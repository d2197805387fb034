"""Which signals the samples of a task can give: what is evaluated, and how far apart its values can be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rollyard_crds.fields.dynamic_sampling import MIN_STD, REWARD
from rollyard_crds.fields.harbor import IGNORED_KEYS, UNKNOWN_KEYS
from rollyard_crds.fields.reward import HANDLER, OVERLONG, RESERVED, RewardSpec
from rollyard_crds.fields.swe_tests import DROPPED_TESTS
from rollyard_crds.trajectory import MAX_REWARD

if TYPE_CHECKING:
    from rollyard_crds.rolloutjob import RolloutJobSpec
    from rollyard_crds.task import Task

TEST_TIMEOUT_COMPONENT: Final = "test_timeout"
"""The component that Eval itself adds to those of every handler where tests ran out of time."""
OUT_OF_REACH: Final = "TargetOutOfReach"
"""The reason for which a job is refused whose dynamic sampling can never reach its target."""
Bounds = tuple[float, float]
"""The smallest and the largest value."""
_SHARE: Final[Bounds] = (0.0, 1.0)
_ANY: Final[Bounds] = (-MAX_REWARD, MAX_REWARD)
_NAMED: Final = 10  # The most names that a warning shows.


@dataclass(frozen=True, slots=True)
class Scores:
    """All that the evaluations of a handler return."""

    reward: Bounds
    components: tuple[str, ...] = ()
    """The names of the components, which are all from 0 to 1."""


SHIPPED: Final[Mapping[str, Scores]] = {
    "code": Scores(_SHARE, ("tests_passed",)),
    "math": Scores(_SHARE, ("answered", "verify_timeout")),
    "shell": Scores(_SHARE, ("exit_zero",)),
    "stem": Scores(_SHARE, ("answered",)),
    "swe": Scores(_SHARE, ("fail_to_pass", "pass_to_pass", "patch_applied")),
    "unscored": Scores((0.0, 0.0)),
}
"""The handlers of which this is known before a task has been evaluated. `harbor`, and so `mixed`, return what
the tests of a task write."""


def has_signal(values: Sequence[float], min_std: float = MIN_STD) -> bool:
    """Return whether the standard deviation of a group's values is larger than `min_std`.

    The deviation is that of the whole population, as `numpy.std` computes it. Fewer than two values have no
    signal.
    """
    return len(values) > 1 and statistics.pstdev(values) > min_std


def problems(spec: RolloutJobSpec, groups: int | None) -> list[str]:
    """Return why the target of a job's dynamic sampling is provably out of reach.

    Each line begins with the name of a field, and says what would be right. There are none for a job
    without dynamic sampling.

    Args:
        spec: The spec of the job.
        groups: The number of tasks of the job, or None if it is not known, as for a stream.
    """
    sampling = spec.dynamic_sampling
    if sampling is None:
        return []
    lines = []
    if groups is not None and groups < sampling.target_groups:
        lines.append(
            f"spec.dynamicSampling.targetGroups: must be at most {groups}, which is how many tasks the job "
            f"has (got {sampling.target_groups})"
        )
    if not _may_exist(sampling.metric, spec):
        lines.append(
            f"spec.dynamicSampling.metric: there is no component {sampling.metric!r}; there are "
            f"{', '.join(sorted(_stated(spec)))}"
        )
        return lines
    low, high = _bounds(sampling.metric, spec)
    # Half of the values at either end deviate most. Infrastructure failures may leave an even number of them.
    most = (high - low) / 2
    if not most:
        lines.append(
            f"spec.dynamicSampling.metric: {sampling.metric!r} is {low:g} in every rollout of this job, "
            "which is not a signal"
        )
    elif sampling.min_std >= most:
        lines.append(
            f"spec.dynamicSampling.minStd: must be less than {most:g}, because {sampling.metric!r} is from "
            f"{low:g} to {high:g}, and no such values have a larger standard deviation "
            f"(got {sampling.min_std:g})"
        )
    return lines


def warnings_of(spec: RolloutJobSpec, tasks: Sequence[Task] = ()) -> list[str]:
    """Return what a spec is allowed to have but hardly means; each line begins with the name of a field.

    Args:
        spec: The spec of the job.
        tasks: The tasks of its file, where that has been read. Tasks in the spec itself are always checked.
    """
    warnings = []
    if spec.samples_per_task > 1 and not spec.sampling.temperature and spec.agent.type != "oracle":
        warnings.append(
            f"spec.sampling.temperature: at 0 the {spec.samples_per_task} samples of a task are alike, "
            "unless tools or servers answer differently; a group of equal rewards teaches nothing"
        )
    field = "spec.tasks.url" if spec.tasks.inline is None else "spec.tasks.inline"
    return warnings + [f"{field}: {warning}" for warning in task_warnings(spec.tasks.inline or tasks)]


def task_warnings(tasks: Sequence[Task]) -> list[str]:
    """Return what a list of tasks is allowed to have but hardly means."""
    warnings = []
    printed = sum(task.swe is not None and task.swe.verdict == "log" for task in tasks)
    if printed:
        warnings.append(
            f"tasks whose swe.verdict is 'log': {printed}. It believes what tests print, and the policy's "
            "code can print the same"
        )
    dropped = [
        (task.id, names)
        for task in tasks
        if task.swe is not None and isinstance(names := task.metadata.get(DROPPED_TESTS), list)
    ]
    if dropped:
        first, names = dropped[0]
        warnings.append(
            f"tasks whose row names tests that no test runner reports, which were left out: {len(dropped)}. "
            f"The first is {first!r}, with {', '.join(map(ascii, names[:_NAMED]))}"
        )
    return warnings + _folder_warnings(tasks)


def _folder_warnings(tasks: Sequence[Task]) -> list[str]:
    """Return which keys of `task.toml` have no effect, for task folders in the format of Harbor."""
    warnings = []
    for metadata_key, description in (
        (UNKNOWN_KEYS, "keys that are not known here and have no effect"),
        (IGNORED_KEYS, "keys that the job's tasks.harbor leaves out"),
    ):
        affected = [
            (task.id, keys)
            for task in tasks
            if isinstance(keys := task.metadata.get(metadata_key), dict | list) and keys
        ]
        if not affected:
            continue
        first, keys = affected[0]
        suggestions = keys if isinstance(keys, dict) else {}
        shown = [
            f"{str(key)[:200]} (did you mean {str(suggestions[key])[:200]}?)"
            if suggestions.get(key)
            else str(key)[:200]
            for key in list(keys)[:_NAMED]
        ]
        warnings.append(
            f"task folders whose task.toml has {description}: {len(affected)}. The first is {first!r}: "
            f"{ascii(', '.join(shown))[1:-1]}"
        )
    return warnings


def _stated(spec: RolloutJobSpec) -> set[str]:
    """Return the names of the metrics that the handler and the section `reward` are known to have."""
    own = frozenset[str]() if spec.reward is None else spec.reward.own_components()
    shipped = SHIPPED.get(spec.handler)
    return {REWARD, TEST_TIMEOUT_COMPONENT, *own, *(() if shipped is None else shipped.components)}


def _may_exist(metric: str, spec: RolloutJobSpec) -> bool:
    if spec.handler not in SHIPPED or metric in _stated(spec):
        return True
    # A reward function, a service and a trainer may give components that are declared nowhere, but none of
    # these names.
    scored = spec.reward is not None and (spec.reward.function or spec.reward.service) is not None
    return (scored or spec.trainer_reward_seconds is not None) and metric not in RESERVED


def _bounds(metric: str, spec: RolloutJobSpec) -> Bounds:
    """Return the bounds of a metric. They hold 0, which stands for a component that was left out."""
    if spec.trainer_reward_seconds is not None:
        return _ANY
    shipped, reward = SHIPPED.get(spec.handler), spec.reward
    of_handler = _ANY if shipped is None else shipped.reward
    if metric == REWARD:
        return of_handler if reward is None else _weighted(reward, spec)
    if reward is not None and metric == HANDLER:
        return of_handler
    if reward is not None and reward.overlong is not None and metric == OVERLONG:
        return (-reward.overlong.factor, 0.0)
    shares = () if reward is None else tuple(check.name for check in reward.format)
    if shipped is not None:
        shares = (*shares, *shipped.components, TEST_TIMEOUT_COMPONENT)
    return _SHARE if metric in shares else _ANY


def _weighted(reward: RewardSpec, spec: RolloutJobSpec) -> Bounds:
    terms = [
        sorted(weight * bound for bound in _bounds(name, spec))
        for name, weight in reward.effective_weights.items()
    ]
    if reward.overlong is not None:
        terms.append([-reward.overlong.factor, 0.0])
    low, high = math.fsum(term[0] for term in terms), math.fsum(term[1] for term in terms)
    return max(low, -MAX_REWARD), min(high, MAX_REWARD)
