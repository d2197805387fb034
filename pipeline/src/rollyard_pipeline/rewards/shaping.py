"""The reward of a job that says how it is made: components are added to the handler's, and weighted.

A reward function or a reward service gets the episode as a JSON object of bounded size. The control plane
asks a service on behalf of the worker. The scores of both are checked before they count.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

from rollyard_crds.fields.reward import (
    COMPONENT_PATTERN,
    FUNCTION,
    HANDLER,
    MAX_COMPONENTS,
    OVERLONG,
    RESERVED,
    SERVICE,
    RewardFunctionSpec,
    RewardServiceSpec,
    RewardSpec,
)
from rollyard_crds.fields.signals import TEST_TIMEOUT_COMPONENT
from rollyard_crds.lease import Lease, RewardRequest
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Message
from rollyard_crds.trajectory import MAX_REWARD
from rollyard_process.backoff import Backoff

from rollyard_pipeline.child_processes import ChildProcesses
from rollyard_pipeline.control_plane.calls import WorkerCalls, persistent
from rollyard_pipeline.errors import ChildFailed, PermanentFailure, PipelineError, TaskInvalid
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.registry import REWARD_FUNCTIONS, Registry
from rollyard_pipeline.rewards.components import component_problems
from rollyard_pipeline.rewards.format_checks import FormatChecks, own_texts
from rollyard_pipeline.sabotage import FORMAT_TIMEOUT
from rollyard_pipeline.trajectories.sanitize import clean_text

_PAUSES: Final = Backoff(first=0.2, longest=5.0, jitter=0.5)
"""The pauses between requests to a service that gave no score."""


async def service_score(
    control: WorkerCalls, lease: Lease, service: RewardServiceSpec, episode: dict[str, Any]
) -> dict[str, Any]:
    """Return what the service says about an episode, after at most `maxAttempts` requests.

    While the control plane does not answer, this waits; the caller limits the time.

    Raises:
        PipelineError: The service gave no score, or may not be asked.
    """
    request = RewardRequest(rollout=lease.rollout, token=lease.token, episode=episode)
    attempts = 0
    while True:
        answer = await persistent(lambda: control.reward(request, service.timeout_seconds))
        if not answer.error:
            return {"reward": answer.reward, "components": answer.components}
        attempts += 1
        if attempts >= service.max_attempts or not answer.retryable:
            tries = "1 try" if attempts == 1 else f"{attempts} tries"
            raise PipelineError(
                f"the reward service gave no score in {tries}; last: {answer.error}", "RewardServiceFailed"
            )
        await asyncio.sleep(_PAUSES.pause(attempts))


MAX_TEXT: Final = 1 << 18
"""The number of characters of a text beyond which its middle is left out."""
MAX_MESSAGES: Final = 2 << 20
"""The number of characters of all messages together beyond which the earliest are left out."""
MAX_METADATA: Final = 1 << 20
"""The largest number of characters of a task's metadata as JSON."""
_GAP: Final = "\n[…]\n"


def episode_document(context: StageContext, evaluation: Evaluation) -> dict[str, Any]:
    """Return what is sent about an episode that the handler has evaluated.

    A long episode is shortened and never refused, because a policy could otherwise escape a bad score.

    Raises:
        TaskInvalid: The task's metadata is too large.
    """
    task, trajectory = context.task, context.trajectory
    metadata = task.model_dump_json(include={"metadata"})
    if len(metadata) > MAX_METADATA:
        raise TaskInvalid(
            f"task '{task.id}': metadata: has {len(metadata)} characters of JSON; {MAX_METADATA} are sent to "
            "reward functions and services at most"
        )
    messages, dropped = _messages(trajectory.messages if trajectory is not None else task.chat())
    return {
        "rollout": context.rollout,
        "job": trajectory.job if trajectory is not None else "",
        "namespace": trajectory.namespace if trajectory is not None else "",
        "task": {
            "id": task.id,
            "answer": task.answer,
            "answers": task.answers,
            "metadata": task.metadata,
        },
        "sample_index": context.sample_index,
        "messages": messages,
        "messages_dropped": dropped,
        "answer": None if context.answer is None else _shortened(context.answer),
        "final_text": _shortened(context.final_text),
        "thought": _shortened(context.thought),
        "reward": float(evaluation.reward),
        "reward_reason": evaluation.reason,
        "components": {name: float(value) for name, value in evaluation.components.items()},
        "sampled_tokens": trajectory.sampled_tokens if trajectory is not None else 0,
        "truncated": trajectory.truncated if trajectory is not None else False,
        "truncated_reason": trajectory.truncated_reason if trajectory is not None else "",
    }


def _messages(messages: list[Message]) -> tuple[list[dict[str, Any]], int]:
    """Return the latest messages that there is room for, and the number of the earlier ones."""
    latest: list[dict[str, Any]] = []
    room = MAX_MESSAGES
    for message in reversed(messages):
        shown = message.model_dump(mode="json", exclude_none=True)
        shown["content"] = _shortened(message.content)
        if message.reasoning_content:
            shown["reasoning_content"] = _shortened(message.reasoning_content)
        if message.tool_calls and len(message.model_dump_json(include={"tool_calls"})) > MAX_TEXT:
            del shown["tool_calls"]
        room -= len(shown["content"]) + len(shown.get("reasoning_content", ""))
        room -= len(str(shown.get("tool_calls", "")))
        if latest and room < 0:
            break
        latest.append(shown)
    return latest[::-1], len(messages) - len(latest)


def _shortened(text: str) -> str:
    half = (MAX_TEXT - len(_GAP)) // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]}{_GAP}{text[-half:]}"


_NAME: Final = re.compile(COMPONENT_PATTERN)
_SHOWN: Final = 80  # Characters of a wrong value in a message.


def checked_score(
    answer: Mapping[str, Any],
    *,
    name: str,
    required: Collection[str],
    taken: Collection[str],
    source: str,
    failed: str,
) -> dict[str, float]:
    """Return a score as components: the reward under `name`, and the components that came with it.

    Args:
        answer: An object with `reward` and, where there are any, `components`.
        name: The component that holds the reward.
        required: The components that are required.
        taken: The names that others have.
        source: Who gave the score, for messages.
        failed: The reason of the exception for a score that cannot be used.

    Raises:
        PipelineError: A value is not a finite number of at most 10⁶ in size, or a component is missing or has
            a name that it must not have.
    """
    components = answer.get("components") or {}
    if not isinstance(components, dict) or len(components) > MAX_COMPONENTS:
        words = f"'components' must be an object of at most {MAX_COMPONENTS} numbers"
        raise PipelineError(f"{source}: {words}", failed)
    checked = {name: _number(answer.get("reward"), "reward", source, failed)}
    for key, value in components.items():
        if len(key) > 128 or _NAME.match(key) is None or key in RESERVED or key in taken:
            words = f"{_shown(key)} is not a name that a component of it may have"
            raise PipelineError(f"{source}: {words}", failed)
        checked[key] = _number(value, f"component '{key}'", source, failed)
    missing = sorted(set(required) - checked.keys())
    if missing:
        raise PipelineError(f"{source}: component '{missing[0]}' is missing", failed)
    return checked


def _number(value: Any, field: str, source: str, failed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _in_range(value):
        words = f"{field} is {_shown(value)}, expected a number of at most {MAX_REWARD:,.0f} in size"
        raise PipelineError(f"{source}: {words}", failed)
    return float(value)


def _in_range(value: int | float) -> bool:
    return (isinstance(value, int) or math.isfinite(value)) and -MAX_REWARD <= value <= MAX_REWARD


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""A function that sends an episode to the job's reward service, and returns its answer."""
_FUNCTION_PROCESSES: Final = 2


class Rewards:
    """Makes rewards, and keeps the processes that this needs. A worker has one.

    Args:
        extensions: Returns what finds the reward function of a job.
        format_checks: Checks forms.
    """

    def __init__(
        self, extensions: Callable[[RolloutJobSpec], Registry], format_checks: FormatChecks | None = None
    ) -> None:
        self._extensions = extensions
        self._format = format_checks or FormatChecks()
        self._functions: dict[str, ChildProcesses] = {}

    async def check(self, handler: Handler, spec: RolloutJobSpec) -> None:
        """Check the names of a job's components, before anything is spent on a rollout.

        Raises:
            PermanentFailure: A name stands for nothing, or for two components, or the reward function is not
                installed here.
            ChildFailed: The reward function cannot be loaded.
        """
        if spec.reward is not None:
            self._refuse(spec.reward, handler, await self._declared(spec))

    def _refuse(self, reward: RewardSpec, handler: Handler, declared: tuple[str, ...]) -> None:
        problems = component_problems(reward, handler.components, declared)
        if problems:
            raise PermanentFailure(problems[0], "RewardComponentUnknown")

    async def _declared(self, spec: RolloutJobSpec) -> tuple[str, ...]:
        if spec.reward is None or spec.reward.function is None:
            return ()
        about = await self._children(spec, spec.reward.function).greeting()
        return tuple(about.get("components", ()))

    def _children(self, spec: RolloutJobSpec, function: RewardFunctionSpec) -> ChildProcesses:
        target = self._extensions(spec).target(REWARD_FUNCTIONS, function.name)
        if target not in self._functions:
            self._functions[target] = ChildProcesses(
                "rollyard_pipeline.rewards.function_process",
                target,
                what=f"the reward function '{function.name}'",
                failed="RewardFunctionFailed",
                timeout="RewardFunctionTimeout",
                count=_FUNCTION_PROCESSES,
            )
        return self._functions[target]

    async def shaped(
        self, handler: Handler, context: StageContext, evaluation: Evaluation, ask: Ask | None
    ) -> Evaluation:
        """Return the evaluation with the components and the reward that the job's `reward` makes of it.

        This includes an evaluation that gave 0 because the policy made it impossible: breaking the sandbox
        would otherwise avoid a penalty.

        Args:
            handler: The handler that has evaluated.
            context: The context of Eval.
            evaluation: What the handler returned.
            ask: Sends an episode to the reward service. It may be None if the job has none.

        Raises:
            PermanentFailure: A name stands for nothing or for two components, or the sum is too large.
            PipelineError: The infrastructure failed.
        """
        reward = context.spec.reward
        if reward is None:
            return evaluation
        declared = await self._declared(context.spec)
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
                raise PipelineError(
                    "there is no control plane that could ask the reward service", "RewardServiceFailed"
                )
            added |= checked_score(
                await ask(episode_document(context, evaluation)),
                name=SERVICE,
                required=reward.service.components,
                taken=taken,
                source="the reward service",
                failed="RewardServiceFailed",
            )
        clashes = sorted(components.keys() & added.keys())
        if clashes:
            raise PermanentFailure(
                f"handler '{context.spec.handler}': component '{clashes[0]}' is reserved", "EvaluationInvalid"
            )
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
        source = f"the reward function '{function.name}'"
        answer = await self._children(context.spec, function).ask(
            episode_document(context, evaluation), function.timeout_seconds
        )
        if "error" in answer:
            failed = ChildFailed(f"{source} raised {answer['error']}", "RewardFunctionFailed")
            failed.add_note(clean_text(str(answer.get("trace", ""))))
            raise failed
        return checked_score(
            answer,
            name=FUNCTION,
            required=declared,
            taken=taken,
            source=source,
            failed="RewardFunctionFailed",
        )

    async def close(self) -> None:
        """End all processes."""
        await self._format.close()
        for children in self._functions.values():
            await children.close()


def _weighted(reward: RewardSpec, components: dict[str, float]) -> float:
    """Return the sum of the components by their weights, and of the overlong penalty.

    Raises:
        PermanentFailure: It is too large.
    """
    # A component that the handler left out counts as 0. Its name was checked.
    weighted = [weight * components.get(name, 0.0) for name, weight in reward.effective_weights.items()]
    total = math.fsum([*weighted, components.get(OVERLONG, 0.0)])
    if not abs(total) <= MAX_REWARD:
        raise PermanentFailure(
            f"spec.reward.weights: the reward is {total!r}, expected at most {MAX_REWARD:,.0f} in size",
            "EvaluationInvalid",
        )
    return total
