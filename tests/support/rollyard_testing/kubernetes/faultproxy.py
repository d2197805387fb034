"""A proxy before an API server that spoils some of what passes, by a seed. Nothing here imports Rollyard.

It speaks plain HTTP to its one client, on this machine's loopback, and TLS to the API server. The client's
credentials pass through, so it has its own account's rights.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from rollyard_testing.kubernetes.connections import LONGEST_SECONDS, connections_ended
from rollyard_testing.pace import patience

BODY_BYTES = 16 * 1024 * 1024
START_SECONDS = patience(10.0)
IN_A_ROW = 2
"""The number of equal refusals after which a call passes, so a client that tries several times gets through.
"""
HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length")
)
READ, LIST, PAGE, WATCH, WRITE = "read", "list", "page", "watch", "write"
"""The kinds of calls.

A page is a list that says how much it wants at once: its continuation may be forgotten.
"""
CALLS = frozenset((READ, LIST, PAGE, WATCH, WRITE))

ANSWERS: Mapping[str, tuple[frozenset[str], tuple[int, int]]] = {
    "conflict": (frozenset((WRITE,)), (2, 8)),
    "lost answer": (frozenset((WRITE,)), (4, 12)),
    "gone page": (frozenset((PAGE,)), (2, 6)),
    "gone watch": (frozenset((WATCH,)), (4, 10)),
    "throttled": (CALLS, (6, 20)),
    "internal error": (CALLS, (8, 25)),
    "unavailable": (CALLS, (8, 25)),
}
"""The answers in the place of the API server, the calls that get them, and how many calls lie between them.
"""
STREAMS: Mapping[str, int] = {"cut": 6, "gone event": 6, "error event": 1, "broken off": 1}
"""The ways in which a watch ends that was begun, and how often of their sum.

With `cut` the connection breaks in the middle of a line; with `broken off` the answer ends there as if it
were whole.
"""
LINES = (1, 12)
"""The least and the largest number of lines after which a watch ends."""
KINDS = frozenset((*ANSWERS, *STREAMS))


class Chance:
    """The dice, which decide what happens to which call, and count it."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self._left = {kind: self._rng.randint(*every) for kind, (_, every) in ANSWERS.items()}
        self._in_a_row: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()

    def answer(self, call: str, what: str) -> str:
        """Return what this call is answered with; empty for what the API server says.

        Args:
            call: One of CALLS.
            what: Tells it from other calls.
        """
        able = [kind for kind, (calls, _) in ANSWERS.items() if call in calls]
        for kind in able:
            self._left[kind] -= 1
        due = [kind for kind in able if self._left[kind] <= 0]
        if not due or self._in_a_row[what] >= IN_A_ROW:
            self._in_a_row.pop(what, None)
            return ""
        kind = min(due, key=self._left.__getitem__)
        self._left[kind] = self._rng.randint(*ANSWERS[kind][1])
        self._in_a_row[what] += 1
        self.injected[kind] += 1
        return kind

    def lines(self) -> int:
        """Return after how many lines a watch ends that begins now."""
        return self._rng.randint(*LINES)

    def fate(self) -> str:
        """Return how a watch ends now: each way once, then as often as STREAMS says."""
        ways = sorted(STREAMS.keys() - self.injected.keys())
        kinds, weights = (ways, None) if ways else (list(STREAMS), list(STREAMS.values()))
        (kind,) = self._rng.choices(kinds, weights)
        self.injected[kind] += 1
        return kind


def call_of(method: str, path: str, query: Mapping[str, str]) -> str:
    """Return the call's kind, one of CALLS."""
    if method != "GET":
        return WRITE
    if query.get("watch") in ("true", "1"):
        return WATCH
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:] if parts[0] == "apis" else []
    if len(parts) > 2 and parts[0] == "namespaces":
        parts = parts[2:]
    if len(parts) != 1:
        return READ
    return PAGE if "limit" in query else LIST


def status(code: int, reason: str, message: str) -> dict[str, Any]:
    """Return a refusal in Kubernetes' words."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


EXPIRED = status(410, "Expired", "too old resource version: 1 (2)")
REFUSALS: Mapping[str, dict[str, Any]] = {
    "conflict": status(
        409,
        "Conflict",
        "Operation cannot be fulfilled on it: the object has been modified; please apply your changes to "
        "the latest version and try again",
    ),
    "lost answer": status(500, "InternalError", "Internal error occurred: etcdserver: request timed out"),
    "gone page": EXPIRED,
    "gone watch": EXPIRED,
    "throttled": status(429, "TooManyRequests", "Too many requests, please try again later."),
    "internal error": status(500, "InternalError", "Internal error occurred: context deadline exceeded"),
    "unavailable": status(503, "ServiceUnavailable", "the server is currently unable to handle the request"),
}
EVENTS: Mapping[str, dict[str, Any]] = {
    "gone event": EXPIRED,
    "error event": status(500, "InternalError", "etcd event received with PrevKv=nil"),
}


@dataclass
class FaultProxy:
    """The proxy, in a thread of its own while it is entered."""

    server: str
    """The address of the API server."""
    ca_file: str
    seed: str
    url: str = ""
    """The proxy's own address, once entered."""
    calls: Counter[str] = field(default_factory=Counter)
    """How many calls came of each of CALLS."""

    def __post_init__(self) -> None:
        self.chance = Chance(self.seed)
        self._ready = threading.Event()
        self._trouble: BaseException | None = None
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._thread = threading.Thread(target=self._run, name="fault proxy", daemon=True)

    @property
    def injected(self) -> Counter[str]:
        """Return how often each kind of fault happened."""
        return self.chance.injected

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        assert self._ready.wait(START_SECONDS), "the proxy does not start"
        if self._trouble is not None:
            raise self._trouble
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stop is not None
        loop, stop = self._stop
        loop.call_soon_threadsafe(stop.set)
        self._thread.join(START_SECONDS + LONGEST_SECONDS)
        assert not self._thread.is_alive()
        if self._trouble is not None:
            raise self._trouble

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._trouble = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        stop = asyncio.Event()
        self._stop = asyncio.get_running_loop(), stop
        tls = ssl.create_default_context(cafile=self.ca_file)
        connector = aiohttp.TCPConnector(ssl=tls, limit=0)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as upstream:
            app = web.Application(client_max_size=BODY_BYTES)

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(request, upstream)

            app.router.add_route("*", "/{rest:.*}", handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                (address,) = runner.addresses
                self.url = f"http://127.0.0.1:{address[1]}"
                self._ready.set()
                await stop.wait()
            finally:
                await runner.cleanup()
        await connections_ended(self.server)

    async def _handle(self, request: web.Request, upstream: aiohttp.ClientSession) -> web.StreamResponse:
        call = call_of(request.method, request.path, request.query)
        self.calls[call] += 1
        body = await request.read()
        kind = self.chance.answer(call, f"{request.method} {request.path} {call}")
        if kind and kind != "lost answer":
            return refused(kind)
        headers = passed(request.headers)
        headers["Accept-Encoding"] = "identity"  # Lines are counted, and cut.
        try:
            async with upstream.request(
                request.method, self.server + request.path_qs, headers=headers, data=body or None,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0), allow_redirects=False,
            ) as answer:  # fmt: skip
                if call == WATCH and answer.status == 200:
                    return await self._stream(request, answer)
                content = await answer.read()
        except aiohttp.ClientError as error:
            # The API server's own absence is no fault of the proxy, and is reported as such.
            return web.json_response(status(502, "BadGateway", f"no answer: {error}"), status=502)
        if kind:
            return refused(kind)
        return web.Response(status=answer.status, headers=passed(answer.headers), body=content)

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        lines = self.chance.lines()
        told = web.StreamResponse(status=200, headers=passed(answer.headers))
        await told.prepare(request)
        with suppress(ConnectionError):  # The client left.
            try:
                async for line in lines_of(answer.content):
                    lines -= 1
                    if lines > 0:
                        await told.write(line)
                        continue
                    fate = self.chance.fate()
                    if fate in EVENTS:
                        event = {"type": "ERROR", "object": EVENTS[fate]}
                        await told.write(json.dumps(event).encode() + b"\n")
                    else:
                        await told.write(line[: len(line) // 2])
                    whole = fate != "cut"
                    break
                else:
                    whole = True
            except aiohttp.ClientError:
                whole = False  # This is the API server's own end.
            if whole:
                await told.write_eof()
            elif request.transport is not None:
                # What was written goes out; then the connection ends without the last chunk.
                request.transport.close()
        return told


def refused(kind: str) -> web.Response:
    """Return the answer of a fault."""
    document = REFUSALS[kind]
    headers = {"Retry-After": "1"} if kind == "throttled" else {}
    return web.json_response(document, status=document["code"], headers=headers)


def passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers that are passed to the other side."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP_BY_HOP)


async def lines_of(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines, with their ends."""
    buffer = b""
    async for piece in content.iter_any():
        *whole, buffer = (buffer + piece).split(b"\n")
        for line in whole:
            yield line + b"\n"
