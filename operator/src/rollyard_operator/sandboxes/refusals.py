"""Pods that the API server refused to make: the reason, the first refusal, and the time of the next try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from rollyard_process.backoff import Backoff

from rollyard_operator.kube.errors import KubeError
from rollyard_operator.pods.trouble import Trouble
from rollyard_operator.sandboxes.planning.plan import Refusal

_PAUSES: Final = Backoff(first=1.0, longest=30.0)
FINAL_PAUSE_SECONDS = 60.0
FORGET_SECONDS = 600.0
NOT_ISOLATED = "NotIsolated"
"""The reason of the error when a foreign policy opens the network of sandboxes."""
Key = tuple[str, str]


def trouble_of(error: KubeError, now: datetime) -> Trouble:
    """Return what a refusal means for the claim or the warm want that waits for the pod."""
    message = error.message[:512]
    if error.status == 403 and "exceeded quota" in error.message:
        return Trouble("QuotaExceeded", message, now, "scheduler")
    if error.reason == NOT_ISOLATED:
        # The policy may be corrected before the next try, but a claim does not wait for that.
        return Trouble(NOT_ISOLATED, message, now, "none")
    if error.status in (0, 429) or error.status >= 500:
        return Trouble("ApiServerBusy", message, now, "scheduler")
    # A schema, a policy or a missing right refused the pod, and would refuse it again.
    return Trouble("PodRefused", f"{error.reason}: {message}", now, "none", retryable=False)


@dataclass(slots=True)
class _Entry:
    trouble: Trouble
    tries: int
    retry_at: datetime


class Refusals:
    """The refusals by namespace and name of the pod. The pause doubles with each try."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}

    def add(self, key: Key, error: KubeError, now: datetime) -> Trouble:
        """Record one more refusal and return what it means."""
        trouble, before = trouble_of(error, now), self._entries.get(key)
        tries = 1
        if before is not None and before.trouble.hope == trouble.hope:
            tries = before.tries + 1
            trouble = Trouble(
                trouble.reason, trouble.message, before.trouble.since, trouble.hope, trouble.retryable
            )
        pause = _PAUSES.pause(tries)
        if trouble.hope == "none":
            pause = FINAL_PAUSE_SECONDS
        pause = max(pause, error.retry_after or 0.0)
        self._entries[key] = _Entry(trouble, tries, now + timedelta(seconds=pause))
        return trouble

    def clear(self, key: Key) -> None:
        """Forget the refusals of a pod that has been made."""
        self._entries.pop(key, None)

    def current(self, now: datetime) -> Mapping[Key, Refusal]:
        """Return the refusals whose next try is due or was due less than FORGET_SECONDS ago."""
        limit = timedelta(seconds=FORGET_SECONDS)
        self._entries = {key: one for key, one in self._entries.items() if now - one.retry_at < limit}
        return {key: Refusal(one.trouble, one.retry_at) for key, one in self._entries.items()}
