"""The part of each backend in a weight update, as the row of the update stores it."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from rollyard_crds.base import Model
from rollyard_crds.weights import BackendUpdate
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import dumps, loads
from rollyard_api.storage.rows import WeightUpdateRow, read_all
from rollyard_api.storage.schema import weight_updates

_SEARCHED: Final = 100  # The number of updates, the newest first, in which earlier values are looked for.
_PRIVATE: Final = "before"


class EarlierLogprobs(Model):
    """What a server gave for a fixed prompt with the weights that it had before an update.

    After the update was refused, this shows whether the server has those weights again.
    """

    policy_index: int
    """The index of the weights; 0 stands for those that the server was started with."""
    label: str
    """The label that the server had for them."""
    folder: str | None = None
    """The folder that the server was started on, if it says it."""
    prompt_ids: tuple[int, ...]
    """Token ids, length n."""
    logprobs: tuple[float, ...]
    """The log-probability, in nats, of each token after the first: length n - 1."""


class BackendProgress(BackendUpdate):
    """One backend's part of an update, with what only the control plane reads."""

    before: EarlierLogprobs | None = None


def progress_of(row: WeightUpdateRow) -> dict[str, BackendProgress]:
    """Return each backend's part of the update, by URL."""
    return {item["url"]: BackendProgress.model_validate(item) for item in loads(row.progress)}


def encoded(progress: dict[str, BackendProgress]) -> bytes:
    """Return the form in which a row stores the backends' parts."""
    return dumps([item.to_json() for item in progress.values()])


def public(row: WeightUpdateRow) -> list[dict[str, Any]]:
    """Return the backends' parts as the REST API presents them."""
    return [{key: item[key] for key in item if key != _PRIVATE} for item in loads(row.progress)]


def earlier(conn: Connection, pool_id: int, url: str, policy_index: int) -> EarlierLogprobs | None:
    """Return what a backend was last seen to give with the weights of an index, or None if unknown."""
    query = sa.select(weight_updates).where(weight_updates.c.pool_id == pool_id)
    newest = query.order_by(weight_updates.c.id.desc()).limit(_SEARCHED)
    for row in read_all(WeightUpdateRow, conn.execute(newest)):
        part = progress_of(row).get(url)
        if part is not None and part.before is not None and part.before.policy_index == policy_index:
            return part.before
    return None
