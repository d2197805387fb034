"""Handling of SIGTERM and SIGINT while a worker runs."""

from __future__ import annotations

import asyncio
import signal

from rollyard_pipeline.worker.worker import Worker


class StopSignals:
    """Handles SIGTERM and SIGINT: the first signal drains the worker, the second stops it at once.

    The signals are handled from before the first sandbox starts until after the last one ends, because an
    unhandled signal during the clean-up would leave sandboxes behind.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        self._worker: Worker | None = None
        self._running: asyncio.Future[None] | None = None

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
        if self._asked:
            worker.drain()
        try:
            await self._running
        except asyncio.CancelledError:
            if self._asked < 2:
                raise

    def _stop(self) -> None:
        self._asked += 1
        if self._asked == 1 and self._worker is not None:
            self._worker.drain()
        elif self._asked > 1 and self._running is not None:
            self._running.cancel()
