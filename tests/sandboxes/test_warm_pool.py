"""A caller who needs a sandbox while the pool starts some gets one of those, without a provider."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from rollyard_pipeline.sandboxes.errors import SandboxStartFailed
from rollyard_pipeline.sandboxes.interface import SandboxKey, SandboxRequest
from rollyard_pipeline.sandboxes.warm_pool import WarmPool, WarmSandbox

KEY = SandboxRequest().key


class Starts:
    """Starts that end when a test lets them."""

    def __init__(self) -> None:
        self.begun: list[asyncio.Future[WarmSandbox]] = []
        self.pool = WarmPool(self.start, self.remove)

    async def start(self, key: SandboxKey) -> WarmSandbox:
        future: asyncio.Future[WarmSandbox] = asyncio.get_running_loop().create_future()
        self.begun.append(future)
        return await future

    async def remove(self, warm: WarmSandbox) -> None:
        """Leave nothing of it."""

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


def sandbox() -> WarmSandbox:
    return cast(WarmSandbox, object())


async def test_one_that_is_being_started_goes_to_who_waits_and_the_pool_starts_another() -> None:
    starts = Starts()
    starts.pool.want(KEY, 1)
    await starts.settle()
    waiting = asyncio.create_task(starts.pool.next(KEY))
    await starts.settle()
    # All that are being started have a waiter: a second one would wait in vain.
    assert await starts.pool.next(KEY) is None
    first = sandbox()
    starts.begun[0].set_result(first)
    assert await waiting is first
    await starts.settle()
    assert (starts.pool.ready(KEY), len(starts.begun)) == (0, 2)
    starts.begun[1].set_result(sandbox())
    await starts.settle()
    assert starts.pool.ready(KEY) == 1
    await starts.pool.aclose()


async def test_who_waits_for_a_start_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    starts = Starts()
    starts.pool.want(KEY, 1)
    await starts.settle()
    waiting = asyncio.create_task(starts.pool.next(KEY))
    await starts.settle()
    starts.begun[0].set_exception(SandboxStartFailed("no room"))
    assert await waiting is None
    await starts.pool.aclose()
    assert "no room" in caplog.text


async def test_what_came_for_one_who_has_gone_is_kept() -> None:
    starts = Starts()
    starts.pool.want(KEY, 1)
    await starts.settle()
    waiting = asyncio.create_task(starts.pool.next(KEY))
    await starts.settle()
    starts.begun[0].set_result(sandbox())
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await starts.settle()
    assert starts.pool.ready(KEY) == 1
    await starts.pool.aclose()


async def test_nothing_is_being_started() -> None:
    assert await Starts().pool.next(KEY) is None
