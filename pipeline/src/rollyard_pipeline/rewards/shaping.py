"""The reward of a job that says how it is made: components are added to the handler's, and weighed."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Final

from rollyard_crds.fields.reward import FUNCTION, HANDLER, OVERLONG, SERVICE, RewardFunctionSpec, RewardSpec
from rollyard_crds.fields.signals import TEST_TIMEOUT_COMPONENT
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.trajectory import MAX_REWARD

from rollyard_pipeline.child_processes import ChildProcesses
from rollyard_pipeline.errors import (
    EvaluationInvalid,
    RewardComponentUnknown,
    RewardFunctionFailed,
    RewardFunctionTimeout,
    RewardServiceFailed,
)
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.registry import REWARD_FUNCTIONS, Registry
from rollyard_pipeline.rewards.components import component_problems
from rollyard_pipeline.rewards.episode import episode_document
from rollyard_pipeline.rewards.format_checks import FormatChecks, own_texts
from rollyard_pipeline.rewards.scores import checked_score
from rollyard_pipeline.sabotage import FORMAT_TIMEOUT

Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""A function that sends an episode to the job's reward service, and returns its answer."""
_FUNCTION_PROCESSES: Final = 2


class Rewards:
    """Makes rewards, and keeps the processes that this needs. A worker has one.

    Args:
        extensions: Finds reward functions.
        format_checks: Checks forms.
    """

    def __init__(self, extensions: Registry, format_checks: FormatChecks | None = None) -> None:
        self._extensions = extensions
        self._format = format_checks or FormatChecks()
        self._functions: dict[str, ChildProcesses] = {}

    async def check(self, handler: Handler, spec: RolloutJobSpec) -> None:
        """Check the names of a job's components, before anything is spent on a rollout.

        Raises:
            RewardComponentUnknown: A name stands for nothing, or for two components.
            ExtensionError: The reward function is not installed here.
            RewardFunctionFailed: The reward function cannot be loaded.
        """
        if spec.reward is not None:
            self._refuse(spec.reward, handler, await self._declared(spec.reward))

    def _refuse(self, reward: RewardSpec, handler: Handler, declared: tuple[str, ...]) -> None:
        problems = component_problems(reward, handler.components, declared)
        if problems:
            raise RewardComponentUnknown(problems[0])

    async def _declared(self, reward: RewardSpec) -> tuple[str, ...]:
        if reward.function is None:
            return ()
        about = await self._children(reward.function).greeting()
        return tuple(about.get("components", ()))

    def _children(self, function: RewardFunctionSpec) -> ChildProcesses:
        target = self._extensions.target(REWARD_FUNCTIONS, function.name)
        if target not in self._functions:
            self._functions[target] = ChildProcesses(
                "rollyard_pipeline.rewards.function_process",
                target,
                what=f"the reward function '{function.name}'",
                failed=RewardFunctionFailed,
                timeout=RewardFunctionTimeout,
                count=_FUNCTION_PROCESSES,
            )
        return self._functions[target]

    async def shaped(
        self, handler: Handler, context: StageContext, evaluation: Evaluation, ask: Ask | None
    ) -> Evaluation:
        """Return the evaluation with the components and the reward that the job's `reward` makes of it.

        It also holds for an evaluation that gave 0 because the policy made it impossible: a penalty would
        otherwise be avoided by breaking the sandbox.

        Args:
            handler: The handler that has evaluated.
            context: The context of Eval.
            evaluation: What the handler returned.
            ask: Sends an episode to the reward service. It may be None if the job has none.

        Raises:
            RewardComponentUnknown: A name stands for nothing, or for two components.
            RewardFunctionFailed, RewardServiceFailed, FormatCheckFailed: The infrastructure failed.
            EvaluationInvalid: The weighted sum is too large.
        """
        reward = context.spec.reward
        if reward is None:
            return evaluation
        declared = await self._declared(reward)
        self._refuse(reward, handler, declared)
        components = {name: float(value) for name, value in evaluation.components.items()}
        of_handler = frozenset(components) | {*handler.components, TEST_TIMEOUT_COMPONENT}
        added: dict[str, float] = {HANDLER: float(evaluation.reward)}
        reason = evaluation.reason
        if reward.overlong is not None:
            tokens = context.trajectory.sampled_tokens if context.trajectory is not None else 0
            added[OVERLONG] = reward.overlong.penalty(tokens)
        texts = own_texts(context.task, context.trajectory)
        for check in reward.format:
            kept, decided = await self._format.kept(check, texts)
            added[check.name] = float(kept)
            if not decided:
                reason = reason or FORMAT_TIMEOUT
        taken = frozenset({*of_handler, *added})
        if reward.function is not None:
            added |= await self._function_score(reward.function, context, evaluation, declared, taken)
        if reward.service is not None:
            if ask is None:
                raise RewardServiceFailed("there is no control plane that could ask the reward service")
            added |= checked_score(
                await ask(episode_document(context, evaluation)),
                name=SERVICE,
                wanted=reward.service.components,
                taken=taken,
                what="the reward service",
                failed=RewardServiceFailed,
            )
        clashes = sorted(components.keys() & added.keys())
        if clashes:
            raise EvaluationInvalid(f"handler '{context.spec.handler}': component '{clashes[0]}' is reserved")
        components |= added
        return Evaluation(_weighted(reward, components), components, reason)

    async def _function_score(
        self,
        function: RewardFunctionSpec,
        context: StageContext,
        evaluation: Evaluation,
        declared: tuple[str, ...],
        taken: frozenset[str],
    ) -> dict[str, float]:
        what = f"the reward function '{function.name}'"
        answer = await self._children(function).ask(
            episode_document(context, evaluation), function.timeout_seconds
        )
        if "error" in answer:
            raise RewardFunctionFailed(f"{what} raised {answer['error']}")
        return checked_score(
            answer, name=FUNCTION, wanted=declared, taken=taken, what=what, failed=RewardFunctionFailed
        )

    async def close(self) -> None:
        """End all processes."""
        await self._format.close()
        for children in self._functions.values():
            await children.close()


def _weighted(reward: RewardSpec, components: dict[str, float]) -> float:
    """Return the sum of the components by their weights, and of the overlong penalty.

    Raises:
        EvaluationInvalid: It is too large.
    """
    # A component that the handler left out counts as 0. Its name was checked.
    weighted = [weight * components.get(name, 0.0) for name, weight in reward.effective_weights.items()]
    total = math.fsum([*weighted, components.get(OVERLONG, 0.0)])
    if not abs(total) <= MAX_REWARD:
        raise EvaluationInvalid(
            f"spec.reward.weights: the reward is {total!r}, expected at most {MAX_REWARD:,.0f} in size"
        )
    return total
