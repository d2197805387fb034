"""The bench's handler of groups that may have no signal, whose Run takes the seconds of its sample."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext


class DapoHandler(Handler):
    """Play nothing: Run waits for the latency of the sample, and Eval returns the sample's reward."""

    needs_sandbox: ClassVar[bool] = False

    async def run(self, ctx: StageContext) -> None:
        """Wait for the sample's latency."""
        await asyncio.sleep(ctx.task.metadata["latencies"][ctx.sample_index])

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return the sample's reward."""
        return Evaluation(float(ctx.task.metadata["rewards"][ctx.sample_index]))
