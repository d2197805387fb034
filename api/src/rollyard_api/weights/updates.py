"""An update as its row stores it: what was requested, and how far each backend has got.

Nothing here reads a table, calls a server or reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson
from rollyard_crds.base import Model
from rollyard_crds.weights import BackendUpdate, WeightUpdateRequest

from rollyard_api.core.codec import dumps, loads
from rollyard_api.core.conditions import timestamp
from rollyard_api.storage.rows import WeightUpdateRow

_NO_BACKEND: Final = "waits for a backend: no backend has these weights yet"
_PRIVATE: Final = "before"
"""The field of a backend's part that only the control plane reads."""


class EarlierLogprobs(Model):
    """What a server gave for a fixed prompt with the weights that it had before an update.

    After the update was refused, this shows whether the server has those weights again.
    """

    policy_index: int
    """The index of the weights; 0 stands for those that the server was started with."""
    label: str
    """The label that the server had for them."""
    folder: str | None = None
    """The folder that the server was started on, if the server says so."""
    prompt_ids: tuple[int, ...]
    """Token ids, length n."""
    logprobs: tuple[float, ...]
    """The log-probability, in nats, of each token after the first: length n - 1."""


class BackendProgress(BackendUpdate):
    """One backend's part of an update, with what only the control plane reads."""

    before: EarlierLogprobs | None = None


def request_of(row: WeightUpdateRow) -> WeightUpdateRequest:
    """Return the request that a row of weight_updates records."""
    return WeightUpdateRequest.model_validate_json(row.request)


def progress_of(row: WeightUpdateRow) -> dict[str, BackendProgress]:
    """Return each backend's part of the update, by URL."""
    return {item["url"]: BackendProgress.model_validate(item) for item in loads(row.progress)}


def encoded(progress: dict[str, BackendProgress]) -> bytes:
    """Return the form in which a row stores the backends' parts."""
    return dumps([item.to_json() for item in progress.values()])


def document(row: WeightUpdateRow) -> dict[str, Any]:
    """Return a row as the REST API presents it."""
    request = request_of(row)
    parts = [{key: item[key] for key in item if key != _PRIVATE} for item in loads(row.progress)]
    message = row.message
    if row.state == "Running" and not parts:
        message = "; ".join(filter(None, (_NO_BACKEND, message)))
    return {
        "id": row.id,
        "policyVersion": row.policy_version,
        "source": request.source.to_json(),
        "mode": request.mode,
        "inFlight": request.in_flight,
        "state": row.state,
        "verified": bool(row.verified),
        "verifiedBy": row.verified_by,
        "message": message,
        "backends": [orjson.Fragment(dumps(item)) for item in parts],
        "createdAt": timestamp(row.created_at),
        "finishedAt": None if row.finished_at is None else timestamp(row.finished_at),
    }


def serves(chain: Sequence[WeightUpdateRow]) -> str | None:
    """Return the model name that these updates, the newest first, lead to, or None for the model's own."""
    for update in chain:
        source = request_of(update).source
        if not source.pushed:
            return None if source.lora is None else source.lora.name
    return None
