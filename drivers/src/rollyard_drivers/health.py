"""The health of the backends that a driver has started: they are warmed up first, and then watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

import httpx
from rollyard_inference.errors import BackendError, NotListening
from rollyard_inference.health import check_alive, first_request
from rollyard_inference.transports.with_httpx import HttpxTransport

from rollyard_drivers.reconcile.plan import STARTING, ObservedWorkload

FIRST_CHECK_SECONDS: Final = 0.1
CHECK_SECONDS: Final = 5.0
TIMEOUT_SECONDS: Final = 5.0
WARM_UP_SECONDS: Final = 120.0
TOLERATED_FAILURES: Final = 3


@dataclass(frozen=True, slots=True)
class BackendHealth:
    """What the probe knows about one backend."""

    url: str = ""
    ready: bool = False
    warmed_up: bool = False
    policy_version: str = ""
    ready_since: datetime | None = None
    """The time at which the backend became ready for the first time."""
    failures: int = 0
    unready_since: datetime | None = None
    message: str = STARTING


def _message(error: BackendError, warmed_up: bool) -> str:
    if isinstance(error, NotListening) and not warmed_up:
        return STARTING  # The server loads the model before it listens.
    return str(error)[:300]


async def watch_backend(
    url: str,
    model: str,
    http: httpx.AsyncClient,
    report: Callable[[BackendHealth], None],
    known: BackendHealth | None = None,
) -> None:
    """Report the health of a backend until this task is cancelled.

    The backend is ready when the health check and a first request have succeeded.

    Args:
        url: The base URL of the backend.
        model: The name of the model that the backend serves.
        http: The client that sends the requests.
        report: Called with the health after each check.
        known: The health that an earlier watch reported. By default, nothing is known.
    """
    transport = HttpxTransport(http)
    health = known or BackendHealth(url=url)
    report(health)
    while True:
        try:
            await check_alive(transport, url, TIMEOUT_SECONDS)
            version = health.policy_version
            if not health.warmed_up:
                version = await first_request(transport, url, model, WARM_UP_SECONDS) or ""
            health = BackendHealth(
                url=url,
                ready=True,
                warmed_up=True,
                policy_version=version,
                ready_since=health.ready_since or datetime.now(UTC),
                message="",
            )
        except BackendError as error:
            failures = health.failures + 1
            health = BackendHealth(
                url=url,
                ready=health.ready and failures < TOLERATED_FAILURES,
                warmed_up=health.warmed_up,
                policy_version=health.policy_version,
                ready_since=health.ready_since,
                failures=failures,
                unready_since=health.unready_since or datetime.now(UTC),
                message=_message(error, health.warmed_up),
            )
        report(health)
        await asyncio.sleep(CHECK_SECONDS if health.ready else FIRST_CHECK_SECONDS * 5)


REMEMBERED: Final = 1024
"""The number of ended backends for which the time when they became ready is remembered."""


@dataclass(slots=True)
class _Watch:
    url: str
    model: str
    task: asyncio.Task[None]
    health: BackendHealth = field(default_factory=BackendHealth)


class PoolHealth:
    """The health probes of one pool.

    Args:
        http: The client that sends the requests of the probes.
        wake: Called when a backend has become ready, or is no longer ready.
    """

    def __init__(self, http: httpx.AsyncClient, wake: Callable[[], None]) -> None:
        self._http = http
        self._wake = wake
        self._watches: dict[str, _Watch] = {}
        self._ready_since: dict[str, datetime] = {}

    def keep(self, running: Iterable[tuple[str, str]], model: str) -> None:
        """Probe exactly the given backends, and stop the probes of all others.

        Args:
            running: The uid of the pod and the base URL of each backend.
            model: The name of the model that the backends serve.
        """
        urls = dict(running)
        for uid, watch in list(self._watches.items()):
            if urls.get(uid) != watch.url or watch.model != model:
                watch.task.cancel()
                del self._watches[uid]
                if watch.health.ready_since is not None:
                    self._ready_since[uid] = watch.health.ready_since
        while len(self._ready_since) > REMEMBERED:
            self._ready_since.pop(next(iter(self._ready_since)))
        for uid, url in urls.items():
            if uid not in self._watches:
                task = asyncio.create_task(self._probe(uid, url, model), name=f"health of {url}")
                self._watches[uid] = _Watch(url, model, task)

    def seen(self, uid: str, pod: ObservedWorkload) -> ObservedWorkload:
        """Return an observed backend, completed with what its probe knows.

        The backend counts as running once it has answered a first completion.
        """
        if pod.state != "running":
            return replace(pod, ready=False, ready_since=self._ready_since.get(uid))
        watch = self._watches.get(uid)
        health = watch.health if watch is not None else BackendHealth()
        return replace(
            pod,
            state="running" if health.warmed_up else "starting",
            ready=health.ready,
            unready_since=health.unready_since,
            policy_version=health.policy_version,
            message=health.message,
            ready_since=health.ready_since,
        )

    async def close(self) -> None:
        """Cancel all probes and wait until they have ended."""
        tasks = [watch.task for watch in self._watches.values()]
        self._watches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, uid: str, url: str, model: str) -> None:
        def report(health: BackendHealth) -> None:
            watch = self._watches.get(uid)
            if watch is None or watch.url != url:
                return
            before, watch.health = watch.health, health
            if (before.ready, before.warmed_up, before.message) != (
                health.ready,
                health.warmed_up,
                health.message,
            ):
                self._wake()

        await watch_backend(url, model, self._http, report)
