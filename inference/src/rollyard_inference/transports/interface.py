"""The interface of a transport: one bounded request, one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from rollyard_inference.errors import BackendMismatch

MAX_ANSWER_BYTES: Final = 64 << 20
PLAIN: Final = {"Accept-Encoding": "identity"}
"""Headers of every request: a few packed bytes may stand for gigabytes, so no answer may be compressed."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, whatever its status."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    content: bytes


class Transport(Protocol):
    """Sends requests to servers; no answer is followed to another address or unpacked."""

    async def request(
        self,
        method: str,
        url: str,
        body: object = None,
        *,
        seconds: float | None = None,
        limit: int = MAX_ANSWER_BYTES,
    ) -> Reply:
        """Send one request and read the whole answer.

        Args:
            body: sent as JSON; None: no body.
            seconds: for the whole exchange; None: the caller bounds the time itself.
            limit: bytes that the answer may have.

        Raises:
            NotListening: no connection can be made.
            BackendUnavailable: the connection broke, or there was no answer in time.
            BackendMismatch: the answer is longer than `limit`, or compressed.
        """


def base_url(url: str) -> str:
    """A server's base URL, without `/v1` and without a slash at the end."""
    return url.rstrip("/").removesuffix("/v1")


def check_plain(url: str, encoding: str | None) -> None:
    """Refuse a compressed answer before it is read.

    Raises:
        BackendMismatch: `encoding`, its Content-Encoding, is not `identity`.
    """
    if (encoding or "identity").lower() != "identity":
        raise BackendMismatch(f"{url}: the answer is compressed, though no compression was asked for")


def too_long(url: str, limit: int) -> BackendMismatch:
    """The error for an answer that has more than `limit` bytes."""
    return BackendMismatch(f"{url}: the answer is longer than {limit} bytes")
