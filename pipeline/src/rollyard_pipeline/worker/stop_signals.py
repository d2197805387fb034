"""Handling of SIGTERM and SIGINT while a worker runs or stands ready."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollyard_pipeline.worker.worker import Worker

T = TypeVar("T")


class StopSignals:
    """Handles SIGTERM and SIGINT.

    The first signal drains the worker, the second has it hand over its rollouts at once, and the third stops
    it. The signals are handled from before the first sandbox starts until after the last one ends, because an
    unhandled signal during the clean-up would leave sandboxes behind.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        self._worker: Worker | None = None
        self._running: asyncio.Future[None] | None = None
        self._idle: asyncio.Future[Any] | None = None

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop)
        return self

    def __exit__(self, *exc: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
            if exc[0] is None:
                # The work is complete, so a signal during the exit must not make it a failure.
                signal.signal(number, signal.SIG_IGN)

    async def run(self, worker: Worker) -> None:
        """Run the worker until it ends."""
        self._worker = worker
        self._running = asyncio.ensure_future(worker.run())
        self._pass_on(worker)
        try:
            await self._running
        except asyncio.CancelledError:
            if self._asked < 3:
                raise

    async def wait(self, idle: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of a coroutine that does no work, or None if a signal has ended it."""
        self._idle = asyncio.ensure_future(idle)
        if self._asked:
            self._idle.cancel()
        try:
            result: T = await self._idle
            return result
        except asyncio.CancelledError:
            if not self._asked:
                raise
            return None
        finally:
            self._idle = None

    def _stop(self) -> None:
        self._asked += 1
        if self._idle is not None:
            self._idle.cancel()
        if self._worker is not None:
            self._pass_on(self._worker)

    def _pass_on(self, worker: Worker) -> None:
        if self._asked == 1:
            worker.drain()
        elif self._asked == 2:
            worker.hand_over()
        elif self._asked > 2 and self._running is not None:
            self._running.cancel()
