"""Sandboxes that are started before they are needed, keyed by the properties of their start."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from rollyard_process.backoff import Backoff
from rollyard_process.telemetry.scope import outside
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import SandboxError as ExecError

from rollyard_pipeline.sandboxes.errors import SandboxProviderError
from rollyard_pipeline.sandboxes.host.records import SandboxRecord
from rollyard_pipeline.sandboxes.interface import SandboxKey

log = logging.getLogger(__name__)

_START_AGAIN: Final = Backoff(first=1.0, longest=30.0)


@dataclass(frozen=True, slots=True)
class WarmSandbox:
    """A sandbox that is started and connected, but not claimed."""

    record: SandboxRecord
    client: ExecClient


class WarmPool:
    """Keeps as many sandboxes of each key ready as `want` requests. One task refills one key.

    Args:
        start: Starts one sandbox. The caller bounds how many starts run at once.
        remove: Removes a sandbox that will not be used.
    """

    def __init__(
        self,
        start: Callable[[SandboxKey], Awaitable[WarmSandbox]],
        remove: Callable[[WarmSandbox], Coroutine[Any, Any, None]],
    ) -> None:
        self._start = start
        self._remove = remove
        self._ready: dict[SandboxKey, deque[WarmSandbox]] = {}
        self._wanted: dict[SandboxKey, int] = {}
        self._refills: dict[SandboxKey, asyncio.Task[None]] = {}
        self._starting: Counter[SandboxKey] = Counter()
        self._waiting: dict[SandboxKey, deque[asyncio.Future[WarmSandbox | None]]] = {}

    def ready(self, key: SandboxKey) -> int:
        """Return how many sandboxes of this key are ready now."""
        return len(self._ready.get(key, ()))

    def want(self, key: SandboxKey, count: int) -> None:
        """Set how many sandboxes are kept ready. They are started or removed in the background."""
        self._wanted[key] = count
        self.refill(key)

    def take(self, key: SandboxKey) -> WarmSandbox | None:
        """Return the oldest ready sandbox, or None.

        Call `refill` only when the sandbox is in use, because starting another one costs CPU time.
        """
        ready = self._ready.get(key)
        while ready:
            warm = ready.popleft()
            if warm.record.alive():
                return warm
            log.warning("warm sandbox %s has died", warm.record.id)
        return None

    async def next(self, key: SandboxKey) -> WarmSandbox | None:
        """Return one of the sandboxes that are being started now.

        The result is None if other callers wait for all of them, or if the start fails. A caller that finds
        none ready is served sooner this way than by an additional start, which would come after these.
        """
        waiting = self._waiting.setdefault(key, deque())
        if self._starting[key] <= len(waiting):
            return None
        future: asyncio.Future[WarmSandbox | None] = asyncio.get_running_loop().create_future()
        waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (warm := future.result()) is not None:
                self._ready.setdefault(key, deque()).append(warm)
                self.refill(key)
            raise
        finally:
            if future in waiting:
                waiting.remove(future)

    async def renew(self, seconds: float) -> None:
        """Renew the lease of every ready sandbox, and remove those that do not answer."""
        for key, ready in list(self._ready.items()):
            for warm in list(ready):
                try:
                    async with asyncio.timeout(5):
                        await warm.client.renew(seconds)
                except (ExecError, TimeoutError) as error:
                    # The sandbox may have been handed out during the request. It then no longer belongs to
                    # the pool.
                    if warm in ready:
                        ready.remove(warm)
                        log.warning("warm sandbox %s is lost: %s", warm.record.id, error)
                        await self._remove(warm)
                        self.refill(key)

    async def aclose(self) -> None:
        """Stop refilling and remove the ready sandboxes."""
        self._wanted.clear()
        refills = list(self._refills.values())
        for task in refills:
            task.cancel()
        await asyncio.gather(*refills, return_exceptions=True)
        left = [warm for ready in self._ready.values() for warm in ready]
        self._ready.clear()
        async with asyncio.TaskGroup() as group:
            for warm in left:
                group.create_task(self._remove(warm))

    def refill(self, key: SandboxKey) -> None:
        """Start the missing sandboxes of this key in the background."""
        task = self._refills.get(key)
        if self._wanted.get(key, 0) != self.ready(key) and (task is None or task.done()):
            self._refills[key] = asyncio.create_task(
                self._fill(key), name="sandbox-refill", context=outside()
            )

    async def _fill(self, key: SandboxKey) -> None:
        failures = 0
        ready = self._ready.setdefault(key, deque())
        while (missing := self._wanted.get(key, 0) - len(ready)) != 0:
            if missing < 0:
                await self._remove(ready.popleft())
                continue
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(missing):
                        group.create_task(self._add(key, ready))
            except* (SandboxProviderError, ExecError, OSError) as errors:
                first = errors.exceptions[0]
                failures += 1
                delay = _START_AGAIN.pause(failures)
                log.warning("the warm pool cannot start a sandbox, next try in %g s: %s", delay, first)
                await asyncio.sleep(delay)
            else:
                failures = 0

    async def _add(self, key: SandboxKey, ready: deque[WarmSandbox]) -> None:
        waiting = self._waiting.setdefault(key, deque())
        self._starting[key] += 1
        try:
            warm = await self._start(key)
            while waiting:
                if not (future := waiting.popleft()).done():
                    future.set_result(warm)
                    return
            ready.append(warm)
        finally:
            self._starting[key] -= 1
            while len(waiting) > self._starting[key]:
                # The start for which this caller waited has failed.
                if not (future := waiting.pop()).done():
                    future.set_result(None)
