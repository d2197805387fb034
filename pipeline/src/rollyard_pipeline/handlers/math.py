"""The handler `math`: the final answer must equal the gold answer, as math-verify judges."""

from __future__ import annotations

from typing import Final

from rollyard_crds.task import Task

from rollyard_pipeline.errors import TaskInvalid, VerifierFailed
from rollyard_pipeline.handlers.answers import final_answer
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.verifier import Verifiers, VerifierTimeout

_VERDICT_SECONDS: Final = 10.0


class MathHandler(Handler):
    r"""Reward 1.0 for the right answer, else 0.0.

    The answer is what `submit` handed in or the last assistant message says: the last
    `\boxed{…}`, what follows `####` or "answer is", else the last line. `task.answer` may
    be a whole solution that ends with `#### n`, as GSM8K has it. An answer that cannot be
    compared in time scores 0, with the component `verify_timeout`.
    """

    needs_sandbox = False

    def __init__(self) -> None:
        self._verifiers = Verifiers()

    def check(self, task: Task) -> list[str]:
        return [] if task.answer and final_answer(task.answer) else ["answer: required by the handler 'math'"]

    async def eval(self, ctx: StageContext) -> Evaluation:
        gold = final_answer(ctx.task.answer or "")
        if not gold:
            raise TaskInvalid(f"task '{ctx.task.id}': answer: required by the handler 'math'")
        answer = final_answer(ctx.final_text)
        if not answer:
            return Evaluation(0.0, {"answered": 0.0})
        try:
            equal = await self._verifiers.equal(gold, answer, min(_VERDICT_SECONDS, ctx.timeout))
        except VerifierTimeout:
            return Evaluation(0.0, {"answered": 1.0, "verify_timeout": 1.0})
        except VerifierFailed:
            # Once more, in a fresh process: what kills two of them is the answer (it took all their memory).
            try:
                equal = await self._verifiers.equal(gold, answer, min(_VERDICT_SECONDS, ctx.timeout))
            except VerifierTimeout:
                return Evaluation(0.0, {"answered": 1.0, "verify_timeout": 1.0})
        return Evaluation(1.0 if equal else 0.0, {"answered": 1.0})

    async def close(self) -> None:
        await self._verifiers.close()
