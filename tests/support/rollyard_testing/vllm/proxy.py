"""A recording HTTP proxy: what a client and a server said to each other, byte for byte.

    python proxy.py --target http://127.0.0.1:8000 --port 8100 --record exchanges.ndjson

Nothing of Rollyard is imported here: what is recorded is judged against what Rollyard says.
One line of the record is one exchange, written when it ends:

    {"number", "began", "ended", "method", "path", "request", "status", "response", "end"}

`request` and `response` are the bodies as text. `end` is `complete` where the client got the
whole answer, `client gone` where it left before, `server gone` where the server closed or
refused the connection; the proxy then closes the client's connection likewise, without an answer.

While a test holds requests back (`Recorder.holding`), the proxy keeps those that sample a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from rollyard_testing.pace import patience

_NOT_FORWARDED = frozenset(
    {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "upgrade", "te", "trailer"}
)
_START_SECONDS = patience(30.0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer."""

    number: int
    """The number, which rises in the order of the requests."""
    began: float
    ended: float
    """The time of the end, in seconds since the epoch."""
    method: str
    path: str
    request: str
    status: int
    """The status of the answer, or 0 where none came."""
    response: str
    end: str


class _Proxy:
    def __init__(self, target: str, record: Path) -> None:
        self._target = target
        self._record = record.open("a", buffering=1, encoding="utf-8", errors="surrogateescape")
        self._gate, self._reached = _gate_of(record)
        self._passed = 0
        self._numbers = itertools.count(1)
        self._client: aiohttp.ClientSession | None = None

    async def client(self, _app: web.Application) -> Any:
        """Open the connections to the server, and close them with the application."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as session:
            self._client = session
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        number, began = next(self._numbers), time.time()
        sent = await request.read()
        got = bytearray()
        status, end = 0, "server gone"
        answer: web.StreamResponse | None = None
        try:
            if _samples(request.path, sent):
                await self._wait_at_gate()
            assert self._client is not None
            headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_FORWARDED}
            async with self._client.request(
                request.method, self._target + request.path_qs, data=sent, headers=headers
            ) as upstream:
                status = upstream.status
                kept = {k: v for k, v in upstream.headers.items() if k.lower() not in _NOT_FORWARDED}
                answer = web.StreamResponse(status=status, headers=kept)
                if upstream.content_length is not None:
                    answer.content_length = upstream.content_length
                await answer.prepare(request)
                async for chunk in upstream.content.iter_any():
                    got += chunk
                    await answer.write(chunk)
            await answer.write_eof()
            end = "complete"
            return answer
        except asyncio.CancelledError:
            end = "client gone"
            raise
        # It is the client's connection, because aiohttp wraps errors of the server's.
        except ConnectionResetError:
            end = "client gone"
            return _closed(request, answer)
        except (aiohttp.ClientError, OSError):
            return _closed(request, answer)
        finally:
            exchange = {
                "number": number, "began": began, "ended": time.time(), "method": request.method,
                "path": request.path_qs, "request": sent.decode(errors="surrogateescape"),
                "status": status, "response": bytes(got).decode(errors="surrogateescape"), "end": end,
            }  # fmt: skip
            self._record.write(json.dumps(exchange) + "\n")

    async def _wait_at_gate(self) -> None:
        """Wait while the test lets no more turns pass."""
        while self._gate.exists():
            if self._passed < int(self._gate.read_text()):
                self._passed += 1
                return
            self._reached.touch()
            await asyncio.sleep(0.02)
        self._passed = 0


def _gate_of(record: Path) -> tuple[Path, Path]:
    """Return the file that closes a proxy's gate, and the one that says that a request waits there."""
    return record.with_suffix(".gate"), record.with_suffix(".reached")


def _samples(path: str, sent: bytes) -> bool:
    """Return whether a request samples a turn. Those for one token are probes of the server."""
    if not path.startswith("/inference/v1/generate"):
        return False
    try:
        return int(json.loads(sent)["sampling_params"]["max_tokens"]) > 1
    except (ValueError, LookupError, TypeError):
        return False


def _closed(request: web.Request, answer: web.StreamResponse | None) -> web.StreamResponse:
    """Close the client's connection in the middle, as a server that dies does."""
    if request.transport is not None:
        request.transport.abort()
    return answer or web.Response(status=502)


async def _serve(target: str, port: int, port_file: Path, record: Path) -> None:
    proxy = _Proxy(target.rstrip("/"), record)
    app = web.Application(client_max_size=256 << 20)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    app.cleanup_ctx.append(proxy.client)
    # With cancellation the server learns at once when its client leaves.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    address = runner.addresses[0]
    await asyncio.to_thread(port_file.write_text, str(address[1]))
    await asyncio.Event().wait()


class Recorder:
    """A running proxy: its address, and what it has recorded."""

    def __init__(self, url: str, record: Path) -> None:
        self.url = url
        self._record = record

    def exchanges(self) -> list[Exchange]:
        """Return all exchanges that have ended so far, in the order of the requests."""
        lines = self._record.read_text(encoding="utf-8").splitlines()
        return sorted((Exchange(**json.loads(line)) for line in lines), key=lambda one: one.number)

    @contextmanager
    def holding(self, turns: int) -> Iterator[Path]:
        """Let so many further turns be sampled, and hold the requests of others back until the block ends.

        Yields:
            A path at which a file appears when a request waits.
        """
        gate, reached = _gate_of(self._record)
        reached.unlink(missing_ok=True)
        new = gate.with_suffix(".new")
        new.write_text(str(turns))
        os.replace(new, gate)  # The proxy never reads half of it.
        try:
            yield reached
        finally:
            gate.unlink()


@contextmanager
def recording(target: str, folder: Path, name: str) -> Iterator[Recorder]:
    """Run a proxy of `target` in a process of its own while the block runs."""
    port_file, record, log = (folder / f"{name}.{kind}" for kind in ("port", "ndjson", "log"))
    command = [sys.executable, __file__, "--target", target, "--port-file", str(port_file)]
    with log.open("ab") as out:
        process = subprocess.Popen([*command, "--record", str(record)], stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not (port_file.exists() and port_file.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the proxy did not start: {log.read_text()}")
            time.sleep(0.05)
        yield Recorder(f"http://127.0.0.1:{port_file.read_text()}", record)
    finally:
        process.terminate()
        try:
            process.wait(patience(10))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(patience(10))


def main() -> None:
    parser = argparse.ArgumentParser(description="Record what passes between a client and an HTTP server.")
    parser.add_argument("--target", required=True, help="base URL of the server")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path, required=True, help="the port is written here")
    parser.add_argument("--record", type=Path, required=True, help="file that exchanges are appended to")
    options = parser.parse_args()
    try:
        asyncio.run(_serve(options.target, options.port, options.port_file, options.record))
    except KeyboardInterrupt:
        os._exit(0)


if __name__ == "__main__":
    main()
