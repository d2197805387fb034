"""Waking long polls in this process: topics, and waits that never outlive their bound."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

QUEUE = "queue"
"""Something can be leased that could not before."""
CLAIMS = "claims"
"""A claim, or what drivers are to keep warm, has changed."""
UNFINISHED = "unfinished"
"""A job that drivers have to do with has come, ended, or changed otherwise than by its rollouts."""


def job_topic(job_id: int) -> str:
    """A rollout or a group of the job has ended, or the job has."""
    return f"job:{job_id}"


def claim_topic(claim: str) -> str:
    """The claim has changed."""
    return f"claim:{claim}"


class Bus:
    """Who waits for what. `recheck` bounds each sleep where other replicas may make the change."""

    def __init__(self, recheck: float | None) -> None:
        self._recheck = recheck
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._closing = False
        self._queue_changes = 0

    @property
    def queue_changes(self) -> int:
        """How often waits on QUEUE were woken to look again."""
        return self._queue_changes

    @property
    def closing(self) -> bool:
        return self._closing

    def wake(self, topics: Iterable[str]) -> None:
        """Let every wait on these topics look again."""
        for topic in topics:
            self._queue_changes += topic == QUEUE
            for future in self._waiting.pop(topic, ()):
                if not future.done():
                    future.set_result(None)

    def close(self) -> None:
        """End all waits at once, now and from now on: the process is about to stop."""
        self._closing = True
        self.wake(list(self._waiting))

    async def until(
        self,
        topic: str,
        look: Callable[[], Awaitable[T]],
        enough: Callable[[T], bool],
        wait: float,
        gone: Callable[[], Awaitable[bool]],
    ) -> T:
        """Call `look` until its answer is `enough`, at once and after each wake, for `wait` seconds.

        The wait is registered before looking, so that no wake between the two is missed. Nothing
        is looked for on behalf of a caller who is `gone`: a lease granted to a dead worker would
        be held until it expires.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + wait
        while True:
            future: asyncio.Future[None] = loop.create_future()
            self._waiting[topic].add(future)
            try:
                answer = await look()
                left = end - loop.time()
                if enough(answer) or left <= 0 or self._closing:
                    return answer
                pause = left if self._recheck is None else min(left, self._recheck)
                await asyncio.wait([future], timeout=pause)
                if await gone():
                    return answer
            finally:
                if topic in self._waiting:
                    self._waiting[topic].discard(future)
                    if not self._waiting[topic]:
                        del self._waiting[topic]
                future.cancel()
