"""URLs of servers that listen on a Unix socket: `http+unix://`, then the socket's path, percent-encoded."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote

SCHEME: Final = "http+unix://"
LONGEST_PATH: Final = 107
"""Bytes of a socket's path, by sockaddr_un."""


def socket_url(path: str) -> str:
    """The URL of the socket with this absolute path."""
    return SCHEME + quote(path, safe="")


def socket_of(url: str) -> str | None:
    """The socket's path; None: the URL is of another kind."""
    return unquote(url.removeprefix(SCHEME)) if url.startswith(SCHEME) else None


def base_of(url: str) -> str:
    """What requests over a connection to this server name as their base."""
    return "http://rollyard" if url.startswith(SCHEME) else url
