"""Which components a job's reward may name: a pure check, for workers and for `rollyard validate`."""

from __future__ import annotations

from collections.abc import Collection

from rollyard_crds.fields.reward import FUNCTION, RewardSpec
from rollyard_crds.fields.signals import TEST_TIMEOUT_COMPONENT


def component_problems(
    reward: RewardSpec, of_handler: Collection[str], of_function: Collection[str] = ()
) -> list[str]:
    """Return what is wrong with the names of components; each line begins with the name of the field.

    Args:
        reward: The job's section `reward`.
        of_handler: The components that the handler declares.
        of_function: The components that the reward function declares.
    """
    handlers = {*of_handler, TEST_TIMEOUT_COMPONENT}
    own = reward.own_components()
    problems = [
        f"spec.reward.format[{number}].name: the handler has a component '{check.name}', too"
        for number, check in enumerate(reward.format)
        if check.name in handlers
    ]
    if reward.service is not None:
        clashes = sorted((handlers | {check.name for check in reward.format}) & {*reward.service.components})
        problems += [f"spec.reward.service.components: '{name}' has another meaning" for name in clashes]
    if reward.function is not None:
        clashes = sorted((handlers | own) & {*of_function})
        problems += [f"spec.reward.{FUNCTION}: component '{name}' has another meaning" for name in clashes]
    known = own | handlers | {*of_function}
    for name in reward.weights or {}:
        if name not in known:
            problems.append(
                f"spec.reward.weights: there is no component '{name}'; there are {', '.join(sorted(known))}"
            )
    return problems
