"""The attempts of a rollout that did not end well, as its row keeps them and its trajectory delivers them.

Their texts come from workers, servers and sandboxes. They are therefore escaped and shortened here, before
they are stored.
"""

from __future__ import annotations

from typing import Any, Final

from rollyard_crds.rolloutjob import StageName
from rollyard_crds.trajectory import MAX_ATTEMPT_MESSAGE, MAX_ATTEMPTS, Attempt
from rollyard_process.log_text import one_line

from rollyard_api.core.codec import dumps, loads, pack, unpack

MAX_NAME: Final = 253
"""The largest number of characters of a worker's or node's name, and of a reason."""


def attempt(
    *,
    stage: StageName,
    number: int,
    reason: str,
    message: str,
    worker: str,
    node: str,
    started: float,
    seconds: float,
    counted: bool,
) -> dict[str, Any]:
    """Return the Attempt of a trajectory as JSON; control characters are escaped, and long texts are cut."""
    return Attempt(
        stage=stage,
        attempt=number,
        reason=_cut(reason, MAX_NAME),
        message=_cut(message, MAX_ATTEMPT_MESSAGE),
        worker=_cut(worker, MAX_NAME),
        node=_cut(node, MAX_NAME),
        started=round(started, 3),
        seconds=round(seconds, 3),
        counted=counted,
    ).model_dump()


def _cut(text: str, limit: int) -> str:
    # Escaping never makes a text shorter, so what is beyond the limit is not read.
    escaped = one_line(text[:limit])
    return escaped if len(escaped) <= limit and len(text) <= limit else f"{escaped[: limit - 1]}…"


def added(stored: bytes | None, latest: dict[str, Any]) -> bytes:
    """Return what a row keeps after one more attempt.

    Beyond MAX_ATTEMPTS, the oldest one that did not count is dropped first, because the others explain why a
    rollout failed. If all of them counted, the oldest is dropped.
    """
    listed, dropped = listing(stored)
    listed.append(latest)
    while len(listed) > MAX_ATTEMPTS:
        listed.pop(next((index for index, entry in enumerate(listed) if not entry["counted"]), 0))
        dropped += 1
    return pack(dumps({"attempts": listed, "dropped": dropped}))


def listing(stored: bytes | None) -> tuple[list[dict[str, Any]], int]:
    """Return the attempts that a row keeps, oldest first, and the number of those that were dropped."""
    if stored is None:
        return [], 0
    document = loads(unpack(stored))
    return document["attempts"], document["dropped"]
