"""The bench's handler: Init and Eval take the seconds that the task's metadata says."""

from __future__ import annotations

import asyncio

from rollyard_crds.task import Task
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext

FIELDS = ("init", "eval", "eval_slow", "slow_every")


class LatencyHandler(Handler):
    """Real sandbox, real agent; only the work of Init and Eval is a wait of fixed length."""

    def check(self, task: Task) -> list[str]:
        """All four numbers must be there."""
        return [
            f"metadata.{name}: must be a positive number"
            for name in FIELDS
            if not isinstance(task.metadata.get(name), (int, float)) or task.metadata[name] <= 0
        ]

    async def init(self, ctx: StageContext) -> None:
        """Wait as long as the preparation is said to take."""
        await asyncio.sleep(ctx.task.metadata["init"])

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Wait as long as this sample's evaluation is said to take."""
        slow = ctx.sample_index % ctx.task.metadata["slow_every"] == 0
        await asyncio.sleep(ctx.task.metadata["eval_slow" if slow else "eval"])
        return Evaluation(1.0 if ctx.answer == "done" else 0.0)
