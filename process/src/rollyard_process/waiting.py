"""Waiting for the first of several things."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def first_of(*awaitables: Awaitable[Any]) -> tuple[int, asyncio.Future[Any]]:
    """Wait until one of `awaitables` has ended. The others are cancelled, and have ended on return.

    Exceptions of the others are dropped.

    Returns:
        The index of the argument that ended first, counted from 0, and its future, which holds
        its result or exception.
    """
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return next((number, future) for number, future in enumerate(futures) if future.done())
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
