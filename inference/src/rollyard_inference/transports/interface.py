"""The interface of a transport, which sends one bounded request and reads one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from rollyard_process.telemetry.identity import NOT_SAMPLED

from rollyard_inference.errors import BackendMismatch

MAX_ANSWER_BYTES: Final = 64 << 20
TRACEPARENT: Final = "traceparent"
PLAIN: Final = {"Accept-Encoding": "identity", TRACEPARENT: NOT_SAMPLED}
"""The headers of every request. A few compressed bytes may expand to gigabytes, so no answer may be
compressed. A request that names no span says that it is not to be traced: a server that traces its own work
could otherwise count it among the spans of another request."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, whatever its status is."""

    status: int
    headers: Mapping[str, str]
    """The headers of the answer, with names in lower case."""
    content: bytes


class Transport(Protocol):
    """A component that sends requests to servers.

    It follows no redirects and decompresses no answers.
    """

    async def request(
        self,
        method: str,
        url: str,
        body: object = None,
        *,
        seconds: float | None = None,
        limit: int = MAX_ANSWER_BYTES,
        traceparent: str | None = None,
    ) -> Reply:
        """Send one request and read the whole answer.

        Args:
            method: The HTTP method.
            url: The address of the call.
            body: The object to send as JSON. With None, the request has no body.
            seconds: The time limit for the whole exchange. With None, the caller limits the time itself.
            limit: The maximum size of the answer in bytes.
            traceparent: The span that the request belongs to (W3C Trace Context). With None, it is not
                traced.

        Raises:
            NotListening: No connection can be made.
            BackendUnavailable: The connection broke, or there was no answer in time.
            BackendMismatch: The answer is longer than `limit`, or compressed.
        """


def base_url(url: str) -> str:
    """Return a server's base URL, without `/v1` and without a slash at the end."""
    return url.rstrip("/").removesuffix("/v1")


def check_plain(url: str, encoding: str | None) -> None:
    """Refuse a compressed answer before it is read.

    Args:
        url: The address of the call, for the message.
        encoding: The Content-Encoding of the answer.

    Raises:
        BackendMismatch: `encoding` is not `identity`.
    """
    if (encoding or "identity").lower() != "identity":
        raise BackendMismatch(f"{url}: the answer is compressed, though no compression was asked for")


def too_long(url: str, limit: int) -> BackendMismatch:
    """Return the error for an answer that has more than `limit` bytes."""
    return BackendMismatch(f"{url}: the answer is longer than {limit} bytes")
