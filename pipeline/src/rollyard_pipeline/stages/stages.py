"""The stages that a worker performs under a lease: Init, Run or Eval of one rollout."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Final, TypeAlias

from rollyard_crds.lease import (
    MAX_LIVE_TURNS,
    Lease,
    LiveTurn,
    StageResult,
    StageTimes,
)
from rollyard_crds.names import PROVIDER
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_inference.errors import BackendUnavailable
from rollyard_sandbox.errors import ConnectionLost

from rollyard_pipeline import registry
from rollyard_pipeline.agents.base import Agent, AgentContext, HarnessAccess
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.chat.format import FormatCache
from rollyard_pipeline.control_plane.calls import JobSpecs, WorkerCalls
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import (
    CarryRefused,
    EvalSandboxEnded,
    EvalTimeout,
    PermanentFailure,
    PipelineError,
    RewardUnusable,
    SetupFailed,
)
from rollyard_pipeline.handlers.base import ANSWER, Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.isolated.handler import tried_handler
from rollyard_pipeline.handlers.isolated.places import blocked
from rollyard_pipeline.harnesses.base import Harness
from rollyard_pipeline.rewards.shaping import Rewards
from rollyard_pipeline.sabotage import CRASHED, OUT_OF_MEMORY, SABOTAGED
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.errors import SandboxLost, SandboxProviderError
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxProvider, SandboxRequest
from rollyard_pipeline.sandboxes.start_span import sandbox_started
from rollyard_pipeline.stages.contexts import (
    SandboxUse,
    agent_of,
    checked_carry,
    eval_network,
    evaluated,
    narrowed,
    pins_of,
    prepare,
    sandbox_request,
    sandbox_use,
    stage_context,
)
from rollyard_pipeline.stages.eval_sandboxes import EvalSandboxes, eval_sandbox, reaches
from rollyard_pipeline.stages.evaluation import Lend, evaluate, shaped
from rollyard_pipeline.stages.plugins import Digests, JobPlugins, digests_of
from rollyard_pipeline.stages.run_models import ModelSource, RunModel, RunModels
from rollyard_pipeline.stages.sandbox_places import SandboxPlaces
from rollyard_pipeline.tools.base import ToolContext
from rollyard_pipeline.trajectories.episode import Episode, running_turn, turns_from
from rollyard_pipeline.trajectories.sanitize import clean_text

_LONGEST_WAITED: Final = 14_400.0  # The longest wait for backends, in seconds, that is added to a limit.


class RunLimits:
    """The limits that are in force, all of which wait while a backend is paused, updated or too busy."""

    def __init__(self, session: ModelSource | None, agent: AgentContext) -> None:
        self._session = session
        self._agent = agent
        self._limits: list[asyncio.Timeout] = []
        if session is not None:
            session.on_wait = self._extend

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Let the body take `seconds`, then end it and truncate the episode as `RunTimeout`.

        A turn that is being sampled then keeps its tokens.

        Raises:
            PipelineError: The time was spent in the code of the handler.
            BackendUnavailable: The time was spent on a backend that did not answer, which is not the
                policy's fault.
        """
        limit = asyncio.timeout(seconds)
        self._limits.append(limit)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            if location := blocked(error):
                raise PipelineError(
                    f"Run took longer than {seconds:g} s: {location}", "HandlerBlocked"
                ) from error
            silence = await self._session.silence() if self._session is not None else None
            if silence is not None:
                raise BackendUnavailable(
                    f"no backend answered until Run's limit of {seconds:g} s; last: {silence}"
                ) from None
            await self._agent.cut_turn()
            self._agent.truncate("RunTimeout")
        finally:
            self._limits.remove(limit)

    def _extend(self, seconds: float) -> None:
        for limit in self._limits:
            when = limit.when()
            waited = self._session.waited_seconds if self._session is not None else 0.0
            if when is not None and not limit.expired() and waited <= _LONGEST_WAITED:
                limit.reschedule(when + seconds)


class AgentRuns:
    """The agent of a rollout, which a handler may let play several times; see `handlers.base.AgentSteps`."""

    def __init__(self, agent: Agent, context: AgentContext, limits: RunLimits) -> None:
        self._agent = agent
        self._context = context
        self._limits = limits

    async def play(self) -> None:
        """Play the agent until it ends the episode."""
        await self._agent.run(self._context)

    async def step(self, task: Task, seconds: float | None) -> bool:
        """Play the agent for one step, and return whether a further step may follow."""
        self._context.task = task
        if seconds is None:
            await self.play()
        else:
            async with self._limits.within(seconds):
                await self.play()
        return not self._context.episode.truncated_reason

    def say(self, text: str) -> None:
        """Continue the episode with a user's message."""
        if self._context.harness is None:
            self._context.episode.resume(text)
        else:
            self._context.harness.begin_step(self._context.episode, text)


log = logging.getLogger(__name__)

_HandlerKey: TypeAlias = tuple[str, Digests]
"""The name of a handler, and the plugins among which it was found."""


class Stages:
    """Performs stages under leases, and holds what all rollouts of a worker share.

    Args:
        control: The control plane, which provides job specs and new backends.
        backends: The process's backend client.
        provider: Starts and finds sandboxes. It is None on a worker without sandboxes.
        extensions: Loads handlers, agents, tools and parsers.
        backend_budget: The time in seconds for which a rollout waits without any backend before it gives up.
        eval_grace: The time in seconds that Eval gets beyond its limit. In this time a handler that enforces
            the limit itself can still return a score for tests that ran out of time.
        places: Bounds the sandboxes of Run and Eval together.
        formats: The tokenizers and templates that are loaded already.
        egress: The network of sandboxes whose jobs ask for one.
        plugin_folder: Where the plugins of jobs are put; see `JobPlugins`.
    """

    def __init__(
        self,
        control: WorkerCalls,
        backends: BackendClient,
        provider: SandboxProvider | None,
        extensions: registry.Registry,
        *,
        backend_budget: float = 60.0,
        eval_grace: float = 30.0,
        places: SandboxPlaces | None = None,
        formats: FormatCache | None = None,
        egress: Egress | None = None,
        plugin_folder: Path | None = None,
    ) -> None:
        self._control = control
        self._provider = provider
        self._plugins = JobPlugins(control, extensions, plugin_folder)
        self._eval_grace = eval_grace
        self._jobs = JobSpecs(control)
        self._formats = formats or FormatCache()
        self._handlers: dict[_HandlerKey, Handler] = {}
        self._loading: dict[_HandlerKey, asyncio.Future[Handler]] = {}
        self._rewards = Rewards(self._plugins.of)
        self._met: set[str] = set()
        """The jobs for which a sandbox was started here."""
        self._warmed: set[str] = set()
        self._places = places or SandboxPlaces(provider, usual=4096)
        self._egress = egress or Egress()
        self._models = RunModels(
            control, backends, self._formats, self._egress, self._plugins.of, backend_budget
        )
        self._eval_sandboxes = (
            EvalSandboxes(provider, self._places, self._attached, self._egress)
            if provider is not None
            else None
        )

    async def close(self) -> None:
        """Close every handler, the network of sandboxes, and the processes that make rewards."""
        self._egress.close()
        await self._rewards.close()
        await self._models.close()
        for loading in self._loading.values():
            loading.cancel()
        loaded = await asyncio.gather(*self._loading.values(), return_exceptions=True)
        for handler in (*self._handlers.values(), *loaded):
            if isinstance(handler, Handler):
                await handler.close()
        self._plugins.close()

    async def work(self, holding: HeldLease, times: StageTimes) -> StageResult:
        """Perform one stage of one rollout. `times` is filled in even if the stage fails.

        Raises:
            Exception: The infrastructure failed. `worker.worker.stage_failure` converts it to a report.
        """
        try:
            spec = await self._jobs.get(holding.lease)
            lease = holding.lease
            await self._load(spec, lease.namespace, lease.job, lease.job_uid)
            holding.started = time.monotonic()
            match holding.lease.stage:
                case "init":
                    return await self._init(holding, spec, times)
                case "run":
                    result = await self._run(holding, spec, times)
                    if holding.lease.sandbox is not None and holding.lease.job_uid in self._met:
                        await self._keep_warm(holding.lease, spec)
                    # A trainer scores the record alone, so no Eval follows in the sandbox.
                    holding.done_with_sandbox = spec.trainer_reward_seconds is not None
                    return result
                case _:
                    return await self._eval(holding, spec, times)
        finally:
            times.active_seconds = time.monotonic() - holding.started
            if holding.lease.stage == "run":
                times.own_seconds = max(0.0, times.active_seconds - times.model_seconds - times.tool_seconds)

    async def sandbox_use(self, spec: RolloutJobSpec, namespace: str, name: str) -> SandboxUse:
        """Return where the rollouts of a job have sandboxes, as far as its handler says so for all tasks.

        Raises:
            PipelineError: An extension of the job cannot be loaded.
        """
        await self._load(spec, namespace, name, None)
        return sandbox_use(self._handler(spec), *agent_of(self._plugins.of(spec), spec))

    async def _init(self, holding: HeldLease, spec: RolloutJobSpec, times: StageTimes) -> StageResult:
        lease, timeout = holding.lease, spec.stages.init.timeout_seconds
        handler, found = self._handler(spec).for_task(lease.task), agent_of(self._plugins.of(spec), spec)
        # Unknown names, and hosts that the job does not have, are detected before a sandbox is started.
        eval_network(spec, handler, lease.task)
        self._plugins.of(spec).load(registry.TOOL_PARSERS, spec.agent.tool_parser)
        await self._rewards.check(self._handler(spec), spec)
        if spec.agent.harness is not None:
            self._plugins.of(spec).load(registry.HARNESSES, spec.agent.harness)
        use = sandbox_use(handler, *found)
        context = stage_context(lease, spec, timeout)
        try:
            if use == "run":
                async with self._init_place(holding, spec, handler), asyncio.timeout(timeout):
                    sandbox = await self._acquire(holding, spec)
                    async with sandbox, self._lent(sandbox, context):
                        context.client, context.workdir = sandbox.client, sandbox.workdir
                        await prepare(handler, context)
            elif use == "none":
                async with asyncio.timeout(timeout):
                    await prepare(handler, context)
        except TimeoutError as error:
            if time.monotonic() - holding.started < timeout:
                raise
            culprit = blocked(error) or f"handler '{spec.handler}'"
            raise SetupFailed(f"Init took longer than {timeout} s: {culprit}", "InitTimeout") from error
        return StageResult(
            rollout=lease.rollout,
            token=lease.token,
            stage="init",
            sandbox=holding.sandbox,
            carry=checked_carry(context),
            times=times,
        )

    async def _run(self, holding: HeldLease, spec: RolloutJobSpec, times: StageTimes) -> StageResult:
        lease, timeout = holding.lease, spec.stages.run.timeout_seconds
        handler = self._handler(spec).for_task(lease.task)
        agent, tools = agent_of(self._plugins.of(spec), spec)
        episode = Episode(messages=lease.task.chat())
        model = RunModel(self._models.session(lease, spec) if agent.uses_model else None)
        holding.live = functools.partial(_live_turns, episode, model)
        await self._models.prepare(model, lease, spec, tools, episode, gateway=agent.uses_gateway)
        context = stage_context(lease, spec, timeout)
        try:
            async with self._attached(lease) as sandbox, self._lent(sandbox, context):
                if sandbox is not None:
                    context.client, context.workdir = sandbox.client, sandbox.workdir
                agent_context = AgentContext(
                    task=lease.task,
                    spec=spec.agent,
                    sampling=spec.sampling,
                    episode=episode,
                    tools=tools,
                    tool_context=self._tool_context(sandbox, spec, model.stated),
                    parser=model.parser,
                    session=model.session,
                    model_context=model.model_context,
                    harness=self._harness(spec, model, context.workdir, lease.task),
                )
                limits = RunLimits(model.source, agent_context)
                context.agent_steps = runs = AgentRuns(agent, agent_context, limits)
                context.run_agent = runs.play
                try:
                    async with limits.within(timeout):
                        await handler.run(context)
                except ConnectionLost:
                    # A call of the handler's own, such as between two steps of the agent, has lost it.
                    end = await self._own_end(lease)
                    if not end:
                        raise
                    episode.truncate(end)
        finally:
            times.model_seconds = model.seconds
            times.tool_seconds = episode.tool_seconds
        record, segments = model.recorded(episode, lease, spec)
        if episode.answer is not None:
            context.carry[ANSWER] = episode.answer
        return StageResult(
            rollout=lease.rollout,
            token=lease.token,
            stage="run",
            sandbox=lease.sandbox,
            carry=checked_carry(context),
            trajectory=record,
            segments=segments,
            tokens_in_eval=handler.needs_tokens,
            stats=model.stats,
            times=times,
        )

    def _harness(
        self, spec: RolloutJobSpec, model: RunModel, workdir: str, task: Task
    ) -> HarnessAccess | None:
        """Return the harness of a job, and the gateway that it calls, if its agent uses one."""
        if model.gateway is None or spec.agent.harness is None:
            return None
        harness: Harness = self._plugins.of(spec).load(registry.HARNESSES, spec.agent.harness)()
        return HarnessAccess(harness, model.gateway, workdir, task.chat())

    async def _eval(self, holding: HeldLease, spec: RolloutJobSpec, times: StageTimes) -> StageResult:
        lease, timeout = holding.lease, spec.stages.eval.timeout_seconds
        handler = self._handler(spec).for_task(lease.task)
        context = stage_context(lease, spec, timeout)
        context.trajectory = evaluated(lease, handler)
        _first_crash_fails(lease, _end_in_run(lease), None)
        alone = handler.needs_sandbox and lease.sandbox is None
        fresh = alone or eval_sandbox(spec, handler, lease.task) == "fresh"
        untouched = fresh and not reaches(spec, handler, lease.task)
        try:
            async with self._eval_place(holding, spec, handler, context, fresh=fresh) as sandbox:
                if sandbox is not None:
                    context.client, context.workdir = sandbox.client, sandbox.workdir
                lend, seconds = self._lend(sandbox, handler, context), timeout + self._eval_grace
                evaluation = await evaluate(handler, context, seconds, untouched=untouched, network=lend)
        except RewardUnusable as error:
            if untouched or self._eval_sandboxes is None:
                raise
            if fresh and self._provider is not None and self._provider.name == PROVIDER:
                # A lease files one claim, and that of this one is used up. What the policy left is the likely
                # cause.
                evaluation = Evaluation(0.0, {}, error.reward_reason)
            else:
                evaluation = await self._blamed(holding, spec, handler, error)
            context.show(str(error))
        except CarryRefused as error:
            log.info("eval of %s: %s: %s", lease.rollout, error.reason, clean_text(str(error), 1000))
            context.show(str(error))
            evaluation = Evaluation(0.0, {}, SABOTAGED)
        except EvalSandboxEnded as error:
            log.info("eval of %s: %s", lease.rollout, clean_text(str(error), 1000))
            evaluation = Evaluation(0.0, {}, error.reward_reason)
        except (SandboxLost, ConnectionLost, EvalTimeout) as error:
            # A server that the kernel keeps waiting for memory is not lost, but does not answer.
            end = await self._own_end(lease)
            if not end:
                raise
            _first_crash_fails(lease, end, error)
            evaluation = Evaluation(0.0, {}, end)
        if spec.reward is not None:
            seconds = timeout + self._eval_grace
            evaluation = await shaped(
                self._rewards, self._control, lease, self._handler(spec), context, evaluation, seconds
            )
        return StageResult(
            rollout=lease.rollout,
            token=lease.token,
            stage="eval",
            sandbox=lease.sandbox,
            carry=checked_carry(context),
            reward=float(evaluation.reward),
            reward_components={name: float(value) for name, value in evaluation.components.items()},
            reward_reason=evaluation.reason,
            reward_output=context.shown,
            times=times,
        )

    async def _blamed(
        self, holding: HeldLease, spec: RolloutJobSpec, handler: Handler, error: RewardUnusable
    ) -> Evaluation:
        """Return the score of a policy whose evaluation gave no reward, if the policy is to blame.

        It is to blame if the same evaluation gives a reward in a sandbox that no policy has seen.

        Raises:
            RewardUnusable: It gives none there either.
        """
        assert self._eval_sandboxes is not None
        context = stage_context(holding.lease, spec, spec.stages.eval.timeout_seconds)
        context.purpose = "control"
        async with self._eval_sandboxes.fresh(holding, spec, handler, context) as sandbox:
            context.client, context.workdir = sandbox.client, sandbox.workdir
            lend, seconds = self._lend(sandbox, handler, context), context.timeout + self._eval_grace
            control = await evaluate(handler, context, seconds, untouched=True, network=lend)
        if control.reason:
            raise error
        log.info("%s: reward 0 (%s): %s", holding.lease.rollout, error.reward_reason, error)
        return Evaluation(0.0, {}, error.reward_reason)

    async def _own_end(self, lease: Lease) -> str:
        """Return why a lost or silent sandbox has ended by itself, or "" (see `SandboxProvider.own_end`)."""
        if lease.sandbox is None or self._provider is None or self._provider.name != lease.sandbox.provider:
            return ""
        return _end_in_run(lease) or await self._provider.own_end(lease.sandbox)

    async def _acquire(self, holding: HeldLease, spec: RolloutJobSpec) -> Sandbox:
        if self._provider is None:
            raise _no_sandboxes()
        request = sandbox_request(spec, self._handler(spec), holding.lease.task)
        sandbox = await sandbox_started(self._provider, request, holding.ref)
        holding.sandbox = sandbox.handle
        # Sandboxes that start in advance would compete for the cores with this one, and with the first Run.
        if holding.lease.job_uid in self._met:
            await self._keep_warm(holding.lease, spec)
        self._met.add(holding.lease.job_uid)
        return sandbox

    async def _keep_warm(self, lease: Lease, spec: RolloutJobSpec) -> None:
        """Begin to keep sandboxes ready for the job, if that has not begun."""
        if self._provider is not None and spec.sandbox.warm and lease.job_uid not in self._warmed:
            self._warmed.add(lease.job_uid)
            try:
                await self._provider.warm(SandboxRequest.of(spec.sandbox), spec.sandbox.warm)
            except SandboxProviderError as error:
                # The job's own image cannot be used, but the image of this task could.
                log.warning("no sandboxes are kept ready for %s: %s", lease.job, error)

    @asynccontextmanager
    async def _init_place(
        self, holding: HeldLease, spec: RolloutJobSpec, handler: Handler
    ) -> AsyncIterator[None]:
        if eval_sandbox(spec, handler, holding.lease.task) == "shared":
            yield
            return
        async with self._places.for_init(holding):
            holding.started = time.monotonic()  # Waiting for a place counts against no limit.
            yield

    def _eval_place(
        self,
        holding: HeldLease,
        spec: RolloutJobSpec,
        handler: Handler,
        context: StageContext,
        *,
        fresh: bool,
    ) -> AbstractAsyncContextManager[Sandbox | None]:
        """Return the sandbox for Eval: Run's own, a fresh one, or none if Run had none and none is needed.

        Raises:
            PermanentFailure: A fresh one is needed, and this worker has no sandboxes.
        """
        if not fresh:
            return self._attached(holding.lease)
        if self._eval_sandboxes is None:
            raise _no_sandboxes()
        return self._eval_sandboxes.fresh(holding, spec, handler, context)

    @asynccontextmanager
    async def _attached(self, lease: Lease) -> AsyncIterator[Sandbox | None]:
        if lease.sandbox is None:
            yield None
            return
        if self._provider is None or self._provider.name != lease.sandbox.provider:
            here = self._provider.name if self._provider is not None else "none"
            raise SandboxLost(
                f"the sandbox is of provider '{lease.sandbox.provider}', this worker's is '{here}'"
            )
        sandbox = await self._provider.attach(lease.sandbox)
        async with sandbox:
            yield sandbox

    def _lent(self, sandbox: Sandbox | None, context: StageContext) -> AbstractAsyncContextManager[object]:
        """Return the context in which a sandbox has the network of its task, in Init and Run."""
        if sandbox is None:
            return nullcontext()
        spec = narrowed(context.spec.sandbox, context.task.sandbox)
        return self._egress.lent(sandbox, spec, context.rollout, context.env, pins_of(context.spec))

    def _lend(self, sandbox: Sandbox | None, handler: Handler, context: StageContext) -> Lend | None:
        """Return what lends a fresh sandbox of Eval the network of the tests, if they have one."""
        network = eval_network(context.spec, handler, context.task)
        if sandbox is None or not network.host_rules:
            return None
        pins = pins_of(context.spec)
        return functools.partial(self._egress.lent, sandbox, network, context.rollout, context.env, pins)

    def _handler(self, spec: RolloutJobSpec) -> Handler:
        return self._handlers[_handler_key(spec)]

    async def _load(self, spec: RolloutJobSpec, namespace: str, name: str, uid: str | None) -> None:
        """Load the handler of a job, once for all its rollouts. If this fails, all that wait for it fail."""
        key = _handler_key(spec)
        if key in self._handlers:
            return
        await self._plugins.fetch(spec, namespace, name, uid)
        if key not in self._loading:
            self._loading[key] = asyncio.ensure_future(tried_handler(self._plugins.of(spec), spec.handler))
        loading = self._loading[key]
        try:
            self._handlers[key] = await asyncio.shield(loading)
        finally:
            if loading.done():
                self._loading.pop(key, None)

    def _tool_context(
        self, sandbox: Sandbox | None, spec: RolloutJobSpec, context: int | None
    ) -> ToolContext:
        provider = self._provider
        return ToolContext(
            client=sandbox.client if sandbox is not None else None,
            timeout=float(spec.agent.tool_timeout_seconds),
            max_output_bytes=spec.agent.tool_output_bytes(context),
            oom_killed=functools.partial(provider.oom_killed, sandbox.handle)
            if provider is not None and sandbox is not None
            else None,
            own_end=functools.partial(provider.own_end, sandbox.handle)
            if provider is not None and sandbox is not None
            else None,
        )


def _handler_key(spec: RolloutJobSpec) -> _HandlerKey:
    return spec.handler, digests_of(spec)


def _live_turns(episode: Episode, model: RunModel, first: int) -> list[LiveTurn]:
    """Return the messages of a rollout from the number `first` on, and the turn that is being sampled."""
    turns = turns_from(episode, first)
    sampled = model.source.sampled_now() if model.source is not None else None
    if sampled is not None and first + len(turns) == len(episode.messages) and len(turns) < MAX_LIVE_TURNS:
        running = running_turn(episode, *sampled)
        turns += [running] if running is not None else []
    return turns


def _no_sandboxes() -> PermanentFailure:
    return PermanentFailure("this worker has no sandboxes (start it with --sandbox)", "SandboxMissing")


def _end_in_run(lease: Lease) -> str:
    """Return why the sandbox has ended by itself during Run, or "" if it has not."""
    reason = lease.trajectory.truncated_reason if lease.trajectory is not None else ""
    return reason if reason in (OUT_OF_MEMORY, CRASHED) else ""


def _first_crash_fails(lease: Lease, end: str, error: Exception | None) -> None:
    """Raise PipelineError if an exec server has crashed, and Eval has not failed before.

    Eval judges crashes of Run as well, so they give a rollout one new try and no more.
    """
    if end == CRASHED and lease.attempt == 0:
        words = "the exec server of the rollout's sandbox ended by itself"
        raise PipelineError(words, CRASHED, return_to="init") from error
