"""The health of one backend that a driver started: it is warmed up, then watched."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

from rollyard_drivers.reconcile.plan import STARTING

FIRST_CHECK_SECONDS = 0.1
CHECK_SECONDS = 5.0
TIMEOUT_SECONDS = 5.0
WARM_UP_SECONDS = 120.0
TOLERATED_FAILURES = 3


@dataclass(frozen=True, slots=True)
class BackendHealth:
    """What the probe knows."""

    url: str = ""
    ready: bool = False
    warmed_up: bool = False
    policy_version: str = ""
    failures: int = 0
    unready_since: datetime | None = None
    message: str = STARTING


async def _warm_up(http: httpx.AsyncClient, url: str, model: str) -> str:
    """A first completion, checked; returns the label of the weights that sampled it, if the engine says.

    `/health` of vLLM only says that the engine's process lives.

    Raises:
        httpx.HTTPError: no answer.
        NotReady: an error, or an answer without one token id and its log-probability.
    """
    asked = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "return_token_ids": True}
    answer = await http.post(
        f"{url}/v1/completions", json={"model": model, "prompt": [1], **asked}, timeout=WARM_UP_SECONDS
    )
    if not answer.is_success:
        raise NotReady(f"the first completion was answered {answer.status_code}: {answer.text[:200]}")
    try:
        choice = answer.json()["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        good = len(ids) == len(logprobs) == 1 and type(ids[0]) is int and math.isfinite(logprobs[0])
        spans = choice.get("weight_versions") or []
        version = str(spans[-1]["version"]) if spans else ""
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotReady("the first completion holds no token ids with log-probabilities") from error
    if not good:
        raise NotReady(f"one token was asked for; token_ids {ids!r:.100}, token_logprobs {logprobs!r:.100}")
    return version or await _label(http, url)


async def _label(http: httpx.AsyncClient, url: str) -> str:
    answer = await http.get(f"{url}/weight_info", timeout=TIMEOUT_SECONDS)
    try:
        return str(answer.json()["weight_version"]) if answer.is_success else ""
    except (ValueError, LookupError, TypeError):
        return ""


class NotReady(Exception):
    """The server answers, but not as one that can be used."""


def _words(error: Exception, warmed_up: bool) -> str:
    if isinstance(error, NotReady):
        return str(error)
    if isinstance(error, httpx.ConnectError) and not warmed_up:
        return STARTING  # it loads the model, and listens after that
    return f"{type(error).__name__}: {error}".strip().rstrip(":")[:300]


async def watch_backend(
    url: str,
    model: str,
    http: httpx.AsyncClient,
    report: Callable[[BackendHealth], None],
    known: BackendHealth | None = None,
) -> None:
    """Reports the backend's health until cancelled. Ready: health check and a first completion passed.

    Args:
        known: what an earlier watch said; default: nothing.
    """
    health = known or BackendHealth(url=url)
    report(health)
    while True:
        try:
            answer = await http.get(f"{url}/health", timeout=TIMEOUT_SECONDS)
            answer.raise_for_status()
            version = health.policy_version
            if not health.warmed_up:
                version = await _warm_up(http, url, model)
            health = BackendHealth(url=url, ready=True, warmed_up=True, policy_version=version, message="")
        except (httpx.HTTPError, NotReady) as error:
            failures = health.failures + 1
            health = BackendHealth(
                url=url,
                ready=health.ready and failures < TOLERATED_FAILURES,
                warmed_up=health.warmed_up,
                policy_version=health.policy_version,
                failures=failures,
                unready_since=health.unready_since or datetime.now(UTC),
                message=_words(error, health.warmed_up),
            )
        report(health)
        await asyncio.sleep(CHECK_SECONDS if health.ready else FIRST_CHECK_SECONDS * 5)
