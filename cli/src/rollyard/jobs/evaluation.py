"""The evaluation of answers and reference solutions on this machine, without a control plane."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError
from rollyard_crds import RolloutJob, Task
from rollyard_crds.reading.manifest import describe
from rollyard_crds.rolloutjob import RolloutJobSpec, TaskSource
from rollyard_crds.task import Message
from rollyard_crds.trajectory import Trajectory
from rollyard_tasks.task_list import TaskListError

from rollyard.errors import InvalidInput
from rollyard.extras import require
from rollyard.jobs.manifests import MAX_PROBLEMS, CheckReport, extensions_with, read_tasks

if TYPE_CHECKING:
    from rollyard_crds.fields.reward import RewardSpec
    from rollyard_pipeline.registry import Registry
    from rollyard_pipeline.sandboxes.interface import SandboxProvider
    from rollyard_pipeline.stages.rescoring import Rescorer, StagesAlone

_ORACLE: Final = "oracle"
_GIVEN: Final = "given"
"""The name of a handler that is given as an object."""
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
    command: str,
    handler: str,
    spec: RolloutJobSpec,
    reward: RewardSpec | None,
    by: str,
    sandbox: str,
    extensions: Registry | None = None,
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
        extensions: Finds the handler and the reward function. None stands for what is installed.

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
            rescorer = Rescorer(handler, spec, reward, by, extensions, provider)
            try:
                runner.run(rescorer.check())
                yield rescorer, runner
            finally:
                runner.run(rescorer.close())
        except PipelineError as error:
            raise InvalidInput(str(error)) from error


def answer_spec(handler: str) -> RolloutJobSpec:
    """Return the spec of a job with this handler, in which the policy gives nothing but its answer.

    Raises:
        InvalidInput: No handler can have this name, or it gives no reward of its own.
    """
    fields = {"tasks": {"stream": True}, "agent": {"type": _ORACLE}, "sandbox": {"warm": 0}}
    try:
        return RolloutJobSpec.model_validate({**fields, "handler": handler})
    except ValidationError as error:
        raise InvalidInput(describe(error)[0].removeprefix("manifest: ")) from error


def answered(job: str, number: int, task_id: str, messages: Sequence[Message]) -> Trajectory:
    """Return the record of a rollout in which the policy gave these messages, and nothing else."""
    return Trajectory(
        id=f"{job}-{number}",
        job=job,
        task_id=task_id,
        group_id=job,
        sample_index=0,
        messages=list(messages),
    )


@dataclass(frozen=True, slots=True)
class EvaluatedAnswer:
    """What a handler or a reward function says about an answer."""

    reward: float | None
    """The reward, or None if the answer could not be evaluated; `error` then says why."""
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why the reward is what it is, in one CamelCase word, or ""."""
    output: str = ""
    """What the handler shows to people."""
    error: str = ""


def evaluate(
    handler: object,
    tasks: Path | str | Sequence[Task | Mapping[str, Any]],
    answers: Sequence[str],
    *,
    sandbox: str = "bubblewrap",
) -> list[EvaluatedAnswer]:
    """Evaluate answers as a job would, without a server, and return what comes of each, in their order.

    It works in a notebook as well. What is given as an object runs in this process.

    Args:
        handler: The name of an installed handler, a class that derives from Handler, or a reward function (a
            function of an episode, or a class that derives from RewardFunction).
        tasks: The tasks, of which mappings may leave out `id` and `prompt`, or a file of tasks.
        answers: What the policy says, a text for each task.
        sandbox: The kind of the sandboxes, for a handler that needs some.

    Raises:
        InvalidInput: The handler judges more than an answer or is unknown, a task is refused, or there are
            not as many answers as tasks.
        LookupFailed: There is no such file.
        UsageProblem: A module is not installed; the message names the extra.
    """
    require("`rollyard.evaluate`", "worker")
    listed = _task_list(tasks)
    if isinstance(answers, str) or len(answers) != len(listed):
        raise InvalidInput(
            f"answers: must be a list with a text for each of the {len(listed)} tasks "
            f"(got {'a text' if isinstance(answers, str) else len(answers)})"
        )
    work = partial(_evaluated, handler, listed, answers, sandbox)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    # The loop of this thread runs, as in a notebook, and waits for this call.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _task_list(tasks: Path | str | Sequence[Task | Mapping[str, Any]]) -> Sequence[Task]:
    if isinstance(tasks, str | Path):
        path = Path(tasks)
        try:
            return read_tasks(path, TaskSource(url=path.name))
        except TaskListError as error:
            raise InvalidInput(f"{path}: {error.problems[0]}") from error
    listed = []
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):
            try:
                task = Task.model_validate({"id": f"task-{number}", "prompt": "?", **task})
            except (ValidationError, TypeError) as error:
                problem = describe(error, "task")[0] if isinstance(error, ValidationError) else str(error)
                raise InvalidInput(f"tasks[{number}]: {problem}") from error
        listed.append(task)
    return listed


def _evaluated(
    handler: object, tasks: Sequence[Task], answers: Sequence[str], sandbox: str
) -> list[EvaluatedAnswer]:
    from rollyard_pipeline.errors import PipelineError
    from rollyard_pipeline.registry import HANDLERS, Registry
    from rollyard_pipeline.stages.rescoring import handler_of

    name, extensions = _GIVEN, None
    if isinstance(handler, str):
        name = handler
    else:
        try:
            extensions = Registry({HANDLERS: {_GIVEN: handler_of(handler)}})
        except TypeError as error:
            raise InvalidInput(f"handler: {error}") from error
    pairs = []
    opened = open_rescorer(
        "evaluate", name, answer_spec(name), None, "rollyard.evaluate", sandbox, extensions
    )
    with opened as (rescorer, runner):
        for number, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            try:
                message = Message(role="assistant", content=answer)
            except ValidationError as error:
                raise InvalidInput(f"answers[{number}]: {describe(error, 'answer')[0]}") from error
            try:
                problems = rescorer.problems(task)
            except PipelineError as error:
                raise InvalidInput(f"tasks[{number}]: {error}") from error
            if problems:
                raise InvalidInput(f"tasks[{number}] ({task.id!r}): {problems[0]}")
            pairs.append((answered("evaluate", number, task.id, [*task.chat(), message]), task))
        records = runner.run(rescorer.rescored(pairs, datetime.now(UTC)))
    return [
        EvaluatedAnswer(
            record.reward,
            record.reward_components,
            record.reward_reason,
            record.reward_output,
            record.message,
        )
        for record in records
    ]


def oracle_spec(spec: RolloutJobSpec, tasks: Sequence[Task]) -> RolloutJobSpec:
    """Return the spec of the same job with the agent `oracle`, and with the tools that its tasks need."""
    named = [call.name for task in tasks for call in task.solution or ()]
    tools = list(dict.fromkeys([*spec.agent.tools, *named]))
    agent = spec.agent.model_copy(update={"type": _ORACLE, "tools": tools})
    sandbox = spec.sandbox.model_copy(update={"warm": 0})
    source = TaskSource(stream=True)
    return spec.model_copy(update={"agent": agent, "sandbox": sandbox, "tasks": source})


def play(
    job: RolloutJob | str, tasks: Sequence[Task], *, sandbox: str, plugins: Sequence[Path] = ()
) -> CheckReport:
    """Play the reference solutions, and report each that does not get the reward 1.

    Args:
        job: The job, or the name of the handler for tasks that come without a job.
        tasks: The tasks.
        sandbox: The kind of the sandboxes, such as `bubblewrap`.
        plugins: Files with further handlers, tools and the like.

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
        spec, extensions = oracle_spec(job.spec, solved), extensions_with(plugins)
        problems = asyncio.run(_play(spec, solved, sandbox, Path(folder), extensions))
    if problems:
        return CheckReport(problems=tuple(problems))
    without = f"; {len(tasks) - len(solved)} tasks have none" if len(solved) < len(tasks) else ""
    return CheckReport(good=(f"{len(solved)} reference solutions get the reward 1{without}",))


async def _play(
    spec: RolloutJobSpec, tasks: Sequence[Task], sandbox: str, folder: Path, extensions: Registry
) -> list[str]:
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
        async with stages_alone(spec, provider, extensions) as stages, asyncio.TaskGroup() as group:
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
