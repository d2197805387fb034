"""Health of one embedded backend: found by its port file, then warmed up, then watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

FIRST_CHECK_SECONDS = 0.1
CHECK_SECONDS = 5.0
TIMEOUT_SECONDS = 5.0
WARM_UP_SECONDS = 120.0
TOLERATED_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Health:
    """What the probe knows."""

    url: str = ""
    ready: bool = False
    warmed_up: bool = False
    policy_version: str = ""
    failures: int = 0
    unready_since: datetime | None = None
    message: str = "starting"


async def _listening(port_file: Path, host: str) -> str:
    while True:
        try:
            port = int(port_file.read_text())
        except (OSError, ValueError):
            await asyncio.sleep(FIRST_CHECK_SECONDS)
            continue
        return f"http://{host}:{port}"


async def _warm_up(http: httpx.AsyncClient, url: str, model: str) -> str:
    """A first completion; returns the label of the weights that sampled it, if the engine says."""
    answer = await http.post(
        f"{url}/v1/completions",
        json={"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0.0},
        timeout=WARM_UP_SECONDS,
    )
    answer.raise_for_status()
    try:
        spans = answer.json()["choices"][0].get("weight_versions") or []
        return str(spans[-1]["version"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().rstrip(":")[:300]


async def watch_backend(
    port_file: Path, host: str, model: str, http: httpx.AsyncClient, report: Callable[[Health], None]
) -> None:
    """Reports the backend's health until cancelled. Ready: health check and a first completion passed."""
    url = await _listening(port_file, host)
    health = Health(url=url)
    report(health)
    while True:
        try:
            answer = await http.get(f"{url}/health", timeout=TIMEOUT_SECONDS)
            answer.raise_for_status()
            version = health.policy_version
            if not health.warmed_up:
                version = await _warm_up(http, url, model)
            health = Health(url=url, ready=True, warmed_up=True, policy_version=version, message="")
        except httpx.HTTPError as error:
            failures = health.failures + 1
            health = Health(
                url=url,
                ready=health.ready and failures < TOLERATED_FAILURES,
                warmed_up=health.warmed_up,
                policy_version=health.policy_version,
                failures=failures,
                unready_since=health.unready_since or datetime.now(UTC),
                message=_words(error),
            )
        report(health)
        await asyncio.sleep(CHECK_SECONDS if health.ready else FIRST_CHECK_SECONDS * 5)
