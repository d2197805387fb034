"""The handler `math`: the final answer must equal the gold answer, as math-verify judges."""

from __future__ import annotations

from typing import Final

from rollyard_crds.fields.signals import SHIPPED
from rollyard_crds.task import Task

from rollyard_pipeline.errors import TaskInvalid, VerifierFailed
from rollyard_pipeline.handlers.answers import comparison, final_answer
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.verifier import Verifiers, VerifierTimeout
from rollyard_pipeline.sabotage import ANSWER_UNUSABLE, VERIFY_TIMEOUT

_VERDICT_SECONDS: Final = 10.0


class MathHandler(Handler):
    r"""Returns reward 1.0 for the right answer, else 0.0.

    The answer comes from `submit` or from the last assistant message: the last `\boxed{…}`, what follows
    `####` or "answer is", else the last line. `task.answer` may be a whole solution that ends with `#### n`,
    as in GSM8K. An answer that cannot be compared in time scores 0, with the reason VerifyTimeout and the
    component `verify_timeout`. An answer that kills the process which compares it also scores 0, with the
    reason AnswerUnusable.
    """

    needs_sandbox = False
    reward_range = SHIPPED["math"].reward
    components = SHIPPED["math"].components

    def __init__(self) -> None:
        self._verifiers = Verifiers()

    def check(self, task: Task) -> list[str]:
        """Return a problem if the task has no answer that can be compared."""
        return [] if task.answer and final_answer(task.answer) else ["answer: required by the handler 'math'"]

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return a score of 1.0 if the answer equals the task's, else 0.0."""
        gold = final_answer(ctx.task.answer or "")
        if not gold:
            raise TaskInvalid(f"task '{ctx.task.id}': answer: required by the handler 'math'")
        answer = final_answer(ctx.final_text)
        if not answer:
            ctx.show(f"There is no answer.\nexpected: {gold}")
            return Evaluation(0.0, {"answered": 0.0})
        ctx.show(comparison(answer, gold))
        try:
            equal = await self._compare(gold, answer, ctx.timeout)
        except VerifierTimeout:
            return Evaluation(0.0, {"answered": 1.0, "verify_timeout": 1.0}, VERIFY_TIMEOUT)
        except VerifierFailed:
            # This is the proof: if the verifier can compare the gold answer with itself, the other answer
            # ended it.
            await self._compare(gold, gold, ctx.timeout)
            return Evaluation(0.0, {"answered": 1.0}, ANSWER_UNUSABLE)
        return Evaluation(1.0 if equal else 0.0, {"answered": 1.0})

    async def _compare(self, gold: str, answer: str, timeout: float) -> bool:
        """Return whether the answers are equal, with a second try in a fresh process if the first one dies.

        Raises:
            VerifierTimeout: There is no result in time.
            VerifierFailed: Two processes died.
        """
        seconds = min(_VERDICT_SECONDS, timeout)
        try:
            return await self._verifiers.equal(gold, answer, seconds)
        except VerifierTimeout:
            raise
        except VerifierFailed:
            return await self._verifiers.equal(gold, answer, seconds)

    async def close(self) -> None:
        """End the processes that compare answers."""
        await self._verifiers.close()
