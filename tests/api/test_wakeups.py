"""Which waits are woken: those of the stage that changed, those of all stages, and no others."""

from __future__ import annotations

import asyncio

import pytest
from rollyard_api.core.wakeups import QUEUE, Bus, queue_topic, ready_topic
from rollyard_testing.pace import patience

TOPICS = (QUEUE, queue_topic("init"), queue_topic("run"), queue_topic("eval"), ready_topic("default", "w"))


@pytest.mark.parametrize(
    ("woken", "looking"),
    [
        (QUEUE, {QUEUE, queue_topic("init"), queue_topic("run"), queue_topic("eval")}),
        (queue_topic("run"), {QUEUE, queue_topic("run")}),
        (ready_topic("default", "w"), {ready_topic("default", "w")}),
    ],
)
async def test_a_wake_reaches_the_waits_of_its_stage_and_of_all_stages(woken: str, looking: set[str]) -> None:
    bus = Bus(None)
    looks = dict.fromkeys(TOPICS, 0)

    async def wait(topic: str) -> int:
        async def look() -> int:
            looks[topic] += 1
            return looks[topic]

        async def gone() -> bool:
            return False

        return await bus.until(topic, look, lambda count: count > 1, 3600.0, gone)

    waits = {topic: asyncio.create_task(wait(topic)) for topic in TOPICS}
    await asyncio.sleep(0)
    assert set(looks.values()) == {1}
    bus.wake([woken])
    async with asyncio.timeout(patience(30)):
        await asyncio.gather(*(waits[topic] for topic in looking))
    assert {topic for topic, wait in waits.items() if wait.done()} == looking
    bus.close()
    async with asyncio.timeout(patience(30)):
        await asyncio.gather(*waits.values())


def test_changes_are_counted_for_each_stage() -> None:
    bus = Bus(None)
    bus.wake([queue_topic("run")])
    assert [bus.queue_changes([stage]) for stage in ("init", "run", "eval")] == [0, 1, 0]
    bus.wake([QUEUE, queue_topic("run")])
    assert [bus.queue_changes([stage]) for stage in ("init", "run", "eval")] == [1, 2, 1]
    assert bus.queue_changes(["init", "run"]) == 3
