"""A caller who needs a sandbox while the pool starts some gets one of those, without a provider."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from rollyard_pipeline.sandboxes.errors import SandboxStartFailed
from rollyard_pipeline.sandboxes.interface import SandboxKey, SandboxRequest
from rollyard_pipeline.sandboxes.provider import WarmPool, WarmSandbox
from rollyard_sandbox.errors import ConnectionLost

KEY = SandboxRequest().key


class Starts:
    """Starts that end when a test lets them."""

    def __init__(self) -> None:
        self.begun: list[asyncio.Future[WarmSandbox]] = []
        self.keys: list[SandboxKey] = []
        self.removed: list[WarmSandbox] = []
        self.pool = WarmPool(self.start, self.remove)

    async def start(self, key: SandboxKey) -> WarmSandbox:
        future: asyncio.Future[WarmSandbox] = asyncio.get_running_loop().create_future()
        self.begun.append(future)
        self.keys.append(key)
        return await future

    async def remove(self, warm: WarmSandbox) -> None:
        self.removed.append(warm)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


class Ready:
    """A warm sandbox that answers, or does not, and lives, or does not."""

    def __init__(self) -> None:
        self.record = self.client = self
        self.id = "s"
        self.lives = self.answers = True
        self.renewed: list[float] = []

    def alive(self) -> bool:
        return self.lives

    async def renew(self, seconds: float) -> None:
        if not self.answers:
            raise ConnectionLost("gone")
        self.renewed.append(seconds)


def sandbox() -> WarmSandbox:
    return cast(WarmSandbox, Ready())


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


OTHER = SandboxRequest(processes=7).key


async def filled(starts: Starts, **counts: int) -> dict[SandboxKey, list[Ready]]:
    """Fill the pool with so many of each key."""
    made: dict[SandboxKey, list[Ready]] = {KEY: [], OTHER: []}
    for key, name in ((KEY, "key"), (OTHER, "other")):
        begun = len(starts.begun)
        starts.pool.want(key, counts[name])
        await starts.settle()
        for future in starts.begun[begun:]:
            made[key].append(Ready())
            future.set_result(cast(WarmSandbox, made[key][-1]))
        await starts.settle()
    return made


async def test_each_key_has_its_own_and_the_oldest_that_lives_goes_first() -> None:
    starts = Starts()
    made = await filled(starts, key=3, other=1)
    assert (starts.keys, starts.pool.ready(KEY), starts.pool.ready(OTHER)) == ([KEY] * 3 + [OTHER], 3, 1)
    made[KEY][0].lives = False
    assert starts.pool.take(KEY) is made[KEY][1]
    assert starts.pool.take(OTHER) is made[OTHER][0]
    assert starts.pool.take(OTHER) is None
    assert starts.pool.take(SandboxRequest(processes=8).key) is None
    # Nothing is started before the one that was taken is in use.
    await starts.settle()
    assert len(starts.begun) == 4
    starts.pool.refill(KEY)
    await starts.settle()
    assert starts.keys[4:] == [KEY, KEY], "for the one that was taken and the one that had died"
    await starts.pool.aclose()
    assert starts.removed == [made[KEY][2]]


async def test_fewer_that_are_wanted_are_removed_the_oldest_first() -> None:
    starts = Starts()
    made = await filled(starts, key=3, other=2)
    starts.pool.want(KEY, 1)
    await starts.settle()
    assert (starts.removed, starts.pool.ready(KEY), starts.pool.ready(OTHER)) == (made[KEY][:2], 1, 2)
    await starts.pool.aclose()
    assert starts.removed == [*made[KEY], *made[OTHER]]
    assert (starts.pool.ready(KEY), starts.pool.ready(OTHER), len(starts.begun)) == (0, 0, 5)


async def test_every_ready_one_is_renewed_and_one_that_does_not_answer_is_replaced() -> None:
    starts = Starts()
    made = await filled(starts, key=3, other=1)
    made[KEY][1].answers = False
    await starts.pool.renew(45.0)
    assert [one.renewed for one in made[KEY]] == [[45.0], [], [45.0]]
    assert made[OTHER][0].renewed == [45.0]
    assert (starts.removed, starts.pool.ready(KEY)) == ([made[KEY][1]], 2)
    await starts.settle()
    assert starts.keys[4:] == [KEY]
    await starts.pool.aclose()


async def test_who_waits_longest_is_served_first_and_one_failed_start_disappoints_one() -> None:
    starts = Starts()
    starts.pool.want(KEY, 3)
    await starts.settle()
    waiting = [asyncio.create_task(starts.pool.next(KEY)) for _ in range(3)]
    await starts.settle()
    made = [sandbox(), sandbox()]
    starts.begun[1].set_result(made[0])
    await starts.settle()
    assert [task.done() for task in waiting] == [True, False, False]
    starts.begun[0].set_exception(SandboxStartFailed("no room"))
    await starts.settle()
    assert waiting[0].result() is made[0]
    assert starts.removed == []
    await starts.pool.aclose()
    assert {task.result() for task in waiting[1:]} == {None}
