"""The calls about the cursors that a reader of a job's results acknowledges."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from rollyard_client.call import Call, as_json, encode, nothing, segment
from rollyard_client.requests.jobs import JOBS

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A cursor that the server keeps under a name."""

    consumer: str
    """The name."""
    kind: Literal["trajectories", "groups"]
    """What the cursor counts."""
    cursor: str
    """The cursor."""
    moved_at: datetime
    """When it was last moved."""


def _of(item: dict[str, Any]) -> Acknowledged:
    return Acknowledged(item["name"], item["kind"], item["cursor"], datetime.fromisoformat(item["movedAt"]))


def _acknowledged(answer: httpx.Response) -> Acknowledged:
    return _of(as_json(answer))


def _path(job: str, consumer: str) -> str:
    return f"{JOBS}/{segment(job)}/cursors/{segment(consumer)}"


def acknowledge(
    job: str, namespace: str, consumer: str, cursor: str, expected: str | None, *, rewind: bool
) -> Call[Acknowledged]:
    """Return the call that keeps a cursor. It may be sent again, because a repeat changes nothing."""
    body: dict[str, Any] = {"cursor": cursor, "rewind": rewind}
    if expected is not None:
        body["expected"] = expected
    return Call("PUT", _path(job, consumer), _acknowledged, query={"namespace": namespace}, body=encode(body))


def acknowledged(job: str, namespace: str, consumer: str) -> Call[Acknowledged]:
    """Return the call that reads a kept cursor."""
    return Call("GET", _path(job, consumer), _acknowledged, query={"namespace": namespace})


def listed(job: str, namespace: str) -> Call[list[Acknowledged]]:
    """Return the call that lists the kept cursors of a job."""

    def parse(answer: httpx.Response) -> list[Acknowledged]:
        return [_of(item) for item in as_json(answer)["items"]]

    return Call("GET", f"{JOBS}/{segment(job)}/cursors", parse, query={"namespace": namespace})


def forget(job: str, namespace: str, consumer: str) -> Call[None]:
    """Return the call that removes a kept cursor."""
    # It is not sent again once it may have arrived, because a repeat would be answered with 404.
    query = {"namespace": namespace}
    return Call("DELETE", _path(job, consumer), nothing, query=query, idempotent=False)
