"""Evaluations and whole rollouts without a control plane.

Kept trajectories are evaluated without a new rollout, and so are answers that belong to none. `stages_alone`
takes one task through Init, Run and Eval in this process.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, TypeVar

from rollyard_crds.fields.reward import RewardSpec, trainer_seconds
from rollyard_crds.lease import Lease, LeaseRef, StageResult, StageTimes
from rollyard_crds.rolloutjob import RolloutJobSpec, StageName
from rollyard_crds.task import Task
from rollyard_crds.trajectory import Rescored, RescoredTrajectory, Trajectory
from rollyard_sandbox.errors import ConnectionLost

from rollyard_pipeline import registry
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.control_plane.calls import WorkerCall, WorkerCalls
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import (
    ControlPlaneRefused,
    EvalTimeout,
    PermanentFailure,
    PipelineError,
    SetupFailed,
)
from rollyard_pipeline.handlers.base import ANSWER, Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.isolated.handler import loaded_handler
from rollyard_pipeline.handlers.isolated.places import blocked, message_of
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.rewards import PlainFunction, RewardFunction
from rollyard_pipeline.rewards.shaping import Rewards, episode_document
from rollyard_pipeline.sabotage import OUT_OF_MEMORY
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.errors import SandboxLost, SandboxProviderError
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_pipeline.stages.contexts import prepare, sandbox_request
from rollyard_pipeline.stages.evaluation import evaluate
from rollyard_pipeline.stages.stages import Stages

_LEASE_SECONDS: Final = 60.0


A = TypeVar("A")


_TRIES: Final = 3
_AT_ONCE: Final = 8
"""The number of trajectories that are evaluated at the same time without a sandbox."""
_GRACE: Final = 30.0
"""The seconds that Eval gets beyond its limit, so that tests that ran out of time can be scored."""
_RENEW_SECONDS: Final = 10.0
_RENEWED_FOR: Final = 60.0  # seconds


@asynccontextmanager
async def started(provider: SandboxProvider) -> AsyncIterator[None]:
    """Start a provider, keep the sandboxes of this process alive as heartbeats do, and close it at the end.

    Raises:
        SandboxProviderError: Sandboxes cannot be started here.
    """
    await provider.start()
    renewing = asyncio.create_task(_renew(provider))
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        await provider.aclose()


async def _renew(provider: SandboxProvider) -> None:
    while True:
        await asyncio.sleep(_RENEW_SECONDS)
        with suppress(SandboxProviderError):
            await provider.renew(provider.own(), _RENEWED_FOR)


class Rescorer:
    """Evaluates kept trajectories with a handler and with a job's `reward`.

    A handler that needs a sandbox gets one in which only its `init` has run, without a network. It must judge
    nothing that Run left in its own sandbox.

    Args:
        handler: The name of the handler.
        spec: The spec of the job.
        reward: The section `reward` that counts.
        by: Who asks for it, for the record.
        extensions: Finds the handler and the reward function.
        provider: Makes the provider of sandboxes, for a handler that needs some.

    Raises:
        PermanentFailure: The handler judges what Run left in its sandbox, the reward comes from a service or
            from a trainer, or no handler of this name is installed here.
    """

    def __init__(
        self,
        handler: str,
        spec: RolloutJobSpec,
        reward: RewardSpec | None,
        by: str,
        extensions: Registry | None = None,
        provider: Callable[[], SandboxProvider] | None = None,
    ) -> None:
        extensions = extensions or Registry()
        self._handler = loaded_handler(extensions, handler)
        sandboxed = self._handler.needs_sandbox
        if sandboxed and (not self._handler.judges_answers or provider is None):
            raise PermanentFailure(
                f"the handler '{handler}' judges what Run left in its sandbox, which is not here: only "
                "handlers that judge the answer can evaluate without a rollout (`rollyard validate --oracle` "
                "plays the reference solutions of tasks)",
                "RescoreRefused",
            )
        if trainer_seconds(handler, reward) is not None:
            raise PermanentFailure(
                f"the handler '{handler}' gives no reward, and a trainer's rewards are not computed here: "
                "name another handler, or a section `reward` with a function",
                "RescoreRefused",
            )
        if reward is not None and reward.service is not None:
            raise PermanentFailure(
                "the control plane asks reward services during Eval only: give another section `reward`",
                "RescoreRefused",
            )
        self._spec = spec.model_copy(update={"handler": handler, "reward": reward})
        self._name, self._by = handler, by
        self._rewards = Rewards(lambda _: extensions)
        self._provider = provider() if sandboxed and provider is not None else None
        # Tests have limits of time, so no more of them run at once than there are cores.
        self._at_once = _AT_ONCE if self._provider is None else max(2, os.cpu_count() or 2)
        self._open = AsyncExitStack()

    async def check(self) -> None:
        """Check the names of components and that sandboxes can be started, before anything is evaluated.

        Raises:
            PipelineError: A name stands for nothing, the reward function cannot be loaded, or no sandbox can
                be started here.
        """
        await self._rewards.check(self._handler, self._spec)
        if self._provider is not None:
            await self._open.enter_async_context(started(self._provider))

    def problems(self, task: Task) -> list[str]:
        """Return what the handler finds wrong with a task, one line for each. Each line begins with a field.

        Raises:
            PermanentFailure: The handler could not look at the task.
        """
        try:
            return self._handler.check(task)
        except Exception as error:
            # Handlers of other packages may fail in their own ways.
            raise PermanentFailure(
                f"the handler '{self._name}' cannot check the task '{task.id}': "
                f"{type(error).__name__}: {error}",
                "RescoreRefused",
            ) from error

    async def rescored(
        self, pairs: Sequence[tuple[Trajectory, Task]], at: datetime
    ) -> list[RescoredTrajectory]:
        """Return the trajectories with their new rewards, in their order.

        A trajectory without a reward keeps its status and gets none. One that cannot be evaluated becomes
        `failed` and has none, as after an Eval.
        """
        places = asyncio.Semaphore(self._at_once)

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
            "reward_output": "",
        }
        try:
            evaluation, shown = await self._evaluated(trajectory, task)
        except Exception as error:
            # Whatever a handler raises is a failure, and never a reward.
            reason, message = "InternalError", message_of(error)
            if isinstance(error, PipelineError):
                reason, message = error.reason, f"{error.reason}: {error}"
            changes |= {"status": "failed", "reason": reason, "message": message}
        else:
            changes |= {
                "reward": float(evaluation.reward),
                "reward_components": dict(evaluation.components),
                "reward_reason": evaluation.reason,
                "reward_output": shown,
            }
        return RescoredTrajectory.model_validate(trajectory.model_dump() | changes)

    async def _evaluated(self, trajectory: Trajectory, task: Task) -> tuple[Evaluation, str]:
        """Return the evaluation of a trajectory and what it showed, with further tries if one fails.

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

    async def _once(self, trajectory: Trajectory, task: Task) -> tuple[Evaluation, str]:
        seconds = float(self._spec.stages.eval.timeout_seconds)
        handler, answer = self._handler.for_task(task), trajectory.answer
        context = StageContext(
            task=task,
            spec=self._spec,
            rollout=trajectory.id,
            sample_index=trajectory.sample_index,
            timeout=seconds,
            env={**self._spec.sandbox.env, **task.sandbox.env},
            carry={} if answer is None else {ANSWER: answer},
            trajectory=trajectory if handler.needs_tokens else trajectory.transcript,
        )
        if handler.needs_sandbox:
            evaluation = await self._in_sandbox(handler, context, seconds)
        else:
            evaluation = await evaluate(handler, context, seconds)
        async with asyncio.timeout(seconds):
            return await self._rewards.shaped(self._handler, context, evaluation, None), context.shown

    async def _in_sandbox(self, handler: Handler, context: StageContext, seconds: float) -> Evaluation:
        """Return the evaluation in a sandbox in which only `init` has run, as in Eval's own sandboxes.

        Raises:
            PermanentFailure: The handler would look for what Run left.
            Exception: The sandbox could not be started or prepared, or was lost.
        """
        provider = self._provider
        if provider is None or not handler.judges_answer(context.task):
            raise PermanentFailure(
                "the evaluation of this task judges what Run left in its sandbox", "RescoreRefused"
            )
        request = sandbox_request(self._spec, handler, context.task)
        sandbox = await provider.acquire(request, LeaseRef(rollout=context.rollout, token=1))
        try:
            async with sandbox:
                context.client, context.workdir = sandbox.client, sandbox.workdir
                await self._prepare(handler, context)
                return await evaluate(handler, context, seconds + _GRACE)
        except (SandboxLost, ConnectionLost, EvalTimeout):
            # The program of the answer has run in it.
            if not await provider.oom_killed(sandbox.handle):
                raise
            return Evaluation(0.0, {}, OUT_OF_MEMORY)
        finally:
            await asyncio.shield(provider.release(sandbox.handle))

    async def _prepare(self, handler: Handler, context: StageContext) -> None:
        """Let `init` prepare the sandbox.

        Raises:
            SetupFailed: It took longer than the job's Init stage may.
        """
        limit = float(self._spec.stages.init.timeout_seconds)
        preparing = asyncio.timeout(limit)
        try:
            async with preparing:
                await prepare(handler, replace(context, timeout=limit, for_eval=True, purpose="eval"))
        except TimeoutError as error:
            if not preparing.expired():
                raise
            problem = blocked(error) or f"handler '{self._name}'"
            raise SetupFailed(f"Init took longer than {limit:g} s: {problem}", "InitTimeout") from error

    async def close(self) -> None:
        """Close the handler, end the processes that make rewards, and remove every sandbox."""
        await self._open.aclose()
        await self._rewards.close()
        await self._handler.close()


class FunctionHandler(Handler):
    """A handler whose reward is that of a reward function, which runs in a thread of this process.

    Args:
        function: The reward function.
    """

    needs_sandbox = False
    judges_answers = True

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self.components = tuple(function.components)  # type: ignore[misc]

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return the score of the episode."""
        episode = episode_document(ctx, Evaluation(0.0))
        scored = await asyncio.to_thread(self._function.score, episode)
        return scored if isinstance(scored, Evaluation) else Evaluation(scored)


def handler_of(given: object) -> Callable[[], Handler]:
    """Return what makes a handler from a class of one, or from a reward function.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(given, type) and issubclass(given, Handler):
        return given
    if isinstance(given, type) and issubclass(given, RewardFunction):
        return lambda: FunctionHandler(given())
    if isinstance(given, RewardFunction):
        return lambda: FunctionHandler(given)
    if callable(given) and not isinstance(given, type):
        return lambda: FunctionHandler(PlainFunction(given))
    raise TypeError(
        "must be the name of a handler, a class that derives from Handler, or a reward function "
        f"(got {given!r:.100})"
    )


class _OneJob(WorkerCalls):
    """Answers for the control plane with the spec of the one job. Without a model, there is no other call."""

    def __init__(self, spec: RolloutJobSpec) -> None:
        self._spec = spec

    async def send(self, call: WorkerCall[A]) -> A:
        raise ControlPlaneRefused(f"there is no control plane here for {call.method} {call.path}")

    async def job_spec(self, namespace: str, name: str, uid: str | None = None) -> RolloutJobSpec:
        return self._spec


class StagesAlone:
    """The stages of a worker that asks no control plane, for agents that ask no model.

    Args:
        spec: The spec of the job to which the tasks belong.
        provider: Starts sandboxes. The caller starts and closes it.
        backends: The process's backend client, which is not used by such agents.
        extensions: Loads handlers, agents, tools and parsers.
        egress: The network of sandboxes, if the job asks for one.
    """

    def __init__(
        self,
        spec: RolloutJobSpec,
        provider: SandboxProvider,
        backends: BackendClient,
        extensions: registry.Registry | None = None,
        egress: Egress | None = None,
    ) -> None:
        self._provider = provider
        self._stages = Stages(
            _OneJob(spec), backends, provider, extensions or registry.Registry(), egress=egress
        )
        self._numbers = itertools.count()

    async def play(self, task: Task) -> tuple[StageResult, StageResult]:
        """Play a task once, and return the results of Run and of Eval. No sandbox is left afterwards.

        Raises:
            Exception: The infrastructure failed, or the task is broken. Nothing is tried again.
        """
        number = next(self._numbers)

        def lease(stage: StageName, before: StageResult | None = None) -> HeldLease:
            return HeldLease(
                Lease(
                    rollout=f"{task.id}/{number}",
                    token=1,
                    stage=stage,
                    job="alone",
                    namespace="default",
                    job_uid="alone",
                    group_id=task.id,
                    sample_index=0,
                    attempt=0,
                    queued_seconds=0.0,
                    lease_seconds=_LEASE_SECONDS,
                    task=task,
                    sandbox=before.sandbox if before is not None else None,
                    carry=copy.deepcopy(before.carry) if before is not None else {},
                    trajectory=None if before is None else before.transcript,
                    segments=[] if before is None else before.segments,
                )
            )

        init_lease = lease("init")
        try:
            init = await self._stages.work(init_lease, StageTimes())
            ran = await self._stages.work(lease("run", init), StageTimes())
            return ran, await self._stages.work(lease("eval", ran), StageTimes())
        finally:
            if init_lease.sandbox is not None:
                await asyncio.shield(self._provider.release(init_lease.sandbox))

    async def close(self) -> None:
        """Close every handler."""
        await self._stages.close()


@asynccontextmanager
async def stages_alone(
    spec: RolloutJobSpec, provider: SandboxProvider, extensions: registry.Registry | None = None
) -> AsyncIterator[StagesAlone]:
    """Provide the stages over a provider, which is started first and closed afterwards.

    Raises:
        SandboxProviderError: Sandboxes cannot be started here.
    """
    async with started(provider), BackendClient() as backends:
        alone = StagesAlone(spec, provider, backends, extensions)
        try:
            yield alone
        finally:
            await alone.close()
