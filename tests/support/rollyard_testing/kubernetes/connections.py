"""The connections of asyncio clients to a server, which last a little longer than the clients."""

from __future__ import annotations

import asyncio
import gc
from typing import Final
from urllib.parse import urlsplit

from rollyard_testing.pace import patience

LONGEST_SECONDS: Final = patience(40.0)
"""asyncio gives the end of a TLS connection 30 seconds."""


async def connections_ended(url: str) -> None:
    """Wait until no event loop of this process has a connection to the server at `url`.

    A TLS connection that was in use ends when the server has closed it, too, and aiohttp's `close` does not
    wait for that. If the event loop ends earlier, the connection stays open, and the garbage collector
    complains about it at some later time, in a test that has nothing to do with it.

    Args:
        url: The server's URL, with an IP address and a port.
    """
    address = urlsplit(url)
    async with asyncio.timeout(LONGEST_SECONDS):
        while _connected((address.hostname, address.port)):  # noqa: ASYNC110 - asyncio announces no end
            await asyncio.sleep(0.05)


def _connected(server: tuple[str | None, int | None]) -> bool:
    for each in gc.get_objects():
        if not issubclass(type(each), asyncio.Transport) or each.get_extra_info("peername") != server:
            continue
        socket = each.get_extra_info("socket")
        if socket is not None and socket.fileno() != -1:
            return True
    return False
