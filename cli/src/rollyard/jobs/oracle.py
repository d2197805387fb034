"""`rollyard validate --oracle`: the reference solutions of a job's tasks are played on this machine."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollyard_crds import RolloutJob, Task
from rollyard_crds.rolloutjob import RolloutJobSpec, TaskSource

from rollyard.errors import InvalidInput
from rollyard.extras import require
from rollyard.jobs.manifests import MAX_PROBLEMS, CheckReport

if TYPE_CHECKING:
    from rollyard_pipeline.stages.alone import StagesAlone

_ORACLE: Final = "oracle"


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
        job: The job, or the name of the handler of tasks that come without one.
        tasks: The tasks.
        sandbox: The kind of the sandboxes, such as `bubblewrap`.

    Raises:
        UsageProblem: The stage worker's modules are not installed.
        InvalidInput: There is no handler or no reference solution, or sandboxes cannot be started here.
    """
    if job == "":
        raise InvalidInput("--oracle needs a manifest, or --handler for a bare task list")
    if isinstance(job, str):
        stream = {"tasks": {"stream": True}, "handler": job, "agent": {"type": _ORACLE}}
        job = RolloutJob.model_validate({"metadata": {"name": _ORACLE}, "spec": stream})
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
    from rollyard_pipeline.stages.alone import stages_alone

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
