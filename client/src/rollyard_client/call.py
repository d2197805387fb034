"""A REST call as a value: built once, sent by the sync and the async transport alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

import httpx
import orjson

from rollyard_client.errors import from_answer

T = TypeVar("T")

JSON = "application/json"


class Upload(Protocol):
    """A body that may be larger than memory; it can be read again when a call is sent again."""

    @property
    def size(self) -> int:
        """Length of the body in bytes."""
        ...

    def pieces(self) -> Iterator[bytes]:
        """Return the body in pieces, from its beginning."""
        ...


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call and how its answer is read.

    `idempotent`: may be sent again when the connection breaks; true of all calls whose repeat
    the server answers the same. `wait`: seconds that the server may take to answer (a long poll).
    """

    method: str
    path: str
    parse: Callable[[httpx.Response], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    upload: Upload | None = None
    """In the place of `body`: what is read while it is sent."""
    content_type: str = JSON
    accept: str = JSON
    wait: float = 0.0
    idempotent: bool = True


def segment(text: str) -> str:
    """A path segment, quoted."""
    return quote(text, safe="")


def encode(document: Any) -> bytes:
    """A JSON body."""
    return orjson.dumps(document)


def as_json(answer: httpx.Response) -> Any:
    """The decoded JSON body."""
    return orjson.loads(answer.content)


def nothing(_answer: httpx.Response) -> None:
    """For calls whose answer says nothing."""


def check(answer: httpx.Response) -> httpx.Response:
    """The answer, if it is a success.

    Raises:
        RollyardError: the exception of its status.
    """
    if answer.is_success:
        return answer
    try:
        problem = orjson.loads(answer.content)
    except ValueError:
        problem = answer.text[:500]
    raise from_answer(answer.status_code, problem, answer.headers.get("retry-after"))
