"""A bulkhead's places, queue and time-outs, and how it finds out that the other side is back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rollyard_api.core import bulkhead
from rollyard_api.core.bulkhead import SPARE, Bulkhead
from rollyard_api.core.limits import Limit
from rollyard_api.core.problems import LimitReached, TimedOut, Unavailable
from rollyard_api.core.wakeups import EmptyAnswers
from rollyard_process.backoff import Backoff
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually


@pytest.fixture
def freed() -> Any:
    event = threading.Event()
    yield event
    event.set()


def hang_until(event: threading.Event) -> Callable[[], None]:
    def call() -> None:
        event.wait(patience(60))

    return call


async def test_what_a_call_gives_and_raises(freed: threading.Event) -> None:
    walls = Bulkhead("store", threads=1, waiting=4, seconds=30.0)

    def broken() -> None:
        raise ValueError("broken")

    assert await walls.run(lambda: 7) == 7
    with pytest.raises(ValueError, match="broken"):
        await walls.run(broken)
    assert await asyncio.gather(*(walls.run(lambda n=n: n) for n in range(4))) == [0, 1, 2, 3]
    assert walls.threads == 1
    walls.close()
    with pytest.raises(Unavailable):
        await walls.run(lambda: 7)


async def test_more_may_not_wait_than_there_is_room_for(freed: threading.Event) -> None:
    walls = Bulkhead("store", threads=1, waiting=2, seconds=30.0)
    held = [asyncio.create_task(walls.run(hang_until(freed))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="too many"):
        await walls.run(lambda: 7)
    freed.set()
    await asyncio.gather(*held)
    walls.close()


async def test_keys_take_turns(freed: threading.Event) -> None:
    walls = Bulkhead("store", threads=1, waiting=100, seconds=30.0)
    order: list[str] = []
    first = asyncio.create_task(walls.run(hang_until(freed), "greedy"))
    await asyncio.sleep(0)
    greedy = [asyncio.create_task(walls.run(lambda: order.append("greedy"), "greedy")) for _ in range(20)]
    await asyncio.sleep(0)
    modest = asyncio.create_task(walls.run(lambda: order.append("modest"), "modest"))
    await asyncio.sleep(0)
    freed.set()
    await asyncio.gather(first, modest, *greedy)
    assert order.index("modest") <= 1
    walls.close()


async def test_one_call_that_hangs_for_ever_takes_a_place_only_until_another_is_answered(
    freed: threading.Event,
) -> None:
    walls = Bulkhead("store", threads=2, waiting=4, seconds=0.1)
    with pytest.raises(TimedOut):
        await walls.run(hang_until(freed))
    # Its timer may fire after its caller was answered.
    await eventually(lambda: walls.hanging)
    walls.seconds = 60.0
    assert await walls.run(lambda: 7) == 7
    barrier = threading.Barrier(2, timeout=patience(60))
    await asyncio.gather(walls.run(barrier.wait), walls.run(barrier.wait))
    assert walls.threads == 3
    walls.close()


async def test_probes_are_few_and_threads_are_bounded(
    freed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulkhead, "PROBES", Backoff(first=0.01, longest=0.01))
    walls = Bulkhead("store", threads=1, waiting=4, seconds=0.02)
    answers: list[str] = []
    while len(walls.hanging) < SPARE:
        try:
            await walls.run(hang_until(freed))
        except (TimedOut, Unavailable) as error:
            answers.append(error.reason)
        await asyncio.sleep(0.005)
    assert walls.threads == SPARE
    for _ in range(5):
        await asyncio.sleep(0.011)
        with pytest.raises(Unavailable, match="does not answer"):
            await walls.run(lambda: 7)
    assert walls.threads == SPARE
    freed.set()
    await eventually(lambda: not walls.hanging)
    walls.seconds = 60.0
    assert await walls.run(lambda: 7) == 7
    walls.close()


async def test_a_limit_counts_by_key_and_in_all() -> None:
    limit = Limit("polls", each=2, total=3)
    with limit.held("a"), limit.held("a"):
        with pytest.raises(LimitReached, match="namespace 'a'"), limit.held("a"):
            pass
        with limit.held("b"), pytest.raises(LimitReached, match="3 polls"), limit.held("c"):
            pass
        assert limit.open("b") == 0
    assert limit.open("a") == 0
    for _ in range(4):
        with pytest.raises(ValueError, match="broken"), limit.held("a"):
            raise ValueError("broken")
    assert limit.open("a") == 0, "what fails gives its place back"
    with limit.held("c"):
        assert limit.open("c") == 1


async def test_turns_of_one_key_do_not_wait_in_the_common_line() -> None:
    turns = Limit("looks", each=1, total=2, seconds=None)
    entered = asyncio.Event()
    leave = asyncio.Event()

    async def hold(key: str) -> None:
        async with turns.turn(key):
            entered.set()
            await leave.wait()

    tasks = [asyncio.create_task(hold("greedy")) for _ in range(10)]
    await entered.wait()
    async with asyncio.timeout(patience(30)), turns.turn("modest"):
        pass
    leave.set()
    await asyncio.gather(*tasks)


async def test_who_waits_in_vain_for_a_turn_keeps_no_place() -> None:
    short = Limit("looks", each=2, total=2, seconds=0.01)
    async with short.turn("b"):
        async with short.turn("a"):
            for _ in range(3):
                with pytest.raises(LimitReached):
                    async with short.turn("b"):
                        pass
        async with short.turn("b"):
            pass


async def test_turns_are_bounded_by_key_and_in_all_and_are_given_back_by_what_fails() -> None:
    turns = Limit("looks", each=2, total=3, seconds=0.01)
    for _ in range(4):
        with pytest.raises(ValueError, match="broken"):
            async with turns.turn("a"):
                raise ValueError("broken")
    async with turns.turn("a"), turns.turn("a"):
        with pytest.raises(LimitReached, match="namespace 'a'"):
            await turns.turn("a").__aenter__()
        async with turns.turn("b"):
            with pytest.raises(LimitReached):
                await turns.turn("c").__aenter__()
        async with turns.turn("c"):
            pass


def test_an_empty_answer_stands_until_the_queues_change() -> None:
    answers = EmptyAnswers()
    assert not answers.is_known("a", 1, 0.0)
    answers.note("a", 1, 0.0)
    assert answers.is_known("a", 1, 0.5)
    assert not answers.is_known("a", 2, 0.5)
    assert not answers.is_known("a", 1, 1.5), "it does not stand for long"
    assert not answers.is_known("b", 1, 0.5)
