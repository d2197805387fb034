"""The worker's end of a tunnel: one connection of a program in the sandbox to its loopback port."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

READY: Final = b"+"
"""What the worker sends when it listens, and what the server sends when a program uses the tunnel."""
_BUFFER: Final = 64 * 1024  # bytes


@dataclass(frozen=True, slots=True)
class SandboxTunnel:
    """A tunnel that waits for a program or is used by one."""

    port: int
    """The port on 127.0.0.1 inside the sandbox."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def used(self) -> bool:
        """Wait until a program has connected. The result is False if the server has closed the tunnel."""
        try:
            return await self.reader.readexactly(len(READY)) == READY
        except (asyncio.IncompleteReadError, OSError):
            return False

    def close(self) -> None:
        """Close the connection at once."""
        self.writer.transport.abort()


def tunnel_over(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, port: int) -> SandboxTunnel:
    """Return the tunnel over a connection whose last frame has been read.

    The server sends nothing before it has received `READY`, so no byte is lost between the protocols.
    """
    reader = asyncio.StreamReader(limit=_BUFFER, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    writer.write(READY)
    return SandboxTunnel(port, reader, writer)
