"""The handler `math`: the final answer must equal the gold answer, as math-verify judges.

math-verify builds on sympy, whose simplification can run for hours on a short hostile input and cannot be
interrupted in a thread. A comparison that exceeds its limit is therefore ended with its process.
`python -m rollyard_pipeline.handlers.math` is the child. It reads the JSON line
`{"golds": […], "answer": …}` and writes the JSON line `{"equal": …, "why": …, "answered": …}`, or
`{"unreadable": …}` where an expected answer can be read in no way and no other one is equal.

sympy's own `sympify` and `parse_expr` evaluate what they read as Python. Texts of the policy therefore reach
the parser of LaTeX only, latex2sympy's, which has a grammar of its own.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollyard_crds.fields.signals import SHIPPED
from rollyard_crds.task import Task

from rollyard_pipeline.child_processes import ChildProcesses, begin_child
from rollyard_pipeline.errors import ChildFailed, ChildTimeout, TaskInvalid
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.statements import statements
from rollyard_pipeline.sabotage import ANSWER_UNUSABLE, VERIFY_TIMEOUT

_MEMORY: Final = 2 << 30  # The size of a child's address space in bytes.


class KeyUnreadable(ChildFailed):
    """The expected answer is no text and no formula that can be read, so that no answer can be judged."""

    reason = "KeyUnreadable"


@dataclass(frozen=True)
class Judgement:
    """What a comparison gave.

    Attributes:
        equal: Whether the answer is equal to an accepted one.
        why: How each was read, for people.
        answered: Whether there is an answer.
    """

    equal: bool
    why: str = ""
    answered: bool = True


class Verifiers:
    """A bounded set of children, which are started when first needed and kept.

    Args:
        count: The number of children, and therefore of simultaneous comparisons.
    """

    def __init__(self, count: int = 2) -> None:
        self._children = ChildProcesses(
            __name__, what="the verifier", failed="VerifierFailed", timeout="VerifierTimeout", count=count
        )

    async def compare(self, golds: Sequence[str], answer: str, seconds: float) -> Judgement:
        """Return whether the text `answer` ends with what is mathematically the same as one of `golds`.

        Waiting for a free child does not count against `seconds`, which all comparisons share.

        Raises:
            KeyUnreadable: One of `golds` can be read in no way, and no other one is equal.
            ChildTimeout: There is no result within `seconds`.
            ChildFailed: The child could not be started or died.
        """
        answered = await self._children.ask({"golds": list(golds), "answer": answer}, seconds)
        if "unreadable" in answered:
            raise KeyUnreadable(f"the expected answer cannot be read: {answered['unreadable']}")
        has_answer = bool(answered.get("answered"))
        return Judgement(bool(answered.get("equal")), str(answered.get("why", "")), has_answer)

    async def close(self) -> None:
        """End every child."""
        await self._children.close()


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

    logging.disable(logging.WARNING)  # math-verify warns of the missing timeouts, which the parent enforces.
    begin_child(_MEMORY)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_reply(json.loads(line))), flush=True)


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
        self._verifiers = Verifiers()

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
        answered = {"answered": 1.0}  # What takes too long to compare is an answer.
        try:
            verdict = await self._compare(golds, text, ctx.timeout)
        except ChildTimeout:
            expected = "\nexpected: ".join(golds)
            ctx.show(f"The comparison was ended after {_VERDICT_SECONDS:g} s.\nexpected: {expected}")
            return Evaluation(0.0, {**answered, "verify_timeout": 1.0}, VERIFY_TIMEOUT)
        except KeyUnreadable as error:
            raise ChildFailed(f"task '{ctx.task.id}': answer: {error}", "VerifierFailed") from error
        except ChildFailed:
            # This is the proof: if the verifier can compare each gold answer with itself, the other answer
            # ended it.
            for gold in golds:
                await self._compare([gold], gold, ctx.timeout)
            return Evaluation(0.0, answered, ANSWER_UNUSABLE)
        ctx.show(verdict.why)
        return Evaluation(float(verdict.equal), {"answered": float(verdict.answered)})

    async def _compare(self, golds: Sequence[str], answer: str, timeout: float) -> Judgement:
        """Return whether the answer is one of `golds`. If the first process dies, a fresh one tries again.

        Raises:
            KeyUnreadable: An expected answer can be read in no way, and no other one is equal.
            ChildTimeout: There is no result in time.
            ChildFailed: Two processes died.
        """
        seconds = min(_VERDICT_SECONDS, timeout)
        try:
            return await self._verifiers.compare(golds, answer, seconds)
        except (ChildTimeout, KeyUnreadable):
            raise
        except ChildFailed:
            return await self._verifiers.compare(golds, answer, seconds)

    async def close(self) -> None:
        """End the processes that compare answers."""
        await self._verifiers.close()


if __name__ == "__main__":
    main()
