"""Waiting for the first of several things."""

from __future__ import annotations

import asyncio

import pytest
from rollyard_process.waiting import first_of


async def test_the_others_have_ended_when_the_first_is_returned() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def answers() -> int:
        await asyncio.sleep(0)
        return 7

    number, future = await first_of(waits(), answers())
    assert (number, future.result(), ended) == (1, 7, ["waits"])


async def test_the_exception_of_the_first_is_in_its_future() -> None:
    async def fails() -> None:
        raise ValueError("broken")

    number, future = await first_of(fails(), asyncio.Event().wait())
    assert number == 0
    with pytest.raises(ValueError, match="broken"):
        future.result()
