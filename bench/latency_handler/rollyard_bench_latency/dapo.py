"""The bench's handler of groups that may have no signal, whose Run takes the seconds of its sample."""

from __future__ import annotations

import asyncio
import os
import time
from typing import ClassVar

from rollyard_crds.task import Task
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext

LOG = "ROLLYARD_BENCH_RUNS"
"""The environment variable that names the file to which the times of all Runs are appended."""


def note(begin: float, end: float) -> None:
    """Append the times of one Run, in seconds since 1970, to the file."""
    with open(os.environ[LOG], "a", encoding="ascii") as file:
        file.write(f"{begin} {end}\n")


class DapoHandler(Handler):
    """Play nothing: Run waits for the latency of the sample, and Eval returns the sample's reward."""

    needs_sandbox: ClassVar[bool] = False

    def check(self, task: Task) -> list[str]:
        """Return what is wrong with a task that lacks the latencies or the rewards of its samples."""
        return [
            f"metadata.{name}: must be a list of numbers"
            for name in ("latencies", "rewards")
            if not isinstance(task.metadata.get(name), list)
        ]

    async def run(self, ctx: StageContext) -> None:
        """Wait for the sample's latency, and note the times between which its slot was taken."""
        begin = time.time()
        try:
            await asyncio.sleep(ctx.task.metadata["latencies"][ctx.sample_index])
        finally:
            note(begin, time.time())

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return the sample's reward."""
        return Evaluation(float(ctx.task.metadata["rewards"][ctx.sample_index]))
