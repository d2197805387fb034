"""The handler `code` in a process without isolation: programs, functions, assertions, limits and credit."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds import RolloutJobSpec, Task
from rollyard_crds.lease import LeaseRef
from rollyard_crds.rolloutjob import TaskSource
from rollyard_pipeline.handlers import Evaluation, StageContext
from rollyard_pipeline.handlers.base import ANSWER
from rollyard_pipeline.handlers.code import handler as handler_module
from rollyard_pipeline.handlers.code.assertions import plain_test
from rollyard_pipeline.handlers.code.handler import CodeHandler, difference, same_result
from rollyard_pipeline.handlers.code.programs import needed, program_of, whole_program
from rollyard_pipeline.handlers.code.sandboxed import decode, encode, text
from rollyard_pipeline.handlers.mixed import MixedHandler
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.stages.evaluation import evaluate
from rollyard_sandbox.client import ExecClient
from rollyard_tasks.formats.contests import CONTEST_PREFIX
from rollyard_tasks.task_list import TaskListError, parse_lines

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
    return (await evaluated(sandbox, answer, task))[0]


async def evaluated(
    sandbox: tuple[ExecClient, str], answer: str, task: Task | dict[str, Any], **env: str
) -> tuple[Evaluation, str]:
    """Return the evaluation of an answer, and what people are shown of it."""
    if isinstance(task, dict):
        task = Task.model_validate({"id": "a", "prompt": "?", "tests": task})
    client, workdir = sandbox
    context = StageContext(task, SPEC, "r", 0, 60.0, client, workdir, env=env, carry={ANSWER: answer})
    handler = MixedHandler()
    try:
        return await evaluate(handler, context, 90.0), context.shown
    finally:
        await handler.close()


def humaneval() -> list[Task]:
    if not SHARED.is_file():
        pytest.skip("ROLLYARD_SHARED names no folder with data/HumanEval.jsonl.gz")
    with gzip.open(SHARED, "rt") as lines:
        return parse_lines(lines, TaskSource(url="x", format="humaneval"))


def solution(task: Task) -> str:
    return str(task.solution[0].arguments["answer"])


def emptied(task: Task) -> str:
    return f"```python\n{task.tests.prefix}    pass\n```"


@pytest.mark.parametrize("number", [0, 1, 32, 33, 38, 44, 50, 53, 83, 160])
async def test_humaneval(sandbox: tuple[ExecClient, str], number: int) -> None:
    """Among them are tests that call a helper of the prompt, the function itself, and random numbers.

    A job plays all 164 (test_data_sets.py).
    """
    task = humaneval()[number]
    assert (await scored(sandbox, solution(task), task)).reward == 1.0
    assert (await scored(sandbox, emptied(task), task)).reward == 0.0


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
        (f"def f(x: int): pass\nassert f.__annotations__['x'] is int\n{ADD}", 1),
        (f"N = {'9' * 5000}\n{ADD}", 1), (f"str(3 ** 10000)\n{ADD}", 1),
        (f"{ADD}\nimport sys; sys.exit(1)", 0),
    ],
)  # fmt: skip
async def test_standard_input_and_output(
    sandbox: tuple[ExecClient, str], program: str, reward: float
) -> None:
    assert (await scored(sandbox, program, {**STDIN, "time_limit_seconds": 3})).reward == reward


async def test_integers_of_any_length(sandbox: tuple[ExecClient, str]) -> None:
    largest = hex(3**10000)
    tests = {"cases": [{"input": str(Decimal(3**10000)), "output": str(Decimal(3**10000 + 1))}]}
    assert (await scored(sandbox, "print(int(input()) + 1)", tests)).reward == 1.0
    assert (await scored(sandbox, "print(int(input()))", {**tests, "compare": "numeric"})).reward == 0.0
    case = {"input": str(Decimal(3**10000)), "output": f"[{Decimal(3**10000 + 1)}]"}
    program = {"program": f"assert f({largest}) == [{Decimal(3**10000 + 1)}]"}
    for each in (case, program):
        asserted = {"entry_point": "f", "cases": [each], "compare": "numeric"}
        assert (await scored(sandbox, "def f(n): return [n + 1]", asserted)).reward == 1.0
        assert (await scored(sandbox, "def f(n): return [n]", asserted)).reward == 0.0


async def test_numpy_fits_into_a_small_memory_limit_on_any_machine(sandbox: tuple[ExecClient, str]) -> None:
    """OpenBLAS would take some 40 MiB for each core of the machine."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    program = "import numpy\nprint(open('/proc/self/status').read().split('Threads:')[1].split()[0])"
    tests = {"cases": [{"input": "", "output": "1"}], "memory_limit": "256Mi"}
    evaluation, shown = await evaluated(sandbox, program, tests, PATH=path)
    assert evaluation.reward == 1.0, shown
    reserving = "import mmap, sys\nmmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE, mmap.PROT_READ)\nprint(1)"
    assert (await scored(sandbox, reserving, tests)).reward == 1.0
    for taking in ("x = bytearray(1 << 28)", "import mmap\nmmap.mmap(-1, 1 << 28, mmap.MAP_PRIVATE)"):
        assert (await scored(sandbox, f"{taking}\nprint(1)", tests)).reward == 0.0


async def test_partial_credit(sandbox: tuple[ExecClient, str]) -> None:
    assert (await scored(sandbox, "print(3)", {**STDIN, "partial": True})).reward == 0.5
    found = await scored(sandbox, "while True: pass", {**STDIN, "time_limit_seconds": 0.5, "partial": True})
    assert (found.reward, found.reason, found.components["test_timeout"]) == (0.0, "TestTimeout", 1.0)
    # A program that has passed another test has a score of its own, and the tests go on after the slow one.
    slow = "a = input()\nwhile a[0] == '4': pass\nprint(sum(map(int, a.split())))"
    cases = [STDIN["cases"][0], STDIN["cases"][1], STDIN["cases"][0]]
    tests = {"cases": cases, "time_limit_seconds": 0.5, "partial": True}
    found = await scored(sandbox, slow, tests)
    assert (found.reward, found.reason) == (pytest.approx(2 / 3), "")
    assert found.components == {"tests_passed": pytest.approx(2 / 3), "test_timeout": 1.0}
    found = await scored(sandbox, slow, {**tests, "partial": False})
    assert (found.reward, found.reason) == (0.0, "")
    assert found.components == {"tests_passed": pytest.approx(1 / 3), "test_timeout": 1.0}


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def add(a, b): return [a[0] + b, a[1]]", 1), ("def add(a, b): return (a[0] + b, a[1])", 1),
        ("class Solution:\n    def add(self, a, b): return [a[0] + b, a[1]]", 1),
        ("def add(a, b): return [a[0] + b + 1e-9, a[1]]", 1),
        ("add = lambda a, b: [a[0] + b, a[1]]", 1), ("def add(a, b): return [3.1, 2]", 0),
        ("def other(a, b): return [3, 2]", 0), ("def add(a, b): raise SystemExit", 0),
        ("def add(a, b): return float('nan')", 0), ("add = 3", 0), ("def add(a, b): return add", 0),
        ("class E(list):\n    def __eq__(s, o): return True\ndef add(a, b): return E([0, 0])", 0),
    ],
)  # fmt: skip
async def test_functions(sandbox: tuple[ExecClient, str], program: str, reward: float) -> None:
    case = {"input": "[1, 2]\n2", "output": "[3, 2]"}
    tests = {"entry_point": "add", "cases": [case], "compare": "numeric"}
    assert (await scored(sandbox, program, tests)).reward == reward


SUM = "print(sum(map(int, input().split())))"
DEPTH = "def depth(n): return n and depth(n - 1)\n"


@pytest.mark.parametrize(
    "program",
    [
        # Imports as LiveCodeBench has them.
        f"assert pow(2, -1, 7) == 4\n{SUM}", f"{DEPTH}assert depth(50_000) == 0\n{SUM}",
        "from functools import lru_cache\n@lru_cache(None)\n" + DEPTH + f"depth(30_000)\n{SUM}",
        f"deepcopy([json.loads('1')])[0] ^ xor(1, 1)\nassert ascii_lowercase[0] == 'a'\n{SUM}",
        f"def f(a: List[int]) -> Optional[int]: pass\nassert Counter('aa')['b'] == mean([0]) == 0\n{SUM}",
        f"from __future__ import annotations\ndef f(a: Unknown): pass\n{SUM}",
        # The process is the program's.
        "import fileinput\nfor line in fileinput.input(): print(sum(map(int, line.split())))",
        f"import sys\nassert sys.argv == ['solution.py']\n{SUM}", f"__file__.encode()\n{SUM}",
        f"import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))\n{SUM}",
        f"def f(): pass\nfrom __main__ import f\n{SUM}",
        f"import sys\nsys.stdin.read()\nsys.stdin.seek(0)\n{SUM}",
    ],
)  # fmt: skip
async def test_programs_of_contests(sandbox: tuple[ExecClient, str], program: str) -> None:
    cases = [{"input": "1 2", "output": "3"}]
    rows = {
        "livecodebench": {"question_content": "?", "public_test_cases": cases},
        "verl": {**VERL, "reward_model": {"ground_truth": cases}},
    }
    for name, row in rows.items():
        (task,) = parse_lines([json.dumps(row)], TaskSource(url="x", format=name))
        assert (await scored(sandbox, program, task)).reward == 1.0


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        # The prefix has a function of the wanted name, too, which is no answer.
        ("", 0), ("# nothing", 0), ("class Solution:\n    def other(self): pass", 0),
        ("class Solution:\n    def gcd(self, a, b): return a and self.gcd(b % a, a) or b", 1),
        ("class Solution:\n    def gcd(self, a, b): return gcd(a, b)", 1),
        ("class Solution:\n    def gcd(self, a, b): return 1", 0), ("from math import gcd", 1),
        ("def gcd(a, b): return math.gcd(a, b)", 1), ("def gcd(a, b): return 1", 0),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    n: 'A'\nfrom math import gcd", 1),
        ("import pickle\nclass A: pass\ndef gcd(a, b): return pickle.dumps(A()) and 2", 1),
    ],
)  # fmt: skip
async def test_functions_of_contests(sandbox: tuple[ExecClient, str], program: str, reward: float) -> None:
    for prefix in (CONTEST_PREFIX, "from math import *\nimport math\nclass Solution:\n    gcd = gcd\n"):
        case = {"input": "4\n6", "output": "2"}
        tests = {"entry_point": "gcd", "prefix": prefix, "cases": [case]}
        assert (await scored(sandbox, program, tests)).reward == reward


@pytest.mark.parametrize(
    ("result", "assertion", "reward"),
    [
        # Types of the standard library are what they are; the test of any other object fails.
        ("Fraction(0)", "f(1) != 0", 0), ("Fraction(1, 2)", "f(1) == 0.5", 1),
        ("Fraction(1, 2)", "f(1) == 1", 0),
        ("Decimal('0.5')", "f(1) == 0.5", 1), ("Decimal('0.1')", "f(1) == 0.1", 0), ("deque()", "f(1)", 0),
        ("deque()", "not f(1)", 1), ("deque([1])", "list(f(1)) == [1]", 1), ("deque([1])", "f(1) == [1]", 0),
        ("{1: 2}.keys()", "set(f(1)) == {1}", 1), ("{1: 2}.values()", "list(f(1)) == [2]", 1),
        ("{1: 2}.items()", "list(f(1)) == [(1, 2)]", 1), ("{1: 2}.keys()", "f(1) == [1]", 0),
        ("defaultdict(int)", "f(1)[9] == 0", 1), ("defaultdict(int)", "f(1) == {9: 0}", 0),
        ("defaultdict(lambda: 3)", "f(1) == {}", 1), ("defaultdict(lambda: 0)", "f(1)[9] == 0", 0),
        ("Counter('aab')", "f(1)['c'] == 0", 1), ("Counter('aab')", "f(1) == {'a': 2, 'b': 1}", 1),
        ("OrderedDict(a=1)", "f(1) == {'a': 1}", 1),
        ("Red.R", "f(1) == 'red'", 1), ("Red.R", "f(1) == 'Red.R'", 0),
        ("Falsy()", "f(1)", 0), ("Falsy()", "f(1) != 2", 0), ("Falsy()", "f(1) is not None", 0),
        ("[Falsy()]", "len(f(1)) == 1", 0), ("Falsy", "callable(f(1)) or True", 0),
    ],
)  # fmt: skip
async def test_objects_that_a_function_returns(
    sandbox: tuple[ExecClient, str], result: str, assertion: str, reward: float
) -> None:
    program = (
        "from collections import *\nfrom decimal import *\nfrom enum import Enum\nfrom fractions import *\n"
        "class Red(str, Enum): R = 'red'\nclass Falsy:\n    def __bool__(self): return False\n"
        f"def f(x): return {result}"
    )
    tests = {"entry_point": "f", "cases": [{"program": f"assert {assertion}"}]}
    assert (await scored(sandbox, program, tests)).reward == reward


async def test_a_method_completes_a_task_of_humaneval(sandbox: tuple[ExecClient, str]) -> None:
    prefix = 'def add(a, b):\n    """Add."""\n'
    tests = {"entry_point": "add", "prefix": prefix, "cases": [{"program": "assert add(1, 2) == 3"}]}
    method = "class Solution:\n    def add(self, a, b): return a {} b"
    assert (await scored(sandbox, method.format("+"), tests)).reward == 1.0
    assert (await scored(sandbox, method.format("-"), tests)).reward == 0.0


async def test_a_checker(sandbox: tuple[ExecClient, str]) -> None:
    checker = "def check(input, output, expected): return sorted(output.split()) == sorted(expected.split())"
    tests = {"cases": [{"input": "", "output": "1 2"}], "compare": "checker", "checker": checker}
    assert (await scored(sandbox, "print(2, 1)", tests)).reward == 1.0
    assert (await scored(sandbox, "print(2, 2)", tests)).reward == 0.0


def same_text(output: str, expected: str, tolerance: float | None) -> bool:
    return difference(output, expected, tolerance) is None


def test_texts_are_compared() -> None:
    assert same_text("a \nb\n\n", "a\nb", None)
    assert not same_text("a\n\nb", "a\nb", None)
    assert same_text("1.0000001 x", "1 x", 1e-6)
    assert not same_text("1.0000001 x", "1 x", None)
    assert not same_text("nan", "1", 1.0)
    assert not same_text("1 1", "1", 1e-6)
    assert same_text("1.25 inf", "1 inf", 0.25)
    assert not same_text("1.5", "1", 0.25)
    assert same_text("1000.5", "1000", 0.001), "the tolerance is relative, too"
    assert not same_text("inf", "1e999999", None)
    assert not same_text("inf", "1e308", 1.0)
    assert not same_text("x", "1", 1e9)
    assert not same_text("1", "x", 1e9)
    assert not same_text("1\n9", "1\n2", 1e-6)
    assert not same_text(f"1{'0' * 400}", f"1{'0' * 399}1", 1.0), "whole numbers of any length must be equal"
    assert same_text("", "\n \n", None)
    assert same_text(" a", "a", None)
    assert not same_text("a\nb", "a", 1.0)


@pytest.mark.parametrize(
    ("output", "expected", "tolerance", "found"),
    [
        ("a\nx\ny", "a\nb\nc", None, (2, "x", "b")), ("a", "a\nb", None, (2, None, "b")),
        ("a\nb", "a", None, (2, "b", None)), ("1.0000001\n3", "1\n2", 1e-6, (2, "3", "2")),
        ("", "a", None, (1, "", "a")),
    ],
)  # fmt: skip
def test_the_first_line_that_differs_is_named(
    output: str, expected: str, tolerance: float | None, found: tuple[int, str | None, str | None]
) -> None:
    assert difference(output, expected, tolerance) == found
    assert difference(expected, expected, tolerance) is None


@pytest.mark.parametrize(
    ("result", "expected", "tolerance", "same"),
    [
        ([1, 2], [1, 2, 3], None, False), ([1, 2, 3], [1, 2], None, False), ([1, 3], [1, 2], None, False),
        ((1,), [1], None, True), ({1}, [1], None, False), ("1", 1, None, False), (1, "1", None, False),
        (None, None, None, True), (None, False, None, False), (False, 0, None, False), (1, True, None, False),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, None, False), ({"a": 1}, {"a": 1, "b": 2}, None, False),
        ({"a": 1, "b": 2}, {"a": 1}, None, False), ({"a": None}, {"b": None}, None, False),
        ({1: 1}, {"1": 1}, None, False), ({"a": 1}, [["a", 1]], None, False), ([], {}, None, False),
        (1.5, 1, 0.5, True), (1.6, 1, 0.25, False), (3, 2.5, 0.5, True), (1.5, 1, None, False),
        (1.0, 1, None, True), (float("inf"), 1, 9.0, False), (float("nan"), 1, 9.0, False),
        (2**70, 2**70, None, True), (2**70, 2**70 + 1, None, False), (-5, -5, None, True),
        ([1, [2, 3.1]], [1, [2, 3]], 0.25, True), (b"a", "a", None, False), (1 + 0j, 1, None, False),
    ],
)  # fmt: skip
def test_results_are_compared_with_json(
    result: Any, expected: Any, tolerance: float | None, same: bool
) -> None:
    assert same_result(json.loads(json.dumps(encode(result))), expected, tolerance) is same


def test_a_key_that_is_reported_twice_makes_up_for_no_other() -> None:
    twice = {"d": [["a", {"i": "1"}], ["a", {"i": "1"}]]}
    assert not same_result(twice, {"a": 1, "b": 1}, None)
    assert not same_result({"x": "1"}, 1, None)


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


@pytest.mark.parametrize(
    ("program", "results", "verdict"),
    [
        ("assert candidate(1) == 2", [2], True), ("assert f(1) == 2", [3], False),
        ("assert f(1)", [0], False), ("assert f(1) == {g: 2}", [{1: 2}], None),
        ("def check(c):\n    assert candidate(1, k=[2]) == (3, [4])", [(3, [4])], True),
        ("import math\nM = {'a': 1}\n'said'\nassert f(1) is True", [True], True),
        ("assert f(1) is True", [1], False), ("assert abs(f(1) - 0.5) < 1e-6, 'far'", [0.5000001], True),
        ("assert tuple(f(1)) == tuple(f(2))", [[1, 2], (1, 2)], True), ("assert not f(1)", [""], True),
        ("assert sorted(f(1)) == [1, 'a']", [["a", 1]], False), ("assert len(f(1)) == 2", [5], None),
        ("assert f(1) == {1: 2}", [{1: 2}], True), ("assert f(1) == x", [1], None),
        ("assert f(1) * 9 == 9", [1], None), ("assert f(1) == 1\nf(2)", [1, 2], None),
        ("abs = len\nassert abs(f(1)) == 1", [1], None), ("assert f(1) + 'a' == 'ba'", ["b"], None),
        ("def abs(x): return 1\nassert abs(f(1)) == 1", [5], None), ("assert True", [], True),
        ("assert f(1) == [1]", [iter([1])], None), ("assert f(1) == 1", [set(range(2000))], None),
        ("assert f(1) == 1", ["x" * 100_000], None), ("assert f(1) == 1", [[1] * 30_000], None),
    ],
)  # fmt: skip
def test_simple_assertions_are_judged_without_a_process(
    program: str, results: list[Any], verdict: bool | None
) -> None:
    found = plain_test(program, "f")
    assert len(found.calls) == len(results)
    known = [{"v": encode(result)} for result in results]
    assert found.verdict(known) is verdict
    if results and verdict is not None:
        assert found.verdict([{"e": "ValueError"}] * len(known)) is False


@pytest.mark.parametrize(
    "program",
    [
        "for i in range(3): assert f(i)", "assert f(f(1))", "assert f(x)", "assert f(1) if 0 else 1",
        "assert True or f(1)", "g = f\nassert g(1)", "assert f(*[1])", "assert f(**{})",
        "assert all(map(f, [1]))",
        "assert f(2**65 * 2)", "assert f(2**65)", "assert f(2**-1)", "assert f(1e999 - 1e999)",
        "assert f([0] * 9)",
        "assert f('a' * 9)", "assert f('a' + 1)", "assert f(1 // 2)", "assert f((10**40 + 1) + 1.0)",
        "def check(c):\n    assert c(1)\ncheck(f)", "is no Python", "try:\n    f(1)\nexcept Exception: pass",
    ],
)  # fmt: skip
def test_other_tests_are_run_to_find_their_calls(program: str) -> None:
    assert plain_test(program, "f") is None


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("3 * 19 * 3", [171]), ("[1, 0**0, -0]", [[1, 1, 0]]), ("'ab' + 'c', 1.5 - 1", ["abc", 0.5]),
        ("1 + 2j", [1 + 2j]), ("{1: (2, 3)}, 2**64", [{1: (2, 3)}, 2**64]), ("True, None", [True, None]),
    ],
)  # fmt: skip
def test_arguments_that_are_calculated_from_literals_are_read(arguments: str, values: list[Any]) -> None:
    found = plain_test(f"assert f({arguments}) == 1", "f")
    assert found.calls == [[encode(tuple(values)), encode({})]]


async def test_a_python_of_another_version_compiles_by_itself(
    sandbox: tuple[ExecClient, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_POLICYS", "_AUTHORS"):
        _, _, source = getattr(handler_module, name)
        monkeypatch.setattr(handler_module, name, (b"other", b"no code", source))
    tests = {"entry_point": "f", "cases": [{"program": "for i in range(3): assert f(i) == i + 1"}]}
    assert (await scored(sandbox, "def f(x): return x + 1", tests)).reward == 1.0
    assert (await scored(sandbox, "def f(x): return x", tests)).reward == 0.0


@pytest.mark.parametrize(
    ("answer", "tests", "shown"),
    [
        ("print(input())", {"cases": [{"input": "1\n", "output": "1"}]}, "1 of 1 tests passed."),
        ("print('a\\nb')", {"cases": [{"input": "", "output": "a\nc\n"}]},
         "0 of 1 tests passed.\nTest 1 of 1 failed: line 2 of the output is 'b'\nexpected: 'c'"),
        ("print('a')", {"cases": [{"input": "", "output": "a\nb"}]},
         "Test 1 of 1 failed: line 2 of the output is (none)\nexpected: 'b'"),
        ("1 / 0", {"cases": [{"input": "", "output": "a"}]},
         "failed: the program ended with exit status 1: it did not run to its end\n"
         'Traceback (most recent call last):\n  File "solution.py", line 1, in <module>\n'
         "ZeroDivisionError: division by zero"),
        ("print('said')\nno Python", {"cases": [{"input": "", "output": "a"}]},
         "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit('no luck')", {"cases": [{"input": "7", "output": "a"}]},
         "it did not run to its end\ninput: '7'\nno luck"),
        ("```python\nprint(1)\n```\n```text\n1\n```", {"cases": [{"input": "", "output": "a"}]},
         "Program: block 1 of 2 (python, lines 1-3).\n0 of 1 tests passed."),
        ("print(1)", {"cases": [{"input": "", "output": "1"}]},
         "Program: the whole answer, which has no fenced block.\n1 of 1 tests passed."),
        ("\n ", {"cases": [{"input": "", "output": "1"}]}, "There is no answer.\n0 of 1 tests passed."),
        ("print('a' * (6 << 20))", {"cases": [{"input": "", "output": "a"}]}, "it printed too much"),
        ("while True: pass", {"cases": [{"input": "7", "output": "a"}], "time_limit_seconds": 1},
         "the program did not end in time\ninput: '7'"),
        ("def f(x): return [x, {'a': (1.5, None)}]",
         {"entry_point": "f", "cases": [{"input": "41", "output": "42"}]},
         "call 1 returned [41, {'a': (1.5, None)}]\nexpected: 42\ninput: '41'"),
        ("def f(x): return x", {"entry_point": "f", "partial": True, "cases": [
            {"program": "assert f(1) == 1"}, {"program": "assert f(1) == 2"}, {"program": "assert f(2) == 0"},
        ]},
         "1 of 3 tests passed.\nTest 2 of 3 failed: assert f(1) == 2\ncall 1 returned 1"),
        ("def f(x): return {}[x]", {"entry_point": "f", "cases": [
            {"program": "for i in range(9): assert f(i)"}]},
         "for i in range(9): assert f(i)\ncall 1 raised KeyError\ncall 2 raised KeyError"),
        ("def g(x): return {}[x]\ndef f(x): return g(x)", {"entry_point": "f", "cases": [
            {"program": "assert f(5) == 1"}]},
         'assert f(5) == 1\ncall 1 raised KeyError\nTraceback (most recent call last):\n'
         '  File "solution.py", line 2, in f\n  File "solution.py", line 1, in g\nKeyError: 5'),
        ("def f(x): raise E\nclass E(Exception):\n    def __str__(self): 1 / 0",
         {"entry_point": "f", "cases": [{"input": "1", "output": "2"}]},
         "call 1 raised Exception\nexpected: 2\ninput: '1'\nTraceback"),
        ("def f(x): return 1", {"entry_point": "f", "cases": [
            {"program": "assert f(1) == 1"}, {"program": "raise ValueError"}]},
         "Test 2 of 2 failed: raise ValueError\nthe test raised ValueError"),
        ("def f(x): return 1", {"entry_point": "f", "cases": [{"program": "import os\nos._exit(f(1))"}]},
         "os._exit(f(1))\ncall 1 returned 1\nthe program of the test ended with exit status 1"),
        ("def f(x): return 1", {"entry_point": "f", "compare": "checker",
          "checker": "def check(i, o, e):\n    import os\n    os._exit(3)", "cases": [
            {"input": "1", "output": "2"}]},
         "call 1 returned 1\nexpected: 2\nthe program of the test ended with exit status 3"),
    ],
)  # fmt: skip
async def test_people_are_shown_the_first_test_that_failed(
    sandbox: tuple[ExecClient, str], answer: str, tests: dict[str, Any], shown: str
) -> None:
    evaluation, found = await evaluated(sandbox, answer, tests)
    assert shown in found
    assert ("failed" in found) is (evaluation.reward < 1.0)


def test_a_test_that_names_its_function_otherwise_is_run() -> None:
    found = plain_test("def check(c):\n    assert c(1)", "f")
    assert (found.calls, found.verdict([])) == ([], None)


def test_helpers_come_where_they_are_needed() -> None:
    helpers = "import math\nfrom typing import List\ndef poly(x): return x\ndef f(x): return x"
    assert needed(helpers, "assert poly(f(1)) == 1", "f") == helpers
    assert needed(helpers, "assert math.fabs(f(1)) == 1", "f") == helpers
    assert needed(helpers, "assert f(1) == 1", "f") == ""
    assert needed(f"{helpers}\nprint(1)", "assert f(1) == 1", "f") != ""


def test_answers_are_written_as_json() -> None:
    value = [None, True, {"x": 'a"\n\ud800é'}, []]
    assert json.loads(text(value)) == value


async def test_packages_and_exit_are_there(sandbox: tuple[ExecClient, str]) -> None:
    """Python starts without `site`, which a program does not notice."""
    program = (
        "import site\ntry:\n    import no_such_module\nexcept ImportError:\n    print(3)\nexit()\nprint(4)"
    )
    tests = {"cases": [{"input": "", "output": "3"}]}
    assert (await scored(sandbox, program, tests)).reward == 1.0
    program = (
        "import sys\ntry:\n    import no_such_module\nexcept ImportError:\n    print('site' in sys.modules)"
    )
    assert (await scored(sandbox, program, {"cases": [{"input": "", "output": "True"}]})).reward == 1.0


def test_programs_are_taken_from_answers() -> None:
    assert program_of("```\nfirst\n```\n```py\nlast\n```\n").text == "last\n"
    prefix = 'import math\n\ndef f(x):\n    """Double."""\n'
    assert whole_program(prefix, "    return 2 * x\n", "f").text == f"{prefix}    return 2 * x\n"
    assert whole_program(prefix, "def f(x): return x\n", "f").prefix.startswith(prefix)


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


async def test_further_tests_of_mbpp_plus_count(sandbox: tuple[ExecClient, str]) -> None:
    row = {**MBPP, "test": "for a, b, found in [([3], [3], {3})]:\n    assert share(a, b) == found"}
    (task,) = parse_lines([json.dumps(row)], TaskSource(url="x", format="mbpp"))
    assert (await scored(sandbox, solution(task), task)).reward == 1.0
    listed = "def share(a, b): return {2} if 2 in b else set()"
    assert (await scored(sandbox, listed, task)).reward == 0.0


NODE = "class Node:\n    def __init__(self, v): self.v, self.next = v, None"
LENGTH = "def length(n): return 0 if n is None else 1 + length(n.next)"
MADE = "root = Node(1)\nroot.next = Node(2)"


@pytest.mark.parametrize(
    ("code", "setup", "wrong"),
    [
        # The class is the solution's, or that of the setup code.
        (f"{NODE}\n{LENGTH}", MADE, f"{NODE}\ndef length(n): return 1"),
        (LENGTH, f"{NODE}\n{MADE}", "def length(n): return n.v"),
        (LENGTH.replace("n)", "n: 'Node')"), f"{NODE}\n{MADE}", "def length(n: Node): return 1"),
    ],
)
async def test_mbpp_with_objects(sandbox: tuple[ExecClient, str], code: str, setup: str, wrong: str) -> None:
    tests = ["assert (length(root)) == 2", "assert length(root.next) == 1", "assert length(None) == len([])"]
    row = {**MBPP, "code": code, "test_list": tests, "test_setup_code": setup}
    (task,) = parse_lines([json.dumps(row)], TaskSource(url="x", format="mbpp"))
    assert MADE in str(task.prompt)
    assert (await scored(sandbox, solution(task), task)).reward == 1.0
    assert (await scored(sandbox, wrong, task)).reward == 0.0


async def test_results_of_apps_may_stand_in_lists(sandbox: tuple[ExecClient, str]) -> None:
    truth = {"fn_name": "even", "inputs": [[2], [3]], "outputs": [[True], [False]]}
    row = {**VERL, "reward_model": {"ground_truth": json.dumps(truth)}}
    (task,) = parse_lines([json.dumps(row)], TaskSource(url="x", format="verl"))
    for right in ("def even(n): return n % 2 == 0", "def even(n): return [n % 2 == 0]"):
        assert (await scored(sandbox, right, task)).reward == 1.0
    for wrong in ("def even(n): return True", "def even(n): return [[n % 2 == 0]]", "def even(n): return []"):
        assert (await scored(sandbox, wrong, task)).reward == 0.0


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
    tests = {"entry_point": "f", "setup": "x = g()", "cases": [{"program": "for i in x: assert f(i)"}]}
    task = Task.model_validate({"id": "a", "prompt": "?", "tests": tests})
    assert CodeHandler().check(task) == [
        "tests.cases[0].program: with 'setup', it must call f in plain assertions only"
    ]
