"""The handler `code`: the policy's program is run in the sandbox, and judged outside of its processes."""

from __future__ import annotations

import ast
import asyncio
import json
import marshal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import MAGIC_NUMBER
from typing import Any, Final, Literal

from rollyard_crds.fields.code_tests import CodeCase, CodeTests
from rollyard_crds.fields.quantity import parse_quantity
from rollyard_crds.fields.signals import SHIPPED
from rollyard_crds.task import Task
from rollyard_sandbox.client import EvalPlace, ExecResult
from rollyard_sandbox.errors import SandboxSabotaged

from rollyard_pipeline.errors import TaskInvalid
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.code import shown
from rollyard_pipeline.handlers.code.assertions import placed_test, plain_test
from rollyard_pipeline.handlers.code.compare import difference, same_result
from rollyard_pipeline.handlers.code.programs import AnswerProgram, needed, whole_program
from rollyard_pipeline.handlers.code.sandboxed import encode
from rollyard_pipeline.sabotage import TEST_TIMEOUT

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
    eval_sandbox = "shared"  # The program is in the answer, and the tests load no file of Run.

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
                failure += f"\ninput: {shown.quoted(case.input)}" if case.input else ""
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
            self.why = f"{shown.calls(results)}\nexpected: {shown.short(case.output or '')}"
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
            self.why = f"the checker refuses the output {shown.quoted(output)}"
            return await self._checked(case, output)
        # Comparing long outputs may take seconds, in which the worker has others to serve.
        different = await asyncio.to_thread(difference, output, case.output or "", tolerance)
        if different is None:
            return True
        line, printed, expected = different
        texts = ["(none)" if text is None else shown.quoted(text) for text in (printed, expected)]
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
            self.why = f"{shown.test(program)}\n{shown.calls(results)}".rstrip()
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
        self.trace = shown.end("".join(str(result.pop("trace", "")) for result in known))
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
            self.trace = shown.end(result.output.decode("utf-8", "replace"))
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
