"""The event hub's bounds: a slow subscriber is dropped, the past is finite, and others are not held up."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import pytest
from rollyard_api.core import cursors
from rollyard_api.core.problems import ApiError
from rollyard_api.jobs import events
from rollyard_api.jobs.events import Event, EventHub


@dataclass(frozen=True)
class Row:
    """The part of a job's row that the hub reads."""

    id: int
    uid: str
    name: str


JOB = Row(1, str(uuid.uuid4()), "job")


def place(number: int, process: str) -> str:
    """Return the id that a process gave to an event of the job."""
    return cursors.text("events", JOB.uid, f"{process}-{number}")


async def test_a_slow_subscriber_is_dropped_and_may_resume() -> None:
    hub = EventHub(4)
    hub.publish(1, "transition", {"n": 0})
    slow = hub.subscribe(1, 0, 5.0)
    first = await anext(slow)
    assert isinstance(first, Event)
    assert first.number == 1
    for n in range(1, 8):
        hub.publish(1, "transition", {"n": n})
    *rest, last = [event async for event in slow if event is not None]
    assert (last.name, last.data) == ("dropped", b'{"reason":"SlowConsumer"}')
    got = [event.number for event in rest]
    assert got == list(range(2, 2 + len(got))), "no event is skipped without a word"
    assert len(got) <= 4
    again = hub.subscribe(1, hub.resume_after(JOB, place(5, hub.process)), 5.0)
    resumed = [await anext(again) for _ in range(3)]
    assert [event.number for event in resumed if event is not None] == [6, 7, 8]
    await again.aclose()


async def test_idle_and_ids_of_another_process() -> None:
    hub = EventHub(4)
    hub.publish(1, "transition", {})
    other = hub.subscribe(1, hub.resume_after(JOB, place(1, "0123abcd")), 0.01)
    missed = await anext(other)
    assert missed is not None
    assert missed.name == "missed"
    assert await anext(other) is None
    await other.aclose()
    now = hub.subscribe(1, hub.resume_after(JOB, ""), 0.01)
    assert await anext(now) is None
    await now.aclose()
    text = cursors.text("events", JOB.uid, f"{hub.process}-3")
    assert (
        hub.format(JOB.uid, Event(3, "counts", b"{}"))
        == f"id: {text}\nevent: counts\ndata: {{}}\n\n".encode()
    )
    assert hub.format(JOB.uid, missed) == b'event: missed\ndata: {"reason":"NotKept"}\n\n', "it has no id"


MANY_EVENTS = pytest.mark.attack(
    "one tenant's events push those of others out of memory, or are skipped silently",
    boundary="tenants",
    surface="event streams",
    stopped_by="the longest past makes room, and `missed` tells of it",
)


@MANY_EVENTS
async def test_events_that_are_not_kept_are_missed_and_not_skipped() -> None:
    hub = EventHub(4)
    for n in range(10):
        hub.publish(1, "transition", {"n": n})
    late = hub.subscribe(1, hub.resume_after(JOB, place(2, hub.process)), 5.0)
    found = [await anext(late) for _ in range(5)]
    await late.aclose()
    assert [(event.name, event.number) for event in found if event is not None] == [
        ("missed", 0), ("transition", 7), ("transition", 8), ("transition", 9), ("transition", 10)
    ]  # fmt: skip


async def test_ids_of_another_job_and_of_events_to_come_are_refused() -> None:
    hub = EventHub(4)
    hub.publish(1, "transition", {})
    mine = cursors.text("events", JOB.uid, f"{hub.process}-1")
    assert hub.resume_after(JOB, mine) == 1
    for given, reason in (
        (cursors.text("events", str(uuid.uuid4()), f"{hub.process}-1"), "CursorGone"),
        (cursors.text("events", JOB.uid, f"{hub.process}-2"), "CursorBeyondEnd"),
        (cursors.text("groups", JOB.uid, f"{hub.process}-1"), "CursorInvalid"),
        (f"{hub.process}-1", "CursorInvalid"),
        ("latest", "CursorInvalid"),
    ):
        with pytest.raises(ApiError) as refused:
            hub.resume_after(JOB, given)
        assert refused.value.reason == reason, given


async def test_a_removed_job_leaves_no_events_to_a_later_one_with_its_number() -> None:
    hub = EventHub(4)
    for n in range(3):
        hub.publish(1, "transition", {"n": n})
    hub.forget(1)
    hub.publish(1, "transition", {"n": "later"})
    late = hub.subscribe(1, hub.resume_after(JOB, place(2, hub.process)), 5.0)
    found = [await anext(late) for _ in range(2)]
    await late.aclose()
    assert [event.name for event in found if event is not None] == ["missed", "transition"]
    assert found[1] is not None
    assert found[1].number == 4, "numbers are not given twice"


@MANY_EVENTS
async def test_the_longest_past_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_PAST_BYTES", 20 * (events.EVENT_BYTES + 1000))
    hub = EventHub(4096)
    hub.publish(1, "transition", {"text": "small"})
    for _ in range(100):
        hub.publish(2, "transition", {"text": "x" * 980})
    small = hub.subscribe(1, 0, 5.0)
    kept = await anext(small)
    await small.aclose()
    assert kept is not None
    assert kept.name == "transition", "a tenant with many events pushed out those of another"
    large = hub.subscribe(2, 0, 5.0)
    first = await anext(large)
    await large.aclose()
    assert first is not None
    assert first.name == "missed"
