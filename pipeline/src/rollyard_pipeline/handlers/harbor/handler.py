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
from rollyard_sandbox.client import EvalPlace
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
from rollyard_pipeline.handlers.base import Evaluation, FolderChanges, Handler, StageContext, check_setup
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
    """Whether what the policy left made it impossible to prepare the next step."""
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
        top = _plan(task).dockerfile(image)
        return _folder(task).below(top) if top else None

    def eval_apart(self, task: Task) -> TaskSandbox | None:
        """Return the sandbox of a separate verifier."""
        plan = _plan(task)
        return plan.verifier_sandbox() if plan.separate else None

    def changes(self, task: Task, workdir: str) -> FolderChanges | None:
        """Return the working folder, or None for a separate verifier, which gets the artifacts only."""
        if _plan(task).separate:
            return None
        return FolderChanges(self.folder(task, workdir), MAX_CARRY_BYTES, lambda _path: False)

    def artifacts(self, task: Task) -> Sequence[str]:
        """Return the paths of the artifacts."""
        return (ARTIFACTS, *_plan(task).artifacts)

    def eval_hosts(self, task: Task) -> Sequence[str] | None:
        """Return the hosts that the task states for its tests."""
        return _plan(task).tests_hosts

    def folder(self, task: Task, workdir: str) -> str:
        """Return the working folder of the task's image, or the sandbox's own one."""
        plan = _plan(task)
        return workdir if plan.workdir == WORKDIR else plan.workdir

    async def init(self, ctx: StageContext) -> None:
        """Make the folders of the logs, bring the first step's files, and wait until the task is ready.

        Raises:
            TaskInvalid: The job's sandboxes are smaller than the task asks for, or the job has a network or
                a carry that the task cannot have.
            SetupFailed: A script of the task failed, or its working folder is missing.
        """
        steps = _Steps(ctx)
        plan = steps.plan
        for problem in resource_problems(plan, ctx.spec.sandbox.resources):
            raise TaskInvalid(f"task '{ctx.task.id}': {problem}")
        _check_stages(ctx.task, plan, ctx.spec)
        for name in ("agent", "artifacts", "verifier"):
            await verifier.make_folder(ctx.sandbox, f"{LOGS}/{name}")
        if plan.separate and ctx.purpose != "rollout":
            return
        await super().init(ctx)
        if plan.healthcheck is not None:
            await steps.wait_until_healthy(plan.healthcheck)
        await steps.prepare(plan.steps[0])
        if not await verifier.enter(ctx.sandbox, plan):
            raise SetupFailed(f"task '{ctx.task.id}': environment.workdir {plan.workdir}: no such folder")

    async def run(self, ctx: StageContext) -> None:
        """Let the agent play each step, and verify each but the last one that is played."""
        steps = _Steps(ctx)
        try:
            await steps.play()
        finally:
            # Run's time limit may have ended it anywhere.
            ctx.carry[_STATE] = asdict(steps.progress)

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Run the tests of the last step that was played, and return the task's reward.

        Raises:
            RewardUnusable: The tests gave no reward that can be used.
        """
        steps = _Steps(ctx, Progress(**ctx.carry.get(_STATE, {})))
        plan, progress = steps.plan, steps.progress
        step = plan.steps[min(len(progress.steps), len(plan.steps) - 1)]
        if ctx.purpose == "control":
            if step is not plan.steps[0]:
                # It builds on what the policy has left, so no other sandbox shows that the task is at fault.
                return Evaluation(0.0)
            verdict = await steps.verdict(step)
            return Evaluation(verdict.rewards.get(REWARD, 0.0), {}, verdict.reason)
        if progress.unusable is not None:
            raise RewardUnusable(*progress.unusable)
        rewards_of_steps, reason = list(progress.steps), progress.reason
        if not progress.stopped and not progress.broken:
            verdict = await steps.verdict(step)
            rewards_of_steps.append(dict(verdict.rewards))
            reason = verdict.reason or reason
            is_last = len(rewards_of_steps) == len(plan.steps)
            progress.stopped = below(verdict.rewards, step.min_reward) and not is_last
        if progress.broken:
            reason = SABOTAGED
        if not progress.stopped:
            # The policy ended the episode before these.
            rewards_of_steps += [{} for _ in plan.steps[len(rewards_of_steps) :]]
        rewards = combined(rewards_of_steps, plan.strategy)
        components = {key: value for key, value in rewards.items() if key != REWARD}
        if len(plan.steps) > 1:
            named = zip(plan.steps, rewards_of_steps, strict=False)
            components |= {f"step.{each.name}": values.get(REWARD, 0.0) for each, values in named}
        return Evaluation(rewards[REWARD], components, reason)


class _Steps:
    """The steps of a task in one stage of a rollout.

    Args:
        ctx: The context of the stage.
        progress: What Run has verified.
    """

    def __init__(self, ctx: StageContext, progress: Progress | None = None) -> None:
        self._ctx = ctx
        self.plan = _plan(ctx.task)
        self._folder = _folder(ctx.task)
        self.progress = progress or Progress()

    async def play(self) -> None:
        """Let the agent play each step, and verify each but the last one that is played."""
        ctx, agent = self._ctx, self._ctx.agent_steps
        assert agent is not None
        for number, step in enumerate(self.plan.steps):
            if number and not await self._begun(step):
                return
            if number:
                agent.say(step.instruction)
            if ctx.spec.agent.type == _ORACLE and step.solution:
                await verifier.empty(ctx.sandbox, SOLUTION)
                await verifier.upload(ctx.sandbox, SOLUTION, self._folder.below(step.solution))
            further = await agent.step(_with_solution(ctx.task, self.plan, step), step.agent_seconds)
            if not further or number == len(self.plan.steps) - 1:
                return
            if not await self._verified(step):
                return

    async def _begun(self, step: HarborStep) -> bool:
        """Prepare a later step, and return False if what the policy left makes that impossible."""
        try:
            await self.prepare(step)
            possible = await verifier.enter(self._ctx.sandbox, self.plan)
        except SetupFailed:
            possible = False
        except ExecError as error:
            if not reward_reason(error):
                raise
            possible = False
        self.progress.broken = not possible
        return possible

    async def _verified(self, step: HarborStep) -> bool:
        """Verify a step between two runs of the agent, and return whether the next one is to be played."""
        ctx, progress = self._ctx, self.progress
        try:
            place = await ctx.sandbox.begin_eval()
            if place.sabotage:
                raise SandboxSabotaged("; ".join(place.sabotage))
            shown = {**ctx.env, **place.environment}
            env = evaluation_environment(shown, place, workdir=ctx.workdir, author=ctx.env)
            verdict = await self._verdict(step, place, env, step.verifier_seconds)
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

    async def verdict(self, step: HarborStep) -> StepVerdict:
        """Run the tests of a step in Eval, and show people what they print."""
        ctx = self._ctx
        assert ctx.place is not None
        seconds = min(step.verifier_seconds, ctx.timeout)
        verdict = await self._verdict(step, ctx.place, ctx.eval_env, seconds)
        ctx.show(verdict.printed)
        return verdict

    async def _verdict(
        self, step: HarborStep, place: EvalPlace, env: Mapping[str, str], seconds: float
    ) -> StepVerdict:
        client = self._ctx.sandbox
        return await verifier.verify(
            client, self.plan, step, self._folder, place=place, env=env, timeout=seconds
        )

    async def prepare(self, step: HarborStep) -> None:
        """Bring a step's files into the working folder, run its setup script, and wait until it is ready.

        Raises:
            SetupFailed: The script failed, or the step did not become ready.
            rollyard_sandbox.errors.SandboxError: A file cannot be written, or the sandbox failed.
        """
        ctx, workdir = self._ctx, self.plan.workdir
        files: dict[str, tuple[bytes, int]] = self._folder.below(step.workdir) if step.workdir else {}
        await verifier.upload(ctx.sandbox, workdir, files)
        if "setup.sh" in files:
            script = f"{workdir}/setup.sh"
            result = await ctx.sandbox.run(
                ["bash", script], cwd=workdir, timeout=ctx.timeout, max_output=_OUTPUT
            )
            await verifier.remove(ctx.sandbox, script)
            check_setup(ctx.task, f"{step.workdir}/setup.sh", result)
        if step.healthcheck is not None:
            await self.wait_until_healthy(step.healthcheck)

    async def wait_until_healthy(self, check: Healthcheck) -> None:
        """Repeat a health check until it succeeds. The stage's own limit bounds it, too.

        Raises:
            SetupFailed: It did not succeed as often as it may fail.
        """
        started, failures = time.monotonic(), 0
        cwd = self.plan.workdir if self.plan.workdir != WORKDIR else None
        while True:
            result = await self._ctx.sandbox.run(
                ["bash", "-c", check.command], cwd=cwd, timeout=check.timeout, max_output=_OUTPUT
            )
            if result.exit_code == 0 and not result.timed_out:
                return
            # Failures during the start period do not count.
            failures += time.monotonic() - started > check.start
            if failures > check.retries:
                words = f"the health check {check.command[:200]!r} failed: {result.text()[-500:]}"
                raise SetupFailed(f"task '{self._ctx.task.id}': {words}")
            await asyncio.sleep(max(0.1, check.interval))


def _folder(task: Task) -> HarborFolder:
    if task.harbor is None:
        raise TaskInvalid(f"task '{task.id}': harbor: required by the handler 'harbor'")
    return task.harbor


def _plan(task: Task) -> HarborPlan:
    try:
        return harbor_plan(_folder(task))
    except HarborRefused as error:
        raise TaskInvalid(f"task '{task.id}': harbor: {error}") from error


def _with_solution(task: Task, plan: HarborPlan, step: HarborStep) -> Task:
    calls = [FunctionCall(**call) for call in solution_calls(plan, step)]
    return task.model_copy(update={"solution": calls or None})


def _check_stages(task: Task, plan: HarborPlan, spec: RolloutJobSpec) -> None:
    """Check that the task can have the job's networks and its carry."""
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
