"""The health of a pool's backends, which one task for each pod watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

import httpx

from rollyard_drivers.health.backend import BackendHealth, watch_backend
from rollyard_drivers.reconcile.plan import ObservedWorkload

REMEMBERED: Final = 1024
"""The number of backends that have ended and of which it is remembered when they became ready."""


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
        wanted = dict(running)
        for uid, watch in list(self._watches.items()):
            if wanted.get(uid) != watch.url or watch.model != model:
                watch.task.cancel()
                del self._watches[uid]
                if watch.health.ready_since is not None:
                    self._ready_since[uid] = watch.health.ready_since
        while len(self._ready_since) > REMEMBERED:
            self._ready_since.pop(next(iter(self._ready_since)))
        for uid, url in wanted.items():
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
