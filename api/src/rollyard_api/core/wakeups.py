"""Long polls in this process, which wait on topics until they are woken, and never beyond their bound."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Final, TypeVar

from rollyard_crds.rolloutjob import STAGES, StageName

T = TypeVar("T")

QUEUE: Final = "queue"
"""The topic that is woken when something can be leased that could not be leased before. It stands for the
queues of all stages: its waits are woken with those of any stage, and waking it wakes them all."""
BACKENDS: Final = "backends"
"""The topic that is woken when a backend has become ready."""
CLAIMS: Final = "claims"
"""The topic that is woken when a claim, or the set of sandboxes that drivers keep warm, has changed."""
UNFINISHED: Final = "unfinished"
"""The topic that is woken when a job that drivers handle was created, has ended, or has changed other than by
its rollouts."""


def queue_topic(stage: StageName) -> str:
    """Return the topic that is woken when something of this stage can be leased that could not be before."""
    return f"{QUEUE}:{stage}"


def job_topic(job_id: int) -> str:
    """Return the topic that is woken when a rollout or a group of the job, or the job itself, has ended."""
    return f"job:{job_id}"


def claim_topic(claim: str) -> str:
    """Return the topic that is woken when the claim has changed."""
    return f"claim:{claim}"


def ready_topic(namespace: str, worker: str) -> str:
    """Return the topic that is woken when a ready worker is offered a job."""
    return f"ready:{namespace}/{worker}"


_OF_STAGES: Final = frozenset(queue_topic(stage) for stage in STAGES)


class Bus:
    """The waits of this process by topic.

    Each sleep lasts at most `recheck` seconds where other replicas may make the awaited change.
    """

    def __init__(self, recheck: float | None) -> None:
        self._recheck = recheck
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self.closing = False
        """Whether the control plane is closing, so that waits must end."""
        self._queue_changes = dict.fromkeys(_OF_STAGES, 0)

    def queue_changes(self, stages: Iterable[StageName]) -> int:
        """Return the number of times that waits for the queues of these stages were woken to look again."""
        return sum(self._queue_changes[queue_topic(stage)] for stage in stages)

    def wake(self, topics: Iterable[str]) -> None:
        """Wake every wait on these topics, which then looks again."""
        woken = set(topics)
        if QUEUE in woken:
            woken |= _OF_STAGES
        changed = woken & _OF_STAGES
        if changed:
            woken.add(QUEUE)
        for topic in changed:
            self._queue_changes[topic] += 1
        for topic in woken:
            for future in self._waiting.pop(topic, ()):
                if not future.done():
                    future.set_result(None)

    async def sleep(self, topic: str, seconds: float) -> None:
        """Wait until the topic is woken, for up to `seconds`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[topic].add(future)
        try:
            await asyncio.wait([future], timeout=seconds)
        finally:
            self._forget(topic, future)

    def _forget(self, topic: str, future: asyncio.Future[None]) -> None:
        if topic in self._waiting:
            self._waiting[topic].discard(future)
            if not self._waiting[topic]:
                del self._waiting[topic]
        future.cancel()

    def close(self) -> None:
        """End all present and future waits at once, because the process is about to stop."""
        self.closing = True
        self.wake(list(self._waiting))

    async def until(
        self,
        topic: str,
        look: Callable[[], Awaitable[T]],
        enough: Callable[[T], bool],
        wait: float,
        disconnected: Callable[[], Awaitable[bool]] | None = None,
    ) -> T:
        """Call `look` at once and after each wake until its answer is `enough`, for up to `wait` seconds.

        The wait is registered before the first look, so a wake between the two is not missed. A
        caller who is `disconnected`, if that can be known, gets no further look, because a lease granted to a
        dead worker would be held until it expires.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + wait
        while True:
            future: asyncio.Future[None] = loop.create_future()
            self._waiting[topic].add(future)
            try:
                answer = await look()
                left = end - loop.time()
                if enough(answer) or left <= 0 or self.closing:
                    return answer
                pause = left if self._recheck is None else min(left, self._recheck)
                await asyncio.wait([future], timeout=pause)
                if disconnected is not None and await disconnected():
                    return answer
            finally:
                self._forget(topic, future)


IDLE_SECONDS: Final = 1.0
"""The number of seconds for which an empty answer holds for equal requests, unless the queues change."""
IDLE_REQUESTS: Final = 4096


class EmptyAnswers:
    """The lease requests that were answered with nothing since the queues last changed.

    A change of the queues wakes every waiting lease request. Equal requests are answered by one look at the
    database, so a thousand idle workers of one job cost as much as one.
    """

    def __init__(self) -> None:
        self._answers: dict[Hashable, tuple[int, float]] = {}

    def is_known(self, request: Hashable, changes: int, now: float) -> bool:
        """Return whether an equal request found nothing and the queues have not changed since.

        Args:
            request: What a request asks for, without the worker that makes it.
            changes: The number of changes of the queues so far.
            now: A monotonic time in seconds.
        """
        at_changes, at = self._answers.get(request, (-1, 0.0))
        return at_changes == changes and now - at < IDLE_SECONDS

    def note(self, request: Hashable, changes: int, now: float) -> None:
        """Record that a request found nothing; `changes` is the number of changes read before the look."""
        if len(self._answers) >= IDLE_REQUESTS:
            self._answers.clear()
        self._answers[request] = (changes, now)
