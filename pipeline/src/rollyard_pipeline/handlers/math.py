"""The handler `math`: the final answer must equal the gold answer, as math-verify judges.

math-verify builds on sympy, whose simplification can run for hours on a short hostile input and cannot be
interrupted in a thread. A comparison that exceeds its limit is therefore ended with its process. `python -m
rollyard_pipeline.handlers.math` is the child. It reads the JSON line `{"golds": […], "answer": …}` and writes
the JSON line `{"equal": …, "why": …, "answered": …}`, or `{"unreadable": …}` where an expected answer cannot
be read in any way and no other one is equal.

sympy's own `sympify` and `parse_expr` evaluate what they read as Python. Texts of the policy therefore reach
the parser of LaTeX only, latex2sympy's, which has a grammar of its own.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, Final

from rollyard_crds.fields.signals import SHIPPED
from rollyard_crds.task import Task

from rollyard_pipeline.child_processes import ChildProcesses, begin_child
from rollyard_pipeline.errors import ChildFailed, ChildTimeout, TaskInvalid
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.statements import statements
from rollyard_pipeline.sabotage import ANSWER_UNUSABLE, VERIFY_TIMEOUT

_MEMORY: Final = 2 << 30  # The size of a child's address space in bytes.


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    from rollyard_pipeline.handlers.comparison import compare

    answer, unreadable, whys = request["answer"], None, []
    for gold in request["golds"]:
        equal, why = compare(gold, answer)
        if equal:
            return {"equal": True, "why": why, "answered": bool(statements(answer))}
        if equal is None and unreadable is None:
            unreadable = why
        whys.append(why)
    if unreadable is not None:
        return {"unreadable": unreadable}
    return {"equal": False, "why": "\n".join(whys), "answered": bool(statements(answer))}


def main() -> None:
    """Answer requests until the input ends. This is the child's main function."""
    import rollyard_pipeline.handlers.comparison  # noqa: F401  It loads sympy before the first request.

    logging.disable(logging.WARNING)  # math-verify warns about missing timeouts, which the parent enforces.
    begin_child(_MEMORY)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_reply(json.loads(line))), flush=True)


_FAILED: Final = "VerifierFailed"
_VERDICT_SECONDS: Final = 10.0
_LONGEST: Final = 65_536  # Characters. The answer stands at the end of what the policy said.


class MathHandler(Handler):
    r"""Returns reward 1.0 for the right answer, else 0.0.

    The answer comes from `submit` or from the last assistant message: `<answer>…</answer>`, the last
    `\boxed{…}`, what follows `####` or "answer is", else the last sentence. `task.answer` may be a whole
    solution that ends with `#### n`, as in GSM8K. Where the task has `answers`, the answer must be one of
    them. An answer that cannot be compared in time scores 0, with the reason VerifyTimeout and the component
    `verify_timeout`. An answer that kills the process which compares it also scores 0, with the reason
    AnswerUnusable.
    """

    needs_sandbox = False
    reward_range = SHIPPED["math"].reward
    components = SHIPPED["math"].components

    def __init__(self) -> None:
        self._children = ChildProcesses(
            __name__, what="the verifier", failed=_FAILED, timeout="VerifierTimeout"
        )

    def check(self, task: Task) -> list[str]:
        """Return a problem if the task has no answer that can be compared."""
        return [] if task.accepted_answers() else ["answer: required by the handler 'math'"]

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return a score of 1.0 if the answer equals the task's, else 0.0.

        Raises:
            TaskInvalid: The task has no answer.
            ChildFailed: The task's answer cannot be read, or no process can compare it.
        """
        golds = ctx.task.accepted_answers()
        if not golds:
            raise TaskInvalid(f"task '{ctx.task.id}': answer: required by the handler 'math'")
        text = ctx.final_text[-_LONGEST:]
        answered = {"answered": 1.0}  # An answer that takes too long to compare is still an answer.
        try:
            verdict = await self._compared(ctx, golds, text)
        except ChildTimeout:
            expected = "\nexpected: ".join(golds)
            ctx.show(f"The comparison was ended after {_VERDICT_SECONDS:g} s.\nexpected: {expected}")
            return Evaluation(0.0, {**answered, "verify_timeout": 1.0}, VERIFY_TIMEOUT)
        except ChildFailed:
            # This is the proof: if the verifier can compare each gold answer with itself, the other answer
            # ended it.
            for gold in golds:
                _check_keys(ctx.task, await self._compared(ctx, [gold], gold))
            return Evaluation(0.0, answered, ANSWER_UNUSABLE)
        _check_keys(ctx.task, verdict)
        ctx.show(str(verdict["why"]))
        return Evaluation(float(verdict["equal"]), {"answered": float(verdict["answered"])})

    async def _compared(self, ctx: StageContext, golds: list[str], answer: str) -> dict[str, Any]:
        request = {"golds": golds, "answer": answer}
        return await self._children.ask_twice(request, min(_VERDICT_SECONDS, ctx.timeout))

    async def close(self) -> None:
        """End the processes that compare answers."""
        await self._children.close()


def _check_keys(task: Task, verdict: dict[str, Any]) -> None:
    """Raise an exception if an expected answer cannot be read in any way, and no other one is equal."""
    if "unreadable" in verdict:
        problem = f"the expected answer cannot be read: {verdict['unreadable']}"
        raise ChildFailed(f"task '{task.id}': answer: {problem}", _FAILED)


if __name__ == "__main__":
    main()
