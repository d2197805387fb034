"""A REST call as a value, and how often it is sent. The sync and the async transport can both send it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast
from urllib.parse import quote

import orjson
from rollyard_process.backoff import Backoff

from rollyard_client.errors import (
    AnswerInvalid,
    Invalid,
    RollyardError,
    ServerUnavailable,
    TooMany,
    from_answer,
)

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

JSON: Final = "application/json"
PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class File:
    """A file with the size and the hash that it had when it was hashed."""

    path: Path
    size: int
    """The size in bytes."""
    sha256: str

    @property
    def url(self) -> str:
        """The URL for `spec.tasks.url` of a job, once the file is uploaded."""
        return f"blob:sha256:{self.sha256}"

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the file in pieces of at most `PIECE_BYTES`."""
        with self.path.open("rb") as file:
            while data := file.read(PIECE_BYTES):
                yield data


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call and how its answer is read.

    Attributes:
        idempotent: Whether the call may be sent again when the connection breaks. This holds for all calls
            whose repeat gets the same answer.
        wait: The seconds beyond the usual timeout that the server may take to answer (a long poll).
    """

    method: str
    path: str
    parse: Callable[[httpx.Response], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    upload: File | None = None
    """A file that is sent instead of `body`. It is read again each time that the call is sent."""
    content_type: str = JSON
    accept: str = JSON
    wait: float = 0.0
    idempotent: bool = True


Steps = Generator[Call[Any] | float, Any, T]
"""Calls, each of which is answered with its result, and pauses in seconds. A client carries them out."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a call is sent, and how long the pauses between its attempts are.

    A call is sent again if no server answers, the connection breaks, or the answer says that the server is
    not available (502, 503, 504) or that its queues are full (429). The pause after attempt n is
    base × 2ⁿ seconds and at most `longest` seconds; half of it is jitter. If the server names a longer pause
    than `longest` (`Retry-After`), the error is raised at once. With the defaults the pauses are at
    most 1.5 seconds together, and with `Retry(attempts=12, longest=10)` at most 53 seconds.

    Any other answer is never asked for again, such as a refusal or a conflict. The calls that a repetition
    would answer differently (`delete`, `delete_pool`, `forget`) are not sent again after a connection broke
    on which they may have arrived. A stream of `events` is not opened again: continue with `last_id`.

    Raises:
        Invalid: An argument is out of range.
    """

    attempts: int = 5
    """How often a call is sent altogether. 1 repeats none."""
    base: float = 0.1
    """The pause before the second attempt, in seconds."""
    longest: float = 2.0
    """The longest pause, in seconds."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise Invalid(f"attempts: must be at least 1 (got {self.attempts})")
        for name, seconds in (("base", self.base), ("longest", self.longest)):
            if not 0 <= seconds < inf:
                raise Invalid(f"{name}: must be a number of seconds, at least 0 (got {seconds})")

    def pause(self, attempt: int, error: RollyardError) -> float | None:
        """Return the seconds before the next attempt, or None if `error` is to be raised instead."""
        if attempt + 1 >= self.attempts:
            return None
        if not isinstance(error, ServerUnavailable | TooMany):
            return None
        if error.retry_after is not None and error.retry_after > self.longest:
            return None
        return Backoff(self.base, self.longest, jitter=0.5).pause(attempt + 1, error.retry_after)


def segment(text: str) -> str:
    """Return the text quoted as one segment of a path."""
    return quote(text, safe="")


def encode(document: Any) -> bytes:
    """Return the document as a JSON body."""
    return orjson.dumps(document)


def as_json(answer: httpx.Response) -> Any:
    """Return the decoded JSON body of an answer."""
    return orjson.loads(answer.content)


def listed(kind: Callable[[Any], T]) -> Callable[[httpx.Response], tuple[list[T], str | None]]:
    """Return the parser of a page of a list. Its result is the items, and the continuation if more follow.

    Args:
        kind: Makes an item from its decoded JSON.
    """

    def parse(answer: httpx.Response) -> tuple[list[T], str | None]:
        document = as_json(answer)
        return [kind(item) for item in document["items"]], document["metadata"].get("continue")

    return parse


def known(kind: type[T], item: Mapping[str, Any]) -> T:
    """Return a dataclass from the decoded JSON of an object. Fields that the dataclass lacks are left out."""
    names = [attribute.name for attribute in fields(cast(Any, kind))]
    return kind(**{name: item[name] for name in names if name in item})


def typed(kind: type[T]) -> Callable[[httpx.Response], T]:
    """Return the parser of an answer that is an object, with objects in it.

    Fields that the dataclasses lack are left out.

    Args:
        kind: A dataclass.
    """

    def parse(answer: httpx.Response) -> T:
        # pydantic takes long to import, and builds the reader of a dataclass in a few milliseconds.
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(kind).validate_json(answer.content)
        except ValidationError as error:
            raise AnswerInvalid(f"an answer is not a {kind.__name__}: {error}") from error

    return parse


def nothing(_answer: httpx.Response) -> None:
    """Return None. This parses the answers of calls that have no result."""


def ready() -> Call[None]:
    """Return the call that succeeds when the control plane is ready."""
    return Call("GET", "/readyz", nothing)


def check(answer: httpx.Response) -> httpx.Response:
    """Return the answer if the call succeeded.

    Raises:
        RollyardError: The call failed. The subclass depends on status and reason.
    """
    if answer.is_success:
        return answer
    try:
        problem = orjson.loads(answer.content)
    except ValueError:
        problem = answer.text[:500]
    raise from_answer(answer.status_code, problem, answer.headers.get("retry-after"))
