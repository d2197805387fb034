"""The evaluation of answers and reference solutions on this machine, without a control plane."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollyard_crds import RolloutJob, Task
from rollyard_crds.rolloutjob import RolloutJobSpec, TaskSource

from rollyard.errors import InvalidInput
from rollyard.extras import require
from rollyard.jobs.manifests import MAX_PROBLEMS, CheckReport

if TYPE_CHECKING:
    from rollyard_crds.fields.reward import RewardSpec
    from rollyard_pipeline.sandboxes.interface import SandboxProvider
    from rollyard_pipeline.stages.rescoring import Rescorer, StagesAlone

_ORACLE: Final = "oracle"
SAME_REWARD: Final = 1e-9
"""Rewards that differ by at most this are the same, as for dynamic sampling."""


def same_reward(first: float | None, second: float | None) -> bool:
    """Return whether two rewards are the same, or both are missing."""
    if first is None or second is None:
        return first is second
    return abs(first - second) <= SAME_REWARD


def shown_reward(reward: float | None) -> str:
    """Return a reward for people, rounded to six digits."""
    return "none" if reward is None else f"{reward:.6g}"


def count_bounded(counter: Counter[str], name: str, most: int, others: str) -> str:
    """Count a name, or `others` for a new one beyond `most`, and return what was counted."""
    counted = name if name in counter or len(counter) < most else others
    counter[counted] += 1
    return counted


@contextmanager
def open_rescorer(
    command: str, handler: str, spec: RolloutJobSpec, reward: RewardSpec | None, by: str, sandbox: str
) -> Iterator[tuple[Rescorer, asyncio.Runner]]:
    """Provide a handler that evaluates answers, and the runner of its calls. Its sandboxes end with it.

    The stage worker's modules must be installed.

    Args:
        command: The name of the command that needs it.
        handler: The name of the handler.
        spec: The spec of the job.
        reward: The section `reward` that counts.
        by: Who requests it, for the record.
        sandbox: The kind of the sandboxes, for a handler that needs some.

    Raises:
        UsageProblem: The handler needs a sandbox, whose modules are not installed.
        InvalidInput: The handler judges more than an answer, the reward needs a service, a name is unknown,
            or no sandbox can be started here.
    """
    from rollyard_pipeline.errors import PipelineError
    from rollyard_pipeline.sandboxes import open_provider
    from rollyard_pipeline.stages.rescoring import Rescorer

    with tempfile.TemporaryDirectory(prefix="ryr") as folder, asyncio.Runner() as runner:

        def provider() -> SandboxProvider:
            require(f"`rollyard {command} --handler {handler}`", "worker,sandbox", "sandbox")
            return open_provider(sandbox, run_dir=Path(folder), node=command)

        try:
            rescorer = Rescorer(handler, spec, reward, by, provider=provider)
            try:
                runner.run(rescorer.check())
                yield rescorer, runner
            finally:
                runner.run(rescorer.close())
        except PipelineError as error:
            raise InvalidInput(str(error)) from error


def oracle_spec(spec: RolloutJobSpec, tasks: Sequence[Task]) -> RolloutJobSpec:
    """Return the spec of the same job with the agent `oracle`, and with the tools that its tasks need."""
    named = [call.name for task in tasks for call in task.solution or ()]
    tools = list(dict.fromkeys([*spec.agent.tools, *named]))
    agent = spec.agent.model_copy(update={"type": _ORACLE, "tools": tools})
    sandbox = spec.sandbox.model_copy(update={"warm": 0})
    source = TaskSource(stream=True)
    return spec.model_copy(update={"agent": agent, "sandbox": sandbox, "tasks": source})


def play(job: RolloutJob | str, tasks: Sequence[Task], *, sandbox: str) -> CheckReport:
    """Play the reference solutions, and report each that does not get the reward 1.

    Args:
        job: The job, or the name of the handler for tasks that come without a job.
        tasks: The tasks.
        sandbox: The kind of the sandboxes, such as `bubblewrap`.

    Raises:
        UsageProblem: The stage worker's modules are not installed.
        InvalidInput: There is no handler or no reference solution, the trainer gives the rewards, or
            sandboxes cannot be started here.
    """
    if job == "":
        raise InvalidInput("--oracle needs a manifest, or --handler for a bare task list")
    if isinstance(job, str):
        stream = {"tasks": {"stream": True}, "handler": job, "agent": {"type": _ORACLE}}
        job = RolloutJob.model_validate({"metadata": {"name": _ORACLE}, "spec": stream})
    if job.spec.trainer_reward_seconds is not None:
        raise InvalidInput("--oracle has no reward to look at: the trainer gives those of 'unscored'")
    require("`rollyard validate --oracle`", "worker,sandbox", "worker", "sandbox")
    solved = [task for task in tasks if task.solution]
    if not solved:
        raise InvalidInput("no task has a reference solution, which --oracle would play")
    with tempfile.TemporaryDirectory(prefix="ryo") as folder:
        problems = asyncio.run(_play(oracle_spec(job.spec, solved), solved, sandbox, Path(folder)))
    if problems:
        return CheckReport(problems=tuple(problems))
    without = f"; {len(tasks) - len(solved)} tasks have none" if len(solved) < len(tasks) else ""
    return CheckReport(good=(f"{len(solved)} reference solutions get the reward 1{without}",))


async def _play(spec: RolloutJobSpec, tasks: Sequence[Task], sandbox: str, folder: Path) -> list[str]:
    from rollyard_pipeline.sandboxes import open_provider
    from rollyard_pipeline.sandboxes.errors import SandboxProviderError
    from rollyard_pipeline.stages.rescoring import stages_alone

    problems: list[str] = []
    waiting = iter(tasks)

    async def player(stages: StagesAlone) -> None:
        for task in waiting:
            if len(problems) >= MAX_PROBLEMS:
                return
            problem = await _problem(stages, task)
            if problem:
                problems.append(f"task {task.id!r}: {problem}")

    provider = open_provider(sandbox, run_dir=folder, node="oracle")
    try:
        async with stages_alone(spec, provider) as stages, asyncio.TaskGroup() as group:
            for _ in range(max(2, os.cpu_count() or 2)):
                group.create_task(player(stages))
    except SandboxProviderError as error:
        raise InvalidInput(f"--sandbox {sandbox}: {error}") from error
    return problems


async def _problem(stages: StagesAlone, task: Task) -> str:
    """Return what is wrong with a task's reference solution, or "" if nothing is."""
    from rollyard_pipeline.errors import PipelineError
    from rollyard_sandbox.errors import SandboxError

    try:
        ran, scored = await stages.play(task)
    except (PipelineError, SandboxError) as error:
        return f"{error.reason}: {error}"[:2000]
    if scored.reward is not None and scored.reward >= 1.0:
        return ""
    reason = f" ({scored.reward_reason})" if scored.reward_reason else ""
    messages = ran.trajectory.messages if ran.trajectory is not None else []
    results = [message.content.strip() for message in messages if message.role == "tool"]
    last = f"; its last call showed: {results[-1][-500:]}" if results and results[-1] else ""
    return f"its reference solution got the reward {scored.reward}{reason}{last}"
