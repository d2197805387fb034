"""The transport of a worker's calls to the control plane.

A worker makes several calls for each rollout, and aiohttp takes a quarter of the processor time that httpx
takes for one. Workers that sample from backends import it anyway. Nobody waits for the import here: until
aiohttp is there, calls take the way of other clients.
"""

from __future__ import annotations

import ssl
import sys
from typing import TYPE_CHECKING, Any, Final

import httpx
from rollyard_client.call import Call, Retry
from rollyard_client.context import Context
from rollyard_client.transport import USER_AGENT, AsyncTransport, verify
from rollyard_client.unixsocket import base_of, socket_of

if TYPE_CHECKING:
    import aiohttp

_CONNECT_SECONDS: Final = 5.0
_KEEP_ALIVE: Final = 5.0  # seconds; the control plane keeps an idle connection for longer


class WorkerTransport(AsyncTransport):
    """A transport with the answers and errors of AsyncTransport, over aiohttp where that is imported."""

    def __init__(self, context: Context, *, retry: Retry, timeout: float, connections: int = 100) -> None:
        super().__init__(context, retry=retry, timeout=timeout, connections=connections)
        self._base = base_of(context.url)
        self._socket = socket_of(context.url)
        self._tls = context.tls
        self._token = context.token
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def answer(self, call: Call[Any]) -> httpx.Response:
        """Send a call once; see `AsyncTransport.answer`."""
        if not _is_imported() or call.query or call.upload is not None:
            return await super().answer(call)
        import aiohttp

        if self._session is None:
            self._session = self._open()
        # One read takes at most this long, as with httpx.
        timeout = aiohttp.ClientTimeout(
            total=None,
            connect=self._timeout,
            sock_connect=_CONNECT_SECONDS,
            sock_read=self._timeout + call.wait,
        )
        headers = {"Accept": call.accept}
        if call.body is not None:
            headers["Content-Type"] = call.content_type
        try:
            async with self._session.request(
                call.method,
                self._base + call.path,
                data=call.body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                content = await answer.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error)) from error
        except aiohttp.ClientConnectorError as error:
            raise httpx.ConnectError(str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.ReadError(f"{type(error).__name__}: {error}") from error
        kept = {name: answer.headers[name] for name in _HEADERS if name in answer.headers}
        return httpx.Response(answer.status, headers=kept, content=content)

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await super().close()

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        connector: aiohttp.BaseConnector
        if self._socket is not None:
            connector = aiohttp.UnixConnector(
                self._socket, limit=self._connections, keepalive_timeout=_KEEP_ALIVE
            )
        else:
            connector = aiohttp.TCPConnector(
                ssl=self._verified(), limit=self._connections, keepalive_timeout=_KEEP_ALIVE
            )
        return aiohttp.ClientSession(
            connector=connector,
            headers={"Authorization": f"Bearer {self._token}", "User-Agent": USER_AGENT},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _verified(self) -> ssl.SSLContext | bool:
        """Return what checks the server's certificate, which is the same as for other clients."""
        if not self._base.startswith("https:"):
            return True
        found = verify(Context(self.url, self._token, self._tls))
        return found if isinstance(found, ssl.SSLContext) else httpx.create_ssl_context(trust_env=False)


def _is_imported() -> bool:
    """Return whether aiohttp is there as a whole. Another thread may be in the middle of its import."""
    return hasattr(sys.modules.get("aiohttp"), "__all__")


# The headers of an answer that clients read. Its content has been decoded, so the others may be wrong.
_HEADERS: Final = ("content-type", "retry-after")
