"""A relay of bytes in front of a server, which times the server.

`python -m rollyard_bench.relay --target http://127.0.0.1:8000 --port-file FILE --log FILE`

It reads no HTTP headers. Over a connection that is not pipelined, request and answer take turns, so the last
byte sent before an answer and the last byte of that answer are known without them. The log has a line for
each exchange, `{"seed": the request's, "seconds": from the request's last byte to the answer's last byte}`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

import uvloop
from rollyard_process.waiting import first_of

from rollyard_bench.processes import write_port

CHUNK = 1 << 18
_SEED = re.compile(rb'"seed":\s*(\d+)')


@dataclass(slots=True)
class Exchange:
    """One request and its answer."""

    request: bytearray = field(default_factory=bytearray)
    sent: float = 0.0
    received: float = 0.0
    answered: bool = False

    def line(self) -> str:
        """Return the exchange's line of the log."""
        seed = _SEED.search(self.request)
        return json.dumps({"seed": int(seed[1]) if seed else None, "seconds": self.received - self.sent})


class Relay:
    """A server that passes bytes in both directions.

    Args:
        target: The host and port of the server.
        log: The file that gets a line for each exchange.
    """

    def __init__(self, target: tuple[str, int], log: TextIO) -> None:
        self._target = target
        self._log = log

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side closes it."""
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        exchange = Exchange()

        async def upwards() -> None:
            nonlocal exchange
            while data := await reader.read(CHUNK):
                if exchange.answered:
                    self._note(exchange)
                    exchange = Exchange()
                exchange.request += data
                up_writer.write(data)
                await up_writer.drain()
                exchange.sent = time.perf_counter()

        async def downwards() -> None:
            while data := await up_reader.read(CHUNK):
                exchange.received, exchange.answered = time.perf_counter(), True
                writer.write(data)
                await writer.drain()

        try:
            # A connection that is reset ends the exchange like one that is closed.
            await first_of(upwards(), downwards())
        finally:
            if exchange.answered:
                self._note(exchange)
            for end in (up_writer, writer):
                end.close()

    def _note(self, exchange: Exchange) -> None:
        self._log.write(exchange.line() + "\n")


async def _serve(options: argparse.Namespace) -> None:
    target = urlsplit(options.target)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log = options.log.open("w", buffering=1)
    relay = Relay((target.hostname or "127.0.0.1", target.port or 80), log)
    server = await asyncio.start_server(relay.connection, "127.0.0.1", 0)
    write_port(options.port_file, server.sockets[0].getsockname()[1])
    await stop.wait()
    server.close()


def main() -> None:
    """Serve on a free port of the loopback interface until a signal."""
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--target", required=True, help="the server's URL")
    parse.add_argument("--port-file", type=Path, required=True)
    parse.add_argument("--log", type=Path, required=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(parse.parse_args()))


if __name__ == "__main__":
    main()
