"""The handler `mixed`: tasks of several kinds in one job, each scored by what it brings."""

from __future__ import annotations

from rollyard_crds.task import Task

from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.code.handler import CodeHandler
from rollyard_pipeline.handlers.math import MathHandler
from rollyard_pipeline.handlers.shell import ShellHandler
from rollyard_pipeline.handlers.stem import StemHandler


class MixedHandler(Handler):
    """Scores each task by what it brings.

    Tasks with `tests` are scored as by `code`, with `test_script` as by `shell`, with `choices` or `numeric`
    as by `stem`, and all others as by `math`.
    """

    reward_range = (0.0, 1.0)
    components = (
        *CodeHandler.components,
        *ShellHandler.components,
        *MathHandler.components,
    )

    def __init__(self) -> None:
        self._code, self._shell = CodeHandler(), ShellHandler()
        self._stem, self._math = StemHandler(), MathHandler()

    def _of(self, task: Task) -> Handler:
        if task.tests is not None:
            return self._code
        if task.test_script is not None:
            return self._shell
        return self._stem if task.choices or task.numeric is not None else self._math

    def check(self, task: Task) -> list[str]:
        """Return the problems that the handler of this kind of task finds."""
        return self._of(task).check(task)

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return the score that the handler of this kind of task gives."""
        return await self._of(ctx.task).eval(ctx)

    async def close(self) -> None:
        """End the processes that compare mathematical answers."""
        await self._math.close()
