"""The event hub's bounds: a slow subscriber is dropped, the past is finite, others are not held up."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from rollyard_api.events import Event, EventHub, SlowConsumer


async def test_a_slow_subscriber_is_dropped_and_may_resume() -> None:
    hub = EventHub(4)
    hub.publish(1, "transition", {"n": 0})
    slow = hub.subscribe(1, f"{hub.process}-0", 5.0)
    first = await anext(slow)
    assert isinstance(first, Event)
    assert first.number == 1
    for n in range(1, 8):
        hub.publish(1, "transition", {"n": n})
    got: list[int] = []
    with pytest.raises(SlowConsumer):
        await _drain(slow, got)
    assert len(got) <= 4
    again = hub.subscribe(1, f"{hub.process}-5", 5.0)
    resumed = [await anext(again) for _ in range(3)]
    assert [event.number for event in resumed if event is not None] == [6, 7, 8]
    await again.aclose()


async def _drain(events: AsyncIterator[Event | None], into: list[int]) -> None:
    async for event in events:
        assert event is not None
        into.append(event.number)


async def test_idle_and_ids_of_another_process() -> None:
    hub = EventHub(4)
    hub.publish(1, "transition", {})
    other = hub.subscribe(1, "another-1", 0.01)
    assert await anext(other) is None
    await other.aclose()
    assert (
        hub.format(Event(3, "counts", b"{}"))
        == f"id: {hub.process}-3\nevent: counts\ndata: {{}}\n\n".encode()
    )
