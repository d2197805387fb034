"""The handler `mixed`: tasks of several kinds in one job, each scored by what it brings."""

from __future__ import annotations

from rollyard_crds.task import Task

from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.code.handler import CodeHandler
from rollyard_pipeline.handlers.harbor.handler import HarborHandler
from rollyard_pipeline.handlers.math import MathHandler
from rollyard_pipeline.handlers.shell import ShellHandler
from rollyard_pipeline.handlers.stem import StemHandler
from rollyard_pipeline.handlers.swe.handler import SweHandler


class MixedHandler(Handler):
    """Leaves each task to the handler of its kind.

    A task with `harbor` is one of `harbor`, with `swe` of `swe`, with `tests` of `code`, with `test_script`
    of `shell`, with `choices` or `numeric` of `stem`, and every other task is one of `math`. Each has the
    sandboxes and the range of rewards of its own handler.
    """

    components = (
        *CodeHandler.components,
        *ShellHandler.components,
        *MathHandler.components,
    )

    judges_answers = True

    def __init__(self) -> None:
        self._harbor, self._swe = HarborHandler(), SweHandler()
        self._code, self._shell = CodeHandler(), ShellHandler()
        self._stem, self._math = StemHandler(), MathHandler()

    def for_task(self, task: Task) -> Handler:
        """Return the handler of this kind of task."""
        if task.harbor is not None:
            return self._harbor
        if task.swe is not None:
            return self._swe
        if task.tests is not None:
            return self._code
        if task.test_script is not None:
            return self._shell
        return self._stem if task.choices or task.numeric is not None else self._math

    def check(self, task: Task) -> list[str]:
        """Return the problems that the handler of this kind of task finds."""
        return self.for_task(task).check(task)

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return the score that the handler of this kind of task gives."""
        return await self.for_task(ctx.task).eval(ctx)

    async def close(self) -> None:
        """End the processes that compare mathematical answers."""
        await self._math.close()
