"""The coupled loop: each Run slot takes one rollout and holds it through Init, Run and Eval.

This is the customary shape of a rollout loop, with the same latencies and the same number of Run slots as the
pipeline beside it. It has no sandbox, no queue, no store and no tokens: all its time is the latencies.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

import httpx

from rollyard_bench.capacity import Workload


@dataclass(frozen=True, slots=True)
class CoupledRun:
    """One run: `seconds` from the first start to the last end, and `busy`, the share of slot time spent in
    Run.
    """

    seconds: float
    busy: float


async def run(work: Workload, slots: int, url: str, model: str) -> CoupledRun:
    """Pass all rollouts through `slots` slots against the latency model at `url`.

    Raises:
        httpx.HTTPError: The model server did not answer a call.
    """
    waiting = deque(range(work.rollouts))
    in_run = 0.0

    async def slot(client: httpx.AsyncClient) -> None:
        nonlocal in_run
        while waiting:
            number = waiting.popleft()
            await asyncio.sleep(work.init)
            begin = time.perf_counter()
            for _ in range(work.turns):
                body = {"model": model, "prompt": [1], "max_tokens": 16}
                (await client.post("/v1/completions", json=body)).raise_for_status()
            in_run += time.perf_counter() - begin
            await asyncio.sleep(work.eval_of(number))

    limits = httpx.Limits(max_connections=slots, max_keepalive_connections=slots)
    started = time.perf_counter()
    async with (
        httpx.AsyncClient(base_url=url, limits=limits, timeout=60.0) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(slots):
            group.create_task(slot(client))
    seconds = time.perf_counter() - started
    return CoupledRun(seconds, in_run / (slots * seconds))
