"""The handler `word_count`."""

import re

from rollyard import Task
from rollyard_pipeline.handlers import Evaluation, Handler, StageContext


class WordCountHandler(Handler):
    """A handler whose reward is 1 / (1 + distance) from the task's answer to the policy's last number."""

    needs_sandbox = False  # Eval looks at the answer only; the job's tools have a sandbox all the same.
    reward_range = (0.0, 1.0)

    def check(self, task: Task) -> list[str]:
        number = re.fullmatch(r"\d{1,9}", task.answer or "")
        return [] if number else ["answer: the handler 'word_count' requires a number"]

    async def eval(self, ctx: StageContext) -> Evaluation:
        numbers = re.findall(r"\d{1,9}", ctx.final_text)
        if not numbers:
            return Evaluation(0.0, {"answered": 0.0})
        distance = abs(int(numbers[-1]) - int(ctx.task.answer or ""))
        return Evaluation(1 / (1 + distance), {"answered": 1.0})
