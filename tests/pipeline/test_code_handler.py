"""The handler `code` in a process without isolation: programs, functions, assertions, limits and credit."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds import RolloutJobSpec, Task, TaskListError, parse_lines
from rollyard_crds.lease import LeaseRef
from rollyard_crds.rolloutjob import TaskSource
from rollyard_pipeline.handlers import Evaluation, StageContext
from rollyard_pipeline.handlers.base import ANSWER
from rollyard_pipeline.handlers.code.compare import same_result, same_text
from rollyard_pipeline.handlers.code.handler import CodeHandler
from rollyard_pipeline.handlers.code.programs import program_of, whole_program
from rollyard_pipeline.handlers.code.sandboxed import decode, encode
from rollyard_pipeline.handlers.mixed import MixedHandler
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.stages.evaluation import evaluate
from rollyard_sandbox.client import ExecClient

SPEC = RolloutJobSpec.model_validate(
    {"tasks": {"stream": True}, "handler": "code", "agent": {"type": "oracle"}}
)
SHARED = Path(os.environ.get("ROLLYARD_SHARED", "")) / "data" / "HumanEval.jsonl.gz"


@pytest.fixture
async def sandbox(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[ExecClient, str]]:
    provider = open_provider("process", run_dir=tmp_path_factory.mktemp("e"), node="n")
    await provider.start()
    sandbox = await provider.acquire(SandboxRequest(), LeaseRef(rollout="r", token=1))
    try:
        yield sandbox.client, sandbox.workdir
    finally:
        await sandbox.close()
        await provider.release(sandbox.handle)
        await provider.aclose()


async def scored(sandbox: tuple[ExecClient, str], answer: str, task: Task | dict[str, Any]) -> Evaluation:
    if isinstance(task, dict):
        task = Task.model_validate({"id": "a", "prompt": "?", "tests": task})
    client, workdir = sandbox
    context = StageContext(task, SPEC, "r", 0, 60.0, client, workdir, carry={ANSWER: answer})
    handler = MixedHandler()
    try:
        return await evaluate(handler, context, 90.0)
    finally:
        await handler.close()


def humaneval() -> list[Task]:
    if not SHARED.is_file():
        pytest.skip("ROLLYARD_SHARED names no folder with data/HumanEval.jsonl.gz")
    with gzip.open(SHARED, "rt") as lines:
        return parse_lines(lines, TaskSource(url="x", format="humaneval"))


def solution(task: Task) -> str:
    assert task.solution is not None
    return str(task.solution[0].arguments["answer"])


def emptied(task: Task) -> str:
    assert task.tests is not None
    return f"```python\n{task.tests.prefix}    pass\n```"


@pytest.mark.parametrize("number", [0, 1, 32, 33, 38, 44, 50, 53, 83, 160])
async def test_humaneval(sandbox: tuple[ExecClient, str], number: int) -> None:
    """Among them are tests that call a helper of the prompt, the function itself, and random numbers."""
    task = humaneval()[number]
    assert (await scored(sandbox, solution(task), task)).reward == 1.0
    assert (await scored(sandbox, emptied(task), task)).reward == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 164, 8))
async def test_all_of_humaneval(sandbox: tuple[ExecClient, str], start: int) -> None:
    for task in humaneval()[start : start + 8]:
        assert (await scored(sandbox, solution(task), task)).reward == 1.0, task.id
        assert (await scored(sandbox, emptied(task), task)).reward == 0.0, task.id


STDIN = {"cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5", "output": "9"}]}
ADD = "print(sum(map(int, input().split())))"


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        (ADD, 1), (f"So:\n```python\n{ADD}\n```\nThis adds.", 1), (f"{ADD}\nimport sys; sys.exit(0)", 1),
        (f"{ADD}\nimport os; os.kill(os.getpid(), 9)", 0), (f"{ADD}\nraise ValueError", 0), ("print(3)", 0),
        ("", 0), ("not Python", 0), ("while True: pass", 0), ("x = 'a' * (1 << 31)\n" + ADD, 0),
        ("import sys\nprint('x' * (6 << 20))", 0), (f"import sys; print('e', file=sys.stderr)\n{ADD}", 1),
        ("import os; os._exit(0)", 0), ("\ud800", 0), ("\0", 0),
    ],
)  # fmt: skip
async def test_standard_input_and_output(
    sandbox: tuple[ExecClient, str], program: str, reward: float
) -> None:
    assert (await scored(sandbox, program, {**STDIN, "time_limit_seconds": 3})).reward == reward


async def test_partial_credit(sandbox: tuple[ExecClient, str]) -> None:
    assert (await scored(sandbox, "print(3)", {**STDIN, "partial": True})).reward == 0.5
    found = await scored(sandbox, "while True: pass", {**STDIN, "time_limit_seconds": 0.5, "partial": True})
    assert (found.reward, found.reason, found.components["test_timeout"]) == (0.0, "TestTimeout", 1.0)


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def add(a, b): return [a[0] + b, a[1]]", 1), ("def add(a, b): return (a[0] + b, a[1])", 1),
        ("class Solution:\n    def add(self, a, b): return [a[0] + b, a[1]]", 1),
        ("def add(a, b): return [a[0] + b + 1e-9, a[1]]", 1), ("def add(a, b): return [3.1, 2]", 0),
        ("def other(a, b): return [3, 2]", 0), ("def add(a, b): raise SystemExit", 0),
        ("def add(a, b): return float('nan')", 0), ("add = 3", 0), ("def add(a, b): return add", 0),
        ("class E(list):\n    def __eq__(s, o): return True\ndef add(a, b): return E([0, 0])", 0),
    ],
)  # fmt: skip
async def test_functions(sandbox: tuple[ExecClient, str], program: str, reward: float) -> None:
    case = {"input": "[1, 2]\n2", "output": "[3, 2]"}
    tests = {"entry_point": "add", "cases": [case], "compare": "numeric"}
    assert (await scored(sandbox, program, tests)).reward == reward


async def test_a_checker(sandbox: tuple[ExecClient, str]) -> None:
    checker = "def check(input, output, expected): return sorted(output.split()) == sorted(expected.split())"
    tests = {"cases": [{"input": "", "output": "1 2"}], "compare": "checker", "checker": checker}
    assert (await scored(sandbox, "print(2, 1)", tests)).reward == 1.0
    assert (await scored(sandbox, "print(2, 2)", tests)).reward == 0.0


def test_texts_are_compared() -> None:
    assert same_text("a \nb\n\n", "a\nb", None)
    assert not same_text("a\n\nb", "a\nb", None)
    assert same_text("1.0000001 x", "1 x", 1e-6)
    assert not same_text("1.0000001 x", "1 x", None)
    assert not same_text("nan", "1", 1.0)
    assert not same_text("1 1", "1", 1e-6)


def test_values_keep_their_type() -> None:
    values: list[Any] = [
        None,
        True,
        10**5000,
        1.5,
        float("inf"),
        "x",
        b"x",
        (1, [2]),
        {1: {2}},
        1 + 2j,
        range(3),
    ]
    assert decode(json.loads(json.dumps(encode(values)))) == values
    assert list(decode(encode(iter([1, 2])))) == [1, 2]
    assert decode(encode(object())) != decode(encode(object()))
    assert not same_result(encode({"a": 1}), {"b": 1}, None)
    assert same_result(encode({"a": (1, 2.5)}), {"a": [1, 2.5]}, None)
    assert not same_result(encode(True), 1, None)


def test_programs_are_taken_from_answers() -> None:
    assert program_of("```\nfirst\n```\n```py\nlast\n```\n") == "last\n"
    assert program_of("<think>```python\nx\n```</think>y") == "y"
    prefix = 'import math\n\ndef f(x):\n    """Double."""\n'
    assert whole_program(prefix, "    return 2 * x\n", "f") == f"{prefix}    return 2 * x\n"
    assert whole_program(prefix, "def f(x): return x\n", "f").startswith(prefix)


MBPP = {
    "task_id": 2, "text": "Find what two lists share.",
    "code": "def share(a, b):\n    return set(a) & set(b)",
    "test_list": ["assert share([1, 2], [2]) == {2}", "assert share([1], [2]) == set()"],
    "test_setup_code": "",
}  # fmt: skip
VERL = {
    "data_source": "taco", "prompt": [{"role": "user", "content": "?"}], "ability": "code",
    "reward_model": {"ground_truth": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})},
}  # fmt: skip


async def test_mbpp(sandbox: tuple[ExecClient, str]) -> None:
    (task,) = parse_lines([json.dumps(MBPP)], TaskSource(url="x", format="mbpp"))
    assert task.id == "mbpp/2"
    assert (await scored(sandbox, solution(task), task)).reward == 1.0
    assert (await scored(sandbox, "def share(a, b): return {2}", task)).reward == 0.0
    with pytest.raises(TaskListError, match="line 1: test_list: calls no function of 'code'"):
        parse_lines([json.dumps({**MBPP, "test_list": ["assert 1"]})], TaskSource(url="x", format="mbpp"))


async def test_rows_of_several_kinds_in_one_job(sandbox: tuple[ExecClient, str]) -> None:
    rows = [
        VERL,
        {**VERL, "ability": "mcq", "reward_model": {"ground_truth": "B"}},
        {**VERL, "ability": "math", "reward_model": {"ground_truth": "1/2"}},
        {**VERL, "reward_model": {"ground_truth": {"inputs": [[[1, 2]]], "outputs": [3], "fn_name": "add"}}},
    ]
    tasks = parse_lines([json.dumps(row) for row in rows], TaskSource(url="x", format="verl"))
    right = [ADD, "Answer: B", "Answer: 0.5", "def add(numbers): return sum(numbers)"]
    for task, answer in zip(tasks, right, strict=True):
        assert (await scored(sandbox, answer, task)).reward == 1.0
        assert (await scored(sandbox, "Answer: C", task)).reward == 0.0


def test_tasks_that_cannot_be_tested() -> None:
    assert CodeHandler().check(Task(id="a", prompt="?")) == ["tests: required by the handler 'code'"]
    tests = {"entry_point": "f", "cases": [{"input": "[1", "output": "1"}]}
    task = Task.model_validate({"id": "a", "prompt": "?", "tests": tests})
    assert CodeHandler().check(task)[0].startswith("tests.cases[0]: input and output must be JSON")
