"""The handler `harbor`: task folders with tests that write a reward, in one step or in several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from rollyard_crds.fields.eval_carry import MAX_CARRY_BYTES
from rollyard_crds.fields.harbor import HarborFolder
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import FunctionCall, Task, TaskSandbox
from rollyard_sandbox.errors import SandboxError as ExecError
from rollyard_sandbox.errors import SandboxSabotaged
from rollyard_tasks.harbor.dockerfiles import DOCKERFILE_IMAGE
from rollyard_tasks.harbor.plan import (
    ARTIFACTS,
    LOGS,
    SOLUTION,
    TESTS,
    WORKDIR,
    HarborPlan,
    HarborStep,
    Healthcheck,
    harbor_plan,
    resource_problems,
    solution_calls,
)
from rollyard_tasks.harbor.table import HarborRefused

from rollyard_pipeline.errors import RewardUnusable, SetupFailed, TaskInvalid
from rollyard_pipeline.handlers.base import Evaluation, FolderChanges, Handler, StageContext
from rollyard_pipeline.handlers.environment import evaluation_environment
from rollyard_pipeline.handlers.harbor import verifier
from rollyard_pipeline.handlers.harbor.rewards import REWARD, below, combined
from rollyard_pipeline.handlers.harbor.verifier import StepVerdict
from rollyard_pipeline.sabotage import SABOTAGED, reward_reason

_STATE: Final = "harbor"
_OUTPUT: Final = 8192  # The number of bytes of output that an error message may have.
_ORACLE: Final = "oracle"


@dataclass(slots=True)
class Progress:
    """What Run passes to Eval in `ctx.carry`: the verdicts of the steps that Run has verified."""

    steps: list[dict[str, float]] = field(default_factory=list)
    """The rewards of each of them."""
    reason: str = ""
    """The `reward_reason` of the last one that has one."""
    stopped: bool = False
    """Whether a step's reward was below its `min_reward`, so no later step was to be played."""
    broken: bool = False
    """Whether the next step could not be prepared, because of what the policy left."""
    unusable: tuple[str, str] | None = None
    """Why the next step's tests gave no reward, and the `reward_reason` for it."""


class HarborHandler(Handler):
    """Returns what the tests of a task folder write to /logs/verifier.

    The tests of the last step run in Eval. Those of earlier steps run in Run, between two steps of the agent,
    after every process of the policy has been killed.
    """

    eval_sandbox = "shared"  # The tests of a task folder look at the state of the container.
    fetches = True

    def check(self, task: Task) -> list[str]:
        """Return the problems of the task folder."""
        if task.harbor is None:
            return ["harbor: required by the handler 'harbor'; give the job tasks.format: harbor"]
        try:
            harbor_plan(task.harbor)
        except HarborRefused as error:
            return [f"harbor: {error}"]
        return []

    def dockerfile(self, task: Task, image: str) -> Mapping[str, tuple[bytes, int]] | None:
        """Return the folder `environment`, or `tests` of a separate verifier."""
        if not image.startswith(DOCKERFILE_IMAGE):
            return None
        plan, folder = _plan(task)
        top = plan.dockerfile(image)
        return folder.below(top) if top else None

    def eval_apart(self, task: Task) -> TaskSandbox | None:
        """Return the sandbox of a separate verifier."""
        plan, _ = _plan(task)
        return plan.verifier_sandbox() if plan.separate else None

    def changes(self, task: Task, workdir: str) -> FolderChanges | None:
        """Return the working folder, or None for a separate verifier, which gets the artifacts only."""
        plan, _ = _plan(task)
        if plan.separate:
            return None
        return FolderChanges(self.folder(task, workdir), MAX_CARRY_BYTES, lambda _path: False)

    def artifacts(self, task: Task) -> Sequence[str]:
        """Return the paths of the artifacts."""
        plan, _ = _plan(task)
        return (ARTIFACTS, *plan.artifacts)

    def eval_hosts(self, task: Task) -> Sequence[str] | None:
        """Return the hosts that the task states for its tests."""
        plan, _ = _plan(task)
        return plan.tests_hosts

    def folder(self, task: Task, workdir: str) -> str:
        """Return the working folder of the task's image, or the sandbox's own one."""
        plan, _ = _plan(task)
        return workdir if plan.workdir == WORKDIR else plan.workdir

    async def init(self, ctx: StageContext) -> None:
        """Make the folders of the logs, bring the first step's files, and wait until the task is ready.

        Raises:
            TaskInvalid: The job's sandboxes are smaller than the task asks for, or the job has a network or
                a carry that the task cannot have.
            SetupFailed: A script of the task failed, or its working folder is missing.
        """
        plan, folder = _plan(ctx.task)
        for problem in resource_problems(plan, ctx.spec.sandbox.resources):
            raise TaskInvalid(f"task '{ctx.task.id}': {problem}")
        _check_stages(ctx.task, plan, ctx.spec)
        for name in ("agent", "artifacts", "verifier"):
            await verifier.make_folder(ctx.sandbox, f"{LOGS}/{name}")
        if plan.separate and ctx.purpose != "rollout":
            return
        await super().init(ctx)
        if plan.healthcheck is not None:
            await _wait_until_healthy(ctx, plan, plan.healthcheck)
        await _prepare(ctx, plan, folder, plan.steps[0])
        if not await verifier.enter(ctx.sandbox, plan):
            raise SetupFailed(f"task '{ctx.task.id}': environment.workdir {plan.workdir}: no such folder")

    async def run(self, ctx: StageContext) -> None:
        """Let the agent play each step, and verify each but the last one that is played."""
        plan, folder = _plan(ctx.task)
        progress = Progress()
        try:
            await self._play(ctx, plan, folder, progress)
        finally:
            # Run's time limit may have ended it anywhere.
            ctx.carry[_STATE] = asdict(progress)

    async def _play(
        self, ctx: StageContext, plan: HarborPlan, folder: HarborFolder, progress: Progress
    ) -> None:
        agent = ctx.agent_steps
        assert agent is not None
        for number, step in enumerate(plan.steps):
            if number and not await self._begun(ctx, plan, folder, step, progress):
                return
            if number:
                agent.say(step.instruction)
            if ctx.spec.agent.type == _ORACLE and step.solution:
                await verifier.empty(ctx.sandbox, SOLUTION)
                await verifier.upload(ctx.sandbox, SOLUTION, folder.below(step.solution))
            going_on = await agent.step(_with_solution(ctx.task, plan, step), step.agent_seconds)
            if not going_on or number == len(plan.steps) - 1:
                return
            if not await self._verified(ctx, plan, folder, step, progress):
                return

    async def _begun(
        self, ctx: StageContext, plan: HarborPlan, folder: HarborFolder, step: HarborStep, progress: Progress
    ) -> bool:
        """Prepare a later step, and return False if what the policy left makes that impossible."""
        try:
            await _prepare(ctx, plan, folder, step)
            possible = await verifier.enter(ctx.sandbox, plan)
        except SetupFailed:
            possible = False
        except ExecError as error:
            if not reward_reason(error):
                raise
            possible = False
        progress.broken = not possible
        return possible

    async def _verified(
        self, ctx: StageContext, plan: HarborPlan, folder: HarborFolder, step: HarborStep, progress: Progress
    ) -> bool:
        """Verify a step between two runs of the agent, and return whether the next one is to be played."""
        try:
            place = await ctx.sandbox.begin_eval()
            if place.sabotage:
                raise SandboxSabotaged("; ".join(place.sabotage))
            shown = {**ctx.env, **place.environment}
            env = evaluation_environment(shown, place, workdir=ctx.workdir, author=ctx.env)
            verdict = await verifier.verify(
                ctx.sandbox, plan, step, folder, place=place, env=env, timeout=step.verifier_seconds
            )
            # The next step must not find the tests and the verdict of this one.
            await verifier.empty(ctx.sandbox, TESTS)
            await verifier.make_folder(ctx.sandbox, verifier.VERIFIER)
        except RewardUnusable as error:
            progress.unusable = (str(error), error.reward_reason)
            return False
        except ExecError as error:
            if not reward_reason(error):
                raise
            verdict = StepVerdict({}, SABOTAGED)
        progress.steps.append(dict(verdict.rewards))
        progress.reason = verdict.reason or progress.reason
        progress.stopped = below(verdict.rewards, step.min_reward)
        return not progress.stopped

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Run the tests of the last step that was played, and return the task's reward.

        Raises:
            RewardUnusable: The tests gave no reward that can be used.
        """
        plan, folder = _plan(ctx.task)
        progress = Progress(**ctx.carry.get(_STATE, {}))
        step = plan.steps[min(len(progress.steps), len(plan.steps) - 1)]
        if ctx.purpose == "control":
            if step is not plan.steps[0]:
                # It builds on what the policy has left, so no other sandbox shows that the task is at fault.
                return Evaluation(0.0)
            verdict = await self._verdict(ctx, plan, folder, step)
            return Evaluation(verdict.rewards.get(REWARD, 0.0), {}, verdict.reason)
        if progress.unusable is not None:
            raise RewardUnusable(*progress.unusable)
        steps, reason = list(progress.steps), progress.reason
        if not progress.stopped and not progress.broken:
            verdict = await self._verdict(ctx, plan, folder, step)
            steps.append(dict(verdict.rewards))
            reason = verdict.reason or reason
            progress.stopped = below(verdict.rewards, step.min_reward) and len(steps) < len(plan.steps)
        if progress.broken:
            reason = SABOTAGED
        if not progress.stopped:
            # The policy ended the episode before these.
            steps += [{} for _ in plan.steps[len(steps) :]]
        rewards = combined(steps, plan.strategy)
        components = {key: value for key, value in rewards.items() if key != REWARD}
        if len(plan.steps) > 1:
            named = zip(plan.steps, steps, strict=False)
            components |= {f"step.{step.name}": got.get(REWARD, 0.0) for step, got in named}
        return Evaluation(rewards[REWARD], components, reason)

    async def _verdict(
        self, ctx: StageContext, plan: HarborPlan, folder: HarborFolder, step: HarborStep
    ) -> StepVerdict:
        assert ctx.place is not None
        verdict = await verifier.verify(
            ctx.sandbox,
            plan,
            step,
            folder,
            place=ctx.place,
            env=ctx.eval_env,
            timeout=min(step.verifier_seconds, ctx.timeout),
        )
        ctx.show(verdict.printed)
        return verdict


def _plan(task: Task) -> tuple[HarborPlan, HarborFolder]:
    if task.harbor is None:
        raise TaskInvalid(f"task '{task.id}': harbor: required by the handler 'harbor'")
    try:
        return harbor_plan(task.harbor), task.harbor
    except HarborRefused as error:
        raise TaskInvalid(f"task '{task.id}': harbor: {error}") from error


def _with_solution(task: Task, plan: HarborPlan, step: HarborStep) -> Task:
    calls = [FunctionCall(**call) for call in solution_calls(plan, step)]
    return task.model_copy(update={"solution": calls or None})


def _check_stages(task: Task, plan: HarborPlan, spec: RolloutJobSpec) -> None:
    """Check that the job's networks and its carry are such as the task can have."""
    stage = spec.stages.eval
    in_run = spec.sandbox.network != "none" and task.sandbox.allowed_hosts != []
    in_eval = stage.allowed_hosts is not None and plan.tests_hosts != ()
    if len(plan.steps) > 1 and (in_run or in_eval):
        # Earlier steps are verified in Run's sandbox, where tests would have the network, and with them what
        # the policy left for them to run.
        raise TaskInvalid(
            f"task '{task.id}': a task of several steps needs network_mode = 'no-network' where the job's "
            "sandbox.network or stages.eval.network is not none"
        )
    if stage.carry is not None and stage.carry.files:
        raise TaskInvalid(
            f"task '{task.id}': stages.eval.carry.files: the handler 'harbor' carries the working folder and "
            "the artifacts of the task"
        )


async def _prepare(ctx: StageContext, plan: HarborPlan, folder: HarborFolder, step: HarborStep) -> None:
    """Bring a step's files into the working folder, run its setup script, and wait until it is ready.

    Raises:
        SetupFailed: The script failed, or the step did not become ready.
        rollyard_sandbox.errors.SandboxError: A file cannot be written, or the sandbox failed.
    """
    files: dict[str, tuple[bytes, int]] = folder.below(step.workdir) if step.workdir else {}
    await verifier.upload(ctx.sandbox, plan.workdir, files)
    if "setup.sh" in files:
        argv = ["bash", f"{plan.workdir}/setup.sh"]
        result = await ctx.sandbox.run(argv, cwd=plan.workdir, timeout=ctx.timeout, max_output=_OUTPUT)
        await verifier.remove(ctx.sandbox, f"{plan.workdir}/setup.sh")
        if result.timed_out or result.exit_code != 0:
            how = "ran out of time" if result.timed_out else f"exited with {result.exit_code}"
            words = f"task '{ctx.task.id}': {step.workdir}/setup.sh {how}: {result.text()[-1000:]}"
            raise SetupFailed(words)
    if step.healthcheck is not None:
        await _wait_until_healthy(ctx, plan, step.healthcheck)


async def _wait_until_healthy(ctx: StageContext, plan: HarborPlan, check: Healthcheck) -> None:
    """Repeat a health check until it succeeds. The stage's own limit bounds it, too.

    Raises:
        SetupFailed: It did not succeed as often as it may fail.
    """
    started, failures = time.monotonic(), 0
    cwd = plan.workdir if plan.workdir != WORKDIR else None
    while True:
        result = await ctx.sandbox.run(
            ["bash", "-c", check.command], cwd=cwd, timeout=check.timeout, max_output=_OUTPUT
        )
        if result.exit_code == 0 and not result.timed_out:
            return
        # Failures in the time of the start do not count.
        failures += time.monotonic() - started > check.start
        if failures > check.retries:
            words = f"the health check {check.command[:200]!r} failed: {result.text()[-500:]}"
            raise SetupFailed(f"task '{ctx.task.id}': {words}")
        await asyncio.sleep(max(0.1, check.interval))
