"""Waiting for what no event tells: another process, the kernel, or a loop of the product."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, Final

from rollyard_testing.pace import patience

_USUAL_SECONDS: Final = 60.0


def until(
    condition: Callable[[], Any], seconds: float | None = None, what: str = "it", pause: float = 0.02
) -> Any:
    """Return what the condition gives once that is true.

    Args:
        condition: The condition.
        seconds: The longest wait; a minute of a usual machine if it is not given.
        what: What is waited for.
        pause: The seconds between two looks.

    Raises:
        AssertionError: The condition did not become true in time.
    """
    longest = patience(_USUAL_SECONDS) if seconds is None else seconds
    deadline = time.monotonic() + longest
    while not (seen := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {longest:.0f} s"
        time.sleep(pause)
    return seen


async def eventually(condition: Callable[[], Any], seconds: float | None = None, pause: float = 0.02) -> Any:
    """Return what the condition gives, or the awaitable that it returns, once that is true.

    Args:
        condition: A function or a coroutine function.
        seconds: The longest wait; a minute of a usual machine if it is not given.
        pause: The seconds between two looks.

    Raises:
        TimeoutError: The condition did not become true in time.
    """
    async with asyncio.timeout(patience(_USUAL_SECONDS) if seconds is None else seconds):
        while True:
            seen = condition()
            if inspect.isawaitable(seen):
                seen = await seen
            if seen:
                return seen
            await asyncio.sleep(pause)
