"""The handler `code`: the policy's program is run in the sandbox, and judged outside of its processes.

Outputs and results are compared in the worker, as data. Spaces count as LiveCodeBench counts them. A number
may differ from the expected one only where one of the two is written as a fraction, or is a float: whole
numbers are counts and remainders, so the nearest one is as wrong as any other.

The parts of a failed test that people are shown decide nothing, because the policy chose much of them. The
functions that write them take a bounded time, and return a short text, whatever they are given.
"""

from __future__ import annotations

import ast
import asyncio
import json
import marshal
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from importlib.resources import files
from importlib.util import MAGIC_NUMBER
from itertools import islice
from typing import Any, Final, Literal

from rollyard_crds.fields.code_tests import CodeCase, CodeTests
from rollyard_crds.fields.quantity import parse_quantity
from rollyard_crds.fields.signals import SHIPPED
from rollyard_crds.task import Task
from rollyard_sandbox.client import EvalPlace, ExecResult
from rollyard_sandbox.errors import SandboxSabotaged

from rollyard_pipeline.errors import TaskInvalid
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.code.assertions import placed_test, plain_test
from rollyard_pipeline.handlers.code.programs import AnswerProgram, needed, whole_program
from rollyard_pipeline.handlers.code.sandboxed import encode
from rollyard_pipeline.sabotage import TEST_TIMEOUT

_LENGTH: Final = 200
"""The largest number of characters of a value."""
_DEPTH: Final = 3
"""How deep a nested value is shown."""
_ITEMS: Final = 8
"""The largest number of items of a list, and of calls of a test, that are shown."""
_TEST: Final = 1000
"""The largest number of characters of a test."""
_END: Final = 800
"""The largest number of characters of the end of an output."""
_BRACKETS: Final[Mapping[str, str]] = {"l": "[]", "t": "()", "s": "{}", "z": "{}", "y": "<>"}


_MISSING: Final = object()
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]{1,6}+)?")
_WHOLE: Final = re.compile(r"[+-]?[0-9]++")
_SPACES: Final = re.compile(r"\s++")
_ROUNDED: Final = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
"""How distances are calculated. Numbers themselves are compared exactly, in a time that is linear."""
_HALF: Final = Decimal("0.5")
_LONGEST_FLOAT: Final = 32
"""The largest number of characters of a float that a sandbox reports."""
_LONGEST_DECIMAL: Final = 1000
"""The largest number of digits of an exact fraction that is compared with a number."""
_MOST_BITS: Final = 1024
"""The size of an integer in bits beyond which no float is near to it."""


_OUTPUT: Final = 5 << 20
"""The largest number of bytes of a program's output that are read. A longer output is wrong."""
_ROUNDS: Final = 4
"""How often the calls of a test may turn out to depend on the results of earlier ones."""
_JUDGE_SECONDS: Final = 60.0
_MARSHAL: Final = 2
"""The version of the format of requests. Every Python reads it."""


class CodeHandler(Handler):
    """Returns reward 1.0 if the policy's program passes all tests, else 0.0, or the share that passed.

    The program is a fenced block of what `submit` received, or of the last assistant message. It runs
    in processes of its own, with the limits of the tests, and is given inputs only. Outputs are compared in
    the worker. Tests that are programs run in other processes, before and after the policy's, and never
    beside them: every process of the sandbox is killed in between. They get the results as data.
    """

    reward_range = SHIPPED["code"].reward
    components = SHIPPED["code"].components
    judges_answers = True
    sandbox_before_eval = False  # The program is in the answer, and the tests load no file of Run.
    eval_sandbox = "shared"

    def check(self, task: Task) -> list[str]:
        """Return the problems of the tests."""
        tests = task.tests
        if tests is None:
            return ["tests: required by the handler 'code'"]
        name = tests.entry_point or ""
        return [
            f"tests.cases[{number}].program: with 'setup', it must call {name} in plain assertions only"
            for number, case in enumerate(tests.cases)
            if tests.setup and case.program is not None and placed_test(case.program, name) is None
        ]

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Run the tests one after the other. Without partial credit, the first that fails ends it."""
        tests = ctx.task.tests
        problems = self.check(ctx.task)
        if tests is None or problems:
            raise TaskInvalid(f"task '{ctx.task.id}': {problems[0]}")
        # Reading a hostile answer may take a second, in which the worker has others to serve.
        program = await asyncio.to_thread(whole_program, tests.prefix, ctx.final_text, tests.entry_point)
        trial = _Trial(ctx, tests, program)
        passed, failure = 0, ""
        for number, case in enumerate(tests.cases, 1):
            if await trial.passes(case):
                passed += 1
                continue
            if not failure:
                failure = f"Test {number} of {len(tests.cases)} failed: {trial.why}"
                failure += f"\ninput: {quoted_text(case.input)}" if case.input else ""
                failure += f"\n{trial.trace}" if trial.trace else ""
            if not tests.partial:
                break
        ctx.show(f"Program: {program.part}." if ctx.final_text.strip() else "There is no answer.")
        ctx.show(f"{passed} of {len(tests.cases)} tests passed.")
        ctx.show(failure)
        share = passed / len(tests.cases)
        reason = TEST_TIMEOUT if trial.timed_out and passed == 0 else ""
        components = {"tests_passed": share, "test_timeout": float(trial.timed_out)}
        return Evaluation(share if tests.partial else float(passed == len(tests.cases)), components, reason)


@dataclass(slots=True)
class _Trial:
    """The tests of one program.

    `timed_out` says whether a program of the policy exceeded a time limit. `why` says, for people, how the
    last failed test failed.
    """

    ctx: StageContext
    tests: CodeTests
    program: AnswerProgram
    timed_out: bool = False
    why: str = ""
    trace: str = ""
    """The end of the traceback of the policy's program in this test, or of what it printed, for people."""
    used: Literal["", "policy", "author"] = ""
    """The owner of the processes that have run in the current private place."""
    ends: float = field(init=False)

    def __post_init__(self) -> None:
        self.ends = time.monotonic() + self.ctx.timeout

    async def passes(self, case: CodeCase) -> bool:
        """Return whether the program passes one test."""
        self.why = self.trace = ""
        if case.program is not None:
            return await self._asserted(case.program)
        tolerance = self.tests.tolerance if self.tests.compare == "numeric" else None
        if self.tests.entry_point is not None:
            results = await self._results([[encode(tuple(case.arguments())), encode({})]])
            if results is None:
                return False
            self.why = f"{shown_calls(results)}\nexpected: {short_text(case.output or '')}"
            if "v" not in results[0]:
                return False
            if self.tests.checker is not None:
                return await self._checked(case, json.dumps(results[0]["v"]))
            right = [case.result()]
            if self.tests.unwrap and isinstance(right[0], list) and len(right[0]) == 1:
                right += right[0]
            try:
                return any(same_result(results[0]["v"], each, tolerance) for each in right)
            except (ValueError, TypeError, LookupError, RecursionError, OverflowError):
                return False
        output = await self._policys("run", {"input": case.input})
        if output is None:
            return False
        if self.tests.checker is not None:
            self.why = f"the checker refuses the output {quoted_text(output)}"
            return await self._checked(case, output)
        # Comparing long outputs may take seconds, in which the worker has others to serve.
        different = await asyncio.to_thread(difference, output, case.output or "", tolerance)
        if different is None:
            return True
        line, printed, expected = different
        texts = ["(none)" if text is None else quoted_text(text) for text in (printed, expected)]
        self.why = f"line {line} of the output is {texts[0]}\nexpected: {texts[1]}"
        return False

    async def _asserted(self, program: str) -> bool:
        name = self.tests.entry_point or ""
        placed = placed_test(program, name) if self.tests.setup else None
        if placed is not None:
            program = placed.program
        helpers = needed(self.tests.helpers, program, name)
        request = {"program": program, "helpers": helpers, "entry_point": name}
        plain = plain_test(program, name)
        calls = plain.calls if plain is not None else None
        answered: list[Any] = []
        for _ in range(_ROUNDS):
            if calls is None:
                collected = await self._authors("judge", {**request, "answered": answered, "collect": True})
                if collected is None:
                    return False
                calls = collected["calls"]
            results = await self._results(calls if placed is None else placed.expressions)
            if results is None:
                return False
            self.why = f"{shown_test(program)}\n{shown_calls(results)}".rstrip()
            if plain is not None and not helpers and calls is plain.calls:
                decided = plain.verdict(results)
                if decided is not None:
                    return decided
            answered = [list(pair) for pair in zip(calls, results, strict=True)]
            verdict = await self._authors("judge", {**request, "answered": answered, "collect": False})
            if verdict is None or not verdict["more"] or placed is not None:
                if verdict is not None and verdict["error"]:
                    self._also(f"the test raised {verdict['error']}")
                return verdict is not None and verdict["passed"] is True
            calls = None
        return False

    async def _checked(self, case: CodeCase, output: str) -> bool:
        request = {
            "checker": self.tests.checker,
            "input": case.input,
            "output": output,
            "expected": case.output,
        }
        verdict = await self._authors("check", request)
        return verdict is not None and verdict["passed"] is True

    async def _results(self, calls: Sequence[Any]) -> list[Any] | None:
        """Return what the policy's function returns for each list of arguments, or None if one is missing."""
        request = {"entry_point": self.tests.entry_point, "setup": self.tests.setup, "calls": calls}
        output = await self._policys("call", request)
        if output is None:
            return None
        self.why = "the program did not report what its function returns"
        try:
            results = [json.loads(line) for line in output.splitlines()]
            # The judge gets them, which a deeper value would prevent.
            marshal.dumps([[[[results]]]], _MARSHAL)
        except (ValueError, RecursionError):
            return None
        known = [result for result in results if isinstance(result, dict)]
        self.trace = shown_end("".join(str(result.pop("trace", "")) for result in known))
        whole = len(known) == len(results) == len(calls) and all(len(result) == 1 for result in known)
        return known if whole else None

    async def _policys(self, action: str, request: dict[str, Any]) -> str | None:
        """Return what a process with the policy's program says, or None unless it ends in time and with 0."""
        source = {"prefix": self.program.prefix, "source": self.program.text}
        result = await self._run(action, {**request, **source}, self.tests.time_limit_seconds)
        if result is None or result.timed_out:
            self.timed_out, self.why = True, "the program did not end in time"
            return None
        if result.exit_code != 0 or result.truncated_bytes:
            much = "it printed too much" if result.truncated_bytes else "it did not run to its end"
            self.why = f"the program ended with exit status {result.exit_code}: {much}"
            self.trace = shown_end(result.output.decode("utf-8", "replace"))
            return None
        return result.text()

    async def _authors(self, action: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return what a program of the task's author says, or None if it says nothing.

        No process of the policy exists meanwhile.
        """
        result = await self._run(action, request, _JUDGE_SECONDS)
        if result is None or result.timed_out:
            self.timed_out = True
            self._also("the program of the test did not end in time")
            return None
        if result.exit_code != 0 or result.truncated_bytes:
            self._also(f"the program of the test ended with exit status {result.exit_code}")
            return None
        try:
            answer = json.loads(result.text())
        except ValueError:
            self._also("the program of the test ended before it gave a verdict")  # By os._exit, for example.
            return None
        return answer if isinstance(answer, dict) else None

    def _also(self, words: str) -> None:
        self.why = f"{self.why}\n{words}".strip()

    async def _private(self, whose: Literal["policy", "author"]) -> EvalPlace:
        """Return a private place in which no process of the other owner has run, and kill those that run."""
        assert self.ctx.place is not None
        if self.used not in ("", whose):
            place = await self.ctx.sandbox.begin_eval()
            if place.sabotage:
                raise SandboxSabotaged("; ".join(place.sabotage))
            self.ctx.place = place
        self.used = whose
        return self.ctx.place

    async def _run(self, action: str, request: dict[str, Any], seconds: float) -> ExecResult | None:
        """Run a process of the policy or the author, or return None if there is no time left for it."""
        of_policy = action in ("call", "run")
        place = await self._private("policy" if of_policy else "author")
        limit = min(seconds, self.ends - time.monotonic())
        if limit <= 0:
            return None
        env = {**_ONE_THREAD, **self.ctx.eval_env, "HOME": place.home, "TMPDIR": place.tmp}
        memory = int(parse_quantity(self.tests.memory_limit))
        program = _POLICYS if of_policy else _AUTHORS
        return await self.ctx.sandbox.run(
            ["python3", "-S", "-c", _START, action],
            env={**env, "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
            clean_env=True,
            cwd=place.tmp if of_policy else place.home,
            stdin=marshal.dumps((*program, {**request, "memory": memory}), _MARSHAL),
            timeout=limit,
            max_output=_OUTPUT,
        )


_ONE_THREAD: Final[Mapping[str, str]] = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "BLIS_NUM_THREADS"),
    "1",
)
"""How libraries are kept from starting a thread, with memory of its own, for each core of the machine."""


def _without_judges(source: str) -> str:
    """Return the source without the parts that only the authors' tests need, because compiling takes time."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if getattr(node, "name", "") not in _JUDGES]
    return ast.unparse(tree)


def _packed(source: str) -> tuple[bytes, bytes, str]:
    """Return the start of a request: a version of Python, the code of a source for it, and the source."""
    return MAGIC_NUMBER, marshal.dumps(compile(source, "sandboxed.py", "exec", dont_inherit=True)), source


_JUDGES: Final = frozenset({"Anything", "Unanswered", "check", "judge", "has_object", "tolerant"})
_SOURCE: Final = files(__package__).joinpath("sandboxed.py").read_text(encoding="utf-8")
_AUTHORS: Final = _packed(_SOURCE)
"""The programs that run in the sandbox, which need nothing that is installed there."""
_POLICYS: Final = _packed(_without_judges(_SOURCE))
_START: Final = """
import marshal, sys
from _frozen_importlib_external import MAGIC_NUMBER
magic, code, source, request = marshal.loads(sys.stdin.buffer.read())
exec(marshal.loads(code) if magic == MAGIC_NUMBER else compile(source, "sandboxed.py", "exec"))
main(sys.argv[1], request)
"""
"""The program that Python is started with. Compiling the other one would be most of the work of the start."""


def difference(
    output: str, expected: str, tolerance: float | None
) -> tuple[int, str | None, str | None] | None:
    """Return the first line in which two outputs differ, as its number, from 1, and both; or None.

    Spaces around lines, empty lines around the whole and spaces between the numbers of a line do not count.

    Args:
        output: What the program has printed.
        expected: What it should print.
        tolerance: The permitted distance of fractions, as a share of the expected number, or of 1 if that is
            0; or None if texts must be equal.

    Returns:
        A line is None where its output has ended.
    """
    printed, correct = _lines(output), _lines(expected)
    index = None if printed == correct else _difference(printed, correct, tolerance)
    if index is None:
        return None
    ends = [lines[index] if index < len(lines) else None for lines in (printed, correct)]
    return index + 1, ends[0], ends[1]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _difference(printed: list[str], expected: list[str], tolerance: float | None) -> int | None:
    for index, (first, second) in enumerate(zip(printed, expected, strict=False)):
        if first != second and not _same_line(first, second, tolerance):
            return index
    return None if len(printed) == len(expected) else min(len(printed), len(expected))


def _same_line(printed: str, expected: str, tolerance: float | None) -> bool:
    words, others = printed.split(), expected.split()
    if len(words) != len(others) or not all(map(_same_word, words, others, [tolerance] * len(words))):
        return False
    return all(map(_NUMBER.fullmatch, others)) or _SPACES.findall(printed) == _SPACES.findall(expected)


def _same_word(printed: str, expected: str, tolerance: float | None) -> bool:
    if printed == expected:
        return True
    if tolerance is None or not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    whole = [_WHOLE.fullmatch(word) is not None for word in (printed, expected)]
    return _near(Decimal(printed), Decimal(expected), None if all(whole) else tolerance, whole=whole[1])


def _near(number: Decimal, expected: Decimal, tolerance: float | None, *, whole: bool) -> bool:
    """Return whether a number is equal to another, or within a tolerance of it.

    Args:
        number: A finite number.
        expected: The expected number, which is finite.
        tolerance: The permitted distance as a share of the expected number, or of 1 if that is 0, or None.
        whole: Whether the expected number is written as a whole one, so that its neighbours are wrong,
            whatever the tolerance is.
    """
    if number == expected:
        return True
    if tolerance is None:
        return False
    distance = _ROUNDED.subtract(number, expected).copy_abs()
    limit = _ROUNDED.multiply(Decimal(str(tolerance)), expected.copy_abs() if expected else Decimal(1))
    return distance <= (min(limit, _HALF) if whole else limit)


def same_result(encoded: Any, expected: Any, tolerance: float | None) -> bool:
    """Return whether a result, in the form of `sandboxed.encode`, is the expected JSON value.

    Tuples and lists are the same, since JSON has no tuples. No object is made of the result, so nothing in it
    decides how it compares.

    Raises:
        ValueError, TypeError, LookupError, RecursionError: The result is not in this form.
    """
    if not isinstance(encoded, dict):
        return type(encoded) is type(expected) and bool(encoded == expected)
    ((mark, content),) = encoded.items()
    if mark == "x" and isinstance(content, list) and len(content) == 2:
        return _same_library(content[0], content[1], expected, tolerance)
    if mark in ("l", "t"):
        return (
            isinstance(expected, list)
            and len(content) == len(expected)
            and all(same_result(one, two, tolerance) for one, two in zip(content, expected, strict=True))
        )
    if mark == "d":
        if not isinstance(expected, dict) or len(content) != len(expected):
            return False
        return all(
            isinstance(key, str) and same_result(value, expected.get(key, _MISSING), tolerance)
            for key, value in content
        ) and len({key for key, _ in content if isinstance(key, str)}) == len(expected)
    if isinstance(expected, bool) or not isinstance(expected, int | float) or not isinstance(content, str):
        return False
    if mark == "i":
        return _same_number(int(content, 16), expected, tolerance)
    return (
        mark == "f" and len(content) <= _LONGEST_FLOAT and _same_number(float(content), expected, tolerance)
    )


def _same_library(name: Any, data: Any, expected: Any, tolerance: float | None) -> bool:
    """Return whether a value of a type of the standard library is the expected JSON value."""
    if name in ("OrderedDict", "Counter"):
        return same_result(data, expected, tolerance)
    if name == "defaultdict":
        return same_result(data["l"][1], expected, tolerance)
    if isinstance(expected, bool) or not isinstance(expected, int | float) or not _is_float(expected):
        return False
    exact = Decimal(repr(expected))
    if name == "Decimal" and isinstance(data, str) and len(data) <= _LONGEST_DECIMAL:
        number = Decimal(data, _ROUNDED)
        return number.is_finite() and (
            number == expected or _near(number, exact, tolerance, whole=isinstance(expected, int))
        )
    if name != "Fraction" or any(len(part["i"]) > _LONGEST_DECIMAL for part in data["l"]):
        return False
    above, below = (int(part["i"], 16) for part in data["l"])
    ratio = exact.as_integer_ratio()
    if below <= 0 or above * ratio[1] == ratio[0] * below:
        return below > 0
    if tolerance is None:
        return False
    number = _ROUNDED.divide(Decimal(above), Decimal(below))
    return _near(number, exact, tolerance, whole=isinstance(expected, int))


def _same_number(number: int | float, expected: int | float, tolerance: float | None) -> bool:
    if number == expected or (number != number and expected != expected):  # Both are not a number.
        return True
    if tolerance is None or (isinstance(number, int) and isinstance(expected, int)):
        return False
    if not (_is_float(number) and _is_float(expected)):
        return False
    return _near(Decimal(repr(number)), Decimal(repr(expected)), tolerance, whole=isinstance(expected, int))


def _is_float(number: int | float) -> bool:
    """Return whether a number is finite, and no larger than floats are."""
    return number.bit_length() <= _MOST_BITS if isinstance(number, int) else math.isfinite(number)


def short_text(text: str, length: int = _LENGTH) -> str:
    """Return the start of a text, with "…" where the rest is left out."""
    return text if len(text) <= length else f"{text[:length]}…"


def quoted_text(text: str) -> str:
    """Return the start of a text as Python would write it."""
    return short_text(repr(text[: _LENGTH + 1]))


def shown_value(encoded: Any, depth: int = 0) -> str:
    """Return the start of a value, which has the form of `sandboxed.encode` or any other of JSON."""
    if isinstance(encoded, str):
        return quoted_text(encoded)
    if not isinstance(encoded, dict):
        return short_text(str(encoded)) if isinstance(encoded, bool | float | None) else f"<{_kind(encoded)}>"
    mark, content = next(iter(encoded.items()), ("", None))
    if isinstance(content, list) and (mark in _BRACKETS or mark == "d"):
        if depth >= _DEPTH:
            return "…"
        if mark == "d":
            return _joined((_pair(item, depth) for item in content), len(content), "{}")
        return _joined((shown_value(item, depth + 1) for item in content), len(content), _BRACKETS[mark])
    if mark == "x" and isinstance(content, list) and len(content) == 2:
        return short_text(f"{_kind(content[0])}({shown_value(content[1], depth)})")
    if mark == "i" and isinstance(content, str):
        return _whole(content)
    return short_text(content) if mark == "f" and isinstance(content, str) else f"<{_kind(content)}>"


def shown_calls(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each of the first calls of the policy's function: what it returned or raised.

    Args:
        results: An object with the key `v` (an encoded value) or `e` (the name of an exception) for each
            call.
    """
    lines = [
        f"call {number} returned {shown_value(result['v'])}"
        if "v" in result
        else f"call {number} raised {_kind(result.get('e'))}"
        for number, result in enumerate(results[:_ITEMS], 1)
    ]
    return "\n".join(lines)


def shown_test(program: str) -> str:
    """Return the start of a test."""
    return short_text(program.strip(), _TEST)


def shown_end(output: str) -> str:
    """Return the last lines of what a program printed, from its traceback on if that is short."""
    lines = output[-_END:].strip().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    return "\n".join(lines[starts[-1] :] if starts else lines)


def _pair(item: Any, depth: int) -> str:
    if not isinstance(item, list) or len(item) != 2:
        return "…"
    return f"{shown_value(item[0], depth + 1)}: {shown_value(item[1], depth + 1)}"


def _joined(items: Iterable[str], count: int, brackets: str) -> str:
    shown = [*islice(items, _ITEMS), *(["…"] if count > _ITEMS else [])]
    return short_text(f"{brackets[0]}{', '.join(shown)}{brackets[1]}")


def _whole(digits: str) -> str:
    try:
        return str(int(digits, 16)) if len(digits) <= 64 else f"a number of {len(digits)} hexadecimal digits"
    except ValueError:
        return "…"


def _kind(content: Any) -> str:
    """Return the kind of a value, if there is nothing better to show."""
    return short_text(content, 50) if isinstance(content, str) else type(content).__name__
