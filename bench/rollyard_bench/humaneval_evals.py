"""The Eval stage of HumanEval's tasks in started sandboxes, beside a fresh process for each test."""

from __future__ import annotations

import asyncio
import gzip
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rollyard_crds import RolloutJobSpec, Task
from rollyard_crds.lease import SandboxHandle
from rollyard_crds.rolloutjob import TaskSource
from rollyard_pipeline.handlers.base import ANSWER, StageContext
from rollyard_pipeline.handlers.code.handler import CodeHandler
from rollyard_pipeline.handlers.code.programs import program_of
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_pipeline.sandboxes.starters.base import SANDBOX_ENV
from rollyard_pipeline.stages.evaluation import evaluate
from rollyard_tasks.task_list import parse_lines

from rollyard_bench.processes import Missing, ProgramFailed
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.sandboxes import OWNER, REQUEST, bubblewrap

AT_ONCE = 2
"""The number of evaluations at the same time, which is the number of cores."""
BLOCK = 16
"""The number of tasks whose sandboxes are started together. The contestants take turns in such blocks."""
TEST_SECONDS = 30.0
SPEC = RolloutJobSpec.model_validate(
    {"tasks": {"stream": True}, "handler": "code", "agent": {"type": "oracle"}}
)


def _tasks() -> list[Task]:
    """Return HumanEval's tasks.

    Raises:
        Missing: ROLLYARD_SHARED names no folder with data/HumanEval.jsonl.gz.
    """
    path = Path(os.environ.get("ROLLYARD_SHARED", "../shared")) / "data" / "HumanEval.jsonl.gz"
    if not path.is_file():
        raise Missing(
            "no HumanEval: set ROLLYARD_SHARED to a folder with data/HumanEval.jsonl.gz "
            "(of github.com/openai/human-eval)"
        )
    with gzip.open(path, "rt") as lines:
        return parse_lines(lines, TaskSource(url="humaneval", format="humaneval"))


def _answer(task: Task) -> str:
    if not task.solution:
        raise ProgramFailed(f"task '{task.id}' has no solution")
    return str(task.solution[0].arguments["answer"])


def _program(task: Task) -> str:
    """Return the program that HumanEval's own scorer runs: the solution, the test, the call of `check`."""
    if task.tests is None or task.tests.cases[0].program is None:
        raise ProgramFailed(f"task '{task.id}' has no test")
    return (
        f"{program_of(_answer(task)).text}\n\n{task.tests.cases[0].program}\n\n"
        f"check({task.tests.entry_point})\n"
    )


async def _bare(task: Task) -> None:
    """Run a test as it is run without a sandbox: the solution and the test in one fresh process."""
    python = shutil.which("python3", path=SANDBOX_ENV["PATH"])
    if python is None:
        raise ProgramFailed("this system has no python3")
    command, environment = (python, "-c", _program(task)), {**SANDBOX_ENV, "HOME": "/tmp"}
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, cwd="/tmp", start_new_session=True, **silent
    )
    try:
        async with asyncio.timeout(TEST_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    if process.returncode != 0:
        raise ProgramFailed(f"the reference solution of '{task.id}' failed its test without a sandbox")


async def _evaluated(
    provider: SandboxProvider, handler: CodeHandler, task: Task, handle: SandboxHandle
) -> None:
    """Do what a stage worker does in Eval, from the connection to the sandbox to the score."""
    sandbox = await provider.attach(handle)
    async with sandbox:
        carry = {ANSWER: _answer(task)}
        context = StageContext(
            task, SPEC, task.id, 0, TEST_SECONDS, sandbox.client, sandbox.workdir, carry=carry
        )
        evaluation = await evaluate(handler, context, 2 * TEST_SECONDS)
    if evaluation.reward != 1.0:
        raise ProgramFailed(f"the reference solution of '{task.id}' got {evaluation.reward}")


async def _timed(steps: Sequence[Callable[[], Awaitable[None]]]) -> float:
    """Return the seconds that these steps take, `AT_ONCE` of them at the same time."""
    waiting = list(reversed(steps))

    async def lane() -> None:
        while waiting:
            await waiting.pop()()

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(lane())
    return time.perf_counter() - begin


async def _ours(provider: SandboxProvider, handler: CodeHandler, tasks: Sequence[Task]) -> float:
    """Return the seconds of Eval for these tasks, each in a sandbox of its own that was started before."""
    async with AsyncExitStack() as stack:
        handles = []
        for _ in tasks:
            sandbox = await provider.acquire(REQUEST, OWNER)
            stack.push_async_callback(provider.release, sandbox.handle)
            # A worker's Run has used the sandbox and closed its connection.
            await sandbox.client.bash("true")
            await sandbox.close()
            handles.append(sandbox.handle)
        steps = [
            lambda task=task, handle=handle: _evaluated(provider, handler, task, handle)
            for task, handle in zip(tasks, handles, strict=True)
        ]
        return await _timed(steps)


async def measure(settings: Settings) -> list[Measurement]:
    """Measure both in blocks of tasks, in turns."""
    tasks = _tasks()
    if settings.quick:
        tasks = tasks[::4]
    blocks = [tasks[at : at + BLOCK] for at in range(0, len(tasks), BLOCK)]
    handler = CodeHandler()
    ours, bare = 0.0, 0.0
    async with bubblewrap() as provider:
        await _ours(provider, handler, tasks[:AT_ONCE])
        await _timed([lambda task=task: _bare(task) for task in tasks[:AT_ONCE]])
        for number, block in enumerate(blocks):
            steps = [lambda task=task: _bare(task) for task in block]
            if number % 2:
                bare += await _timed(steps)
                ours += await _ours(provider, handler, block)
            else:
                ours += await _ours(provider, handler, block)
                bare += await _timed(steps)
    each, alone = (seconds / len(tasks) * 1e3 for seconds in (ours, bare))
    how = (
        f"{len(tasks)} of HumanEval's tasks with their reference solutions, {AT_ONCE} at once, in blocks of "
        f"{BLOCK} that alternate with the baseline; ours: connection, `begin_eval`, the policy's process, "
        f"the end of it, the test's process, the score, in bubblewrap sandboxes that were started and used "
        f"before the clock; {ours:.2f} s against {bare:.2f} s"
    )
    return [Measurement("humaneval_evals", each, Baseline("a fresh process without a sandbox", alone), how)]
