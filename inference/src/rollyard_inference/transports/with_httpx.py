"""The transport over an httpx client, which its owner opens and closes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from rollyard_inference.errors import BackendUnavailable, NotListening
from rollyard_inference.transports.interface import (
    MAX_ANSWER_BYTES,
    PLAIN,
    TRACEPARENT,
    Reply,
    check_plain,
    too_long,
)

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS: Final = 5.0


class HttpxTransport:
    """A transport with bounded answers.

    Args:
        client: The client for every request. Its own time limits do not apply.
        connect_seconds: The seconds to wait for a connection.
    """

    def __init__(self, client: httpx.AsyncClient, connect_seconds: float = CONNECT_SECONDS) -> None:
        self._client = client
        self._connect_seconds = connect_seconds

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
        """Send one request and read the whole answer. See `Transport.request`."""
        import httpx

        connect = self._connect_seconds if seconds is None else min(seconds, self._connect_seconds)
        # The limit for the whole exchange is outside the client, so it also applies to a server that sends a
        # byte now and then.
        headers = PLAIN if traceparent is None else PLAIN | {TRACEPARENT: traceparent}
        quiet = httpx.Timeout(seconds, connect=connect)
        try:
            async with (
                asyncio.timeout(seconds),
                self._client.stream(
                    method, url, json=body, timeout=quiet, headers=headers, follow_redirects=False
                ) as answer,
            ):
                check_plain(url, answer.headers.get("content-encoding"))
                content = bytearray()
                async for chunk in answer.aiter_bytes():
                    content += chunk
                    if len(content) > limit:
                        raise too_long(url, limit)
                named = {name.lower(): value for name, value in answer.headers.items()}
                return Reply(answer.status_code, named, bytes(content))
        except TimeoutError as error:
            raise BackendUnavailable(f"{method} {url}: no answer within {seconds:g} s") from error
        except httpx.ConnectError as error:
            raise NotListening(f"{url} cannot be reached: {str(error) or type(error).__name__}") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError) as error:
            raise BackendUnavailable(
                f"{url} cannot be reached: {str(error) or type(error).__name__}"
            ) from error
