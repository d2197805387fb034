"""The health of one backend that a driver has started: the backend is warmed up first, and then watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx
from rollyard_inference.errors import BackendError, NotListening
from rollyard_inference.health import check_alive, first_request
from rollyard_inference.transports.with_httpx import HttpxTransport

from rollyard_drivers.reconcile.plan import STARTING

FIRST_CHECK_SECONDS = 0.1
CHECK_SECONDS = 5.0
TIMEOUT_SECONDS = 5.0
WARM_UP_SECONDS = 120.0
TOLERATED_FAILURES = 3


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
