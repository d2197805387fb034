"""Kept trajectories are evaluated again, without a new rollout and without a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from rollyard_crds.fields.reward import RewardSpec
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_crds.trajectory import Rescored, RescoredTrajectory, Trajectory

from rollyard_pipeline.errors import PipelineError
from rollyard_pipeline.handlers.base import ANSWER, Evaluation, Handler, StageContext
from rollyard_pipeline.registry import HANDLERS, Registry
from rollyard_pipeline.rewards.shaping import Rewards
from rollyard_pipeline.stages.evaluation import evaluate

_SUBMIT: Final = "submit"
_TRIES: Final = 3
_AT_ONCE: Final = 8
"""The number of trajectories that are evaluated at the same time."""


class RescoreRefused(PipelineError):
    """Kept trajectories cannot be evaluated in this way. The message says why."""

    reason = "RescoreRefused"
    retryable = False


class Rescorer:
    """Evaluates kept trajectories with a handler that needs no sandbox, and with a job's `reward`.

    Args:
        handler: The name of the handler.
        spec: The spec of the job.
        reward: The section `reward` that counts.
        by: Who asks for it, for the record.
        extensions: Finds the handler and the reward function.

    Raises:
        RescoreRefused: The handler needs a sandbox, or the reward comes from a service.
        UnknownHandler: No handler of this name is installed here.
    """

    def __init__(
        self,
        handler: str,
        spec: RolloutJobSpec,
        reward: RewardSpec | None,
        by: str,
        extensions: Registry | None = None,
    ) -> None:
        extensions = extensions or Registry()
        self._handler: Handler = extensions.load(HANDLERS, handler)()
        if self._handler.needs_sandbox:
            raise RescoreRefused(
                f"the handler '{handler}' needs a sandbox, and what Run left in it is not kept: only "
                "handlers that need none can evaluate a trajectory again"
            )
        if reward is not None and reward.service is not None:
            raise RescoreRefused(
                "the control plane asks reward services during Eval only: give another section `reward`"
            )
        self._spec = spec.model_copy(update={"handler": handler, "reward": reward})
        self._name, self._by = handler, by
        self._rewards = Rewards(extensions)

    async def check(self) -> None:
        """Check the names of components before anything is evaluated.

        Raises:
            PipelineError: A name stands for nothing, or the reward function cannot be loaded.
        """
        await self._rewards.check(self._handler, self._spec)

    async def rescored(
        self, pairs: Sequence[tuple[Trajectory, Task]], at: datetime
    ) -> list[RescoredTrajectory]:
        """Return the trajectories with their new rewards, in their order.

        A trajectory without a reward keeps its status and has none now. One that cannot be evaluated is
        `failed` and has none, as after an Eval.
        """
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(trajectory: Trajectory, task: Task) -> RescoredTrajectory:
            async with places:
                return await self._one(trajectory, task, at)

        return list(await asyncio.gather(*(one(trajectory, task) for trajectory, task in pairs)))

    async def _one(self, trajectory: Trajectory, task: Task, at: datetime) -> RescoredTrajectory:
        if trajectory.status != "succeeded":
            return RescoredTrajectory.model_validate(trajectory.model_dump())
        changes: dict[str, Any] = {
            "rescored": Rescored(
                handler=self._name,
                by=self._by,
                at=at,
                reward=trajectory.reward,
                reward_components=trajectory.reward_components,
                reward_reason=trajectory.reward_reason,
            ).model_dump(),
            "reward": None,
            "reward_components": {},
            "reward_reason": "",
        }
        try:
            evaluation = await self._evaluated(trajectory, task)
        except Exception as error:
            # Whatever a handler raises is a failure, and never a reward.
            reason = error.reason if isinstance(error, PipelineError) else "InternalError"
            changes |= {"status": "failed", "reason": reason, "message": f"{type(error).__name__}: {error}"}
        else:
            changes |= {
                "reward": float(evaluation.reward),
                "reward_components": dict(evaluation.components),
                "reward_reason": evaluation.reason,
            }
        return RescoredTrajectory.model_validate(trajectory.model_dump() | changes)

    async def _evaluated(self, trajectory: Trajectory, task: Task) -> Evaluation:
        """Return the evaluation of a trajectory, with further tries if one fails.

        Raises:
            Exception: The last try failed, or one that cannot succeed later.
        """
        for _ in range(_TRIES - 1):
            try:
                return await self._once(trajectory, task)
            except Exception as error:
                if isinstance(error, PipelineError) and not error.retryable:
                    raise
        return await self._once(trajectory, task)

    async def _once(self, trajectory: Trajectory, task: Task) -> Evaluation:
        seconds = float(self._spec.stages.eval.timeout_seconds)
        answer = submitted(trajectory)
        context = StageContext(
            task=task,
            spec=self._spec,
            rollout=trajectory.id,
            sample_index=trajectory.sample_index,
            timeout=seconds,
            env={**self._spec.sandbox.env, **task.sandbox.env},
            carry={} if answer is None else {ANSWER: answer},
            trajectory=trajectory,
        )
        evaluation = await evaluate(self._handler, context, seconds)
        async with asyncio.timeout(seconds):
            return await self._rewards.shaped(self._handler, context, evaluation, None)

    async def close(self) -> None:
        """Close the handler, and end the processes that make rewards."""
        await self._rewards.close()
        await self._handler.close()


def submitted(trajectory: Trajectory) -> str | None:
    """Return the answer that the tool `submit` received, or None if it received none."""
    for turn in reversed(trajectory.turns):
        for call in reversed(turn.tool_calls):
            answer = call.arguments.get("answer")
            if call.name == _SUBMIT and call.error is None and isinstance(answer, str):
                return answer
    return None
