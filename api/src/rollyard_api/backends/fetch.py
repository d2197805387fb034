"""Requests of the control plane to backends: bounded in time and size, whatever the server does."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import httpx

from rollyard_api.core.problems import ApiError

NO_SUCH_CALL: Final = frozenset({403, 404, 405, 501})
"""How servers answer a call that they do not have (vLLM without `--enable-scale-out`: 403)."""
CONNECT_SECONDS = 5.0
_PLAIN: Final = {"Accept-Encoding": "identity"}


class Unanswered(ApiError):
    """The server gave no answer that can be used; the message says why."""

    status = 502
    reason = "BackendUnanswered"


def base_of(url: str) -> str:
    """A backend's base URL without `/v1` and without a slash at the end."""
    return url.rstrip("/").removesuffix("/v1")


async def fetch(
    client: httpx.AsyncClient, method: str, url: str, *, seconds: float, limit: int, json: Any = None
) -> tuple[int, bytes]:
    """Status and body of one request.

    Args:
        seconds: for the whole exchange: a server that sends a byte now and then does not hold it up.
        limit: bytes of the body; a longer one is refused.

    Raises:
        Unanswered: no connection, no answer in time, or one that is too long.
    """
    try:
        # The client's own limits are for short calls: a pause or a load may be silent for long.
        quiet = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        async with (
            asyncio.timeout(seconds),
            client.stream(method, url, json=json, timeout=quiet, headers=_PLAIN) as answer,
        ):
            # A few packed bytes may stand for gigabytes, and would be unpacked before they are counted.
            if answer.headers.get("content-encoding", "identity").lower() != "identity":
                raise Unanswered(f"{method} {url}: the answer is compressed, though it was not asked to be")
            body = bytearray()
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > limit:
                    raise Unanswered(f"{method} {url}: the answer is longer than {limit} bytes")
            return answer.status_code, bytes(body)
    except TimeoutError as error:
        raise Unanswered(f"{method} {url}: no answer within {seconds:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError) as error:
        raise Unanswered(f"{url} cannot be reached: {str(error) or type(error).__name__}") from error
