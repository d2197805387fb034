"""URLs of servers that listen on a Unix socket.

Such a URL is `http+unix://`, followed by the percent-encoded path of the socket.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote

SCHEME: Final = "http+unix://"
LONGEST_PATH: Final = 107
"""The largest length of a socket's path in bytes, as set by sockaddr_un."""


def socket_url(path: str) -> str:
    """Return the URL of the socket with this absolute path."""
    return SCHEME + quote(path, safe="")


def socket_of(url: str) -> str | None:
    """Return the path of the socket, or None if it is another kind of URL."""
    return unquote(url.removeprefix(SCHEME)) if url.startswith(SCHEME) else None


def base_of(url: str) -> str:
    """Return the base URL of requests over a connection to this server."""
    return "http://rollyard" if url.startswith(SCHEME) else url
