"""The bench's handler, whose Init and Eval take the seconds that the task's metadata gives."""

from __future__ import annotations

import asyncio

from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext


class LatencyHandler(Handler):
    """Use a real sandbox and a real agent; only the work of Init and Eval is a wait of fixed length."""

    async def init(self, ctx: StageContext) -> None:
        """Wait for the time that the preparation takes."""
        await asyncio.sleep(ctx.task.metadata["init"])

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Wait for the time that this sample's evaluation takes."""
        slow = ctx.sample_index % ctx.task.metadata["slow_every"] == 0
        await asyncio.sleep(ctx.task.metadata["eval_slow" if slow else "eval"])
        return Evaluation(1.0 if ctx.answer == "done" else 0.0)
