"""Both transports with servers that drip, flood, redirect, break or do not exist."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from rollyard_inference.errors import BackendMismatch, BackendUnavailable, NotListening
from rollyard_inference.transports.interface import Transport, base_url
from rollyard_inference.transports.with_aiohttp import AiohttpTransport
from rollyard_inference.transports.with_httpx import HttpxTransport
from rollyard_testing.pace import patience


@pytest.fixture(params=["httpx", "aiohttp"])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    if request.param == "aiohttp":
        async with AiohttpTransport(5.0) as made:
            yield made
    else:
        async with httpx.AsyncClient(trust_env=False) as client:
            yield HttpxTransport(client)


@asynccontextmanager
async def serving(*chunks: bytes, pause: float = 0.0, asked: list[bytes] | None = None) -> AsyncIterator[str]:
    """Yield the URL of a server that answers every request with these bytes, `pause` seconds apart, and
    closes.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        head = await reader.readuntil(b"\r\n\r\n")
        if asked is not None:
            asked.append(head)
        try:
            for chunk in chunks:
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(pause)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX-Name: value\r\n\r\n"


async def test_an_answer_is_read_whole(transport: Transport) -> None:
    asked: list[bytes] = []
    async with serving(HEAD % 6, b"abc", b"def", asked=asked) as url:
        reply = await transport.request("GET", url + "/path", seconds=patience(20.0))
    assert (reply.status, reply.headers["x-name"], reply.content) == (200, "value", b"abcdef")
    assert asked[0].startswith(b"GET /path ")
    assert b"accept-encoding: identity" in asked[0].lower()


async def test_an_answer_that_drips_ends_in_time(transport: Transport) -> None:
    async with serving(HEAD % 10_000, *[b"x"] * 1000, pause=0.02) as url:
        with pytest.raises(BackendUnavailable, match=r"GET .* no answer within 0\.5 s"):
            await transport.request("GET", url, seconds=0.5)


async def test_an_answer_is_bounded(transport: Transport) -> None:
    async with serving(HEAD % 300_000, *[b"x" * 100_000] * 3) as url:
        with pytest.raises(BackendMismatch, match="longer than 150000 bytes"):
            await transport.request("GET", url, seconds=patience(20.0), limit=150_000)


async def test_a_redirect_is_not_followed(transport: Transport) -> None:
    head = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    async with serving(head) as url:
        assert (await transport.request("GET", url, seconds=patience(20.0))).status == 302


@pytest.mark.parametrize("seconds", [20.0, None])
async def test_what_cannot_be_reached(
    transport: Transport, unused_tcp_port: int, seconds: float | None
) -> None:
    async with serving(HEAD % 500, b"abc") as url:
        with pytest.raises(BackendUnavailable, match="cannot be reached"):
            await transport.request("GET", url, seconds=seconds)
    with pytest.raises(NotListening, match="cannot be reached"):
        await transport.request("GET", f"http://127.0.0.1:{unused_tcp_port}", seconds=seconds)
    with pytest.raises(BackendUnavailable, match="cannot be reached"):
        await transport.request("GET", "http://[", seconds=seconds)


def test_a_base_url_however_it_is_written() -> None:
    for url in ("http://a", "http://a/", "http://a/v1", "http://a/v1/"):
        assert base_url(url) == "http://a"


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n"


async def test_events_are_given_on_as_they_come() -> None:
    """They may be cut anywhere between two reads, and lines may end in either way."""
    seen: list[bytes] = []
    chunks = (
        EVENTS,
        b'data: {"a',
        b'": 1}\n\nda',
        b"ta:2\r\n\r\n: ping\n\nevent: x\ndata: 3\n\n",
        b"data: [DONE]\n\n",
    )
    async with serving(*chunks, pause=0.02) as url, AiohttpTransport(5.0) as transport:
        reply = await transport.stream(url, {}, lambda data: seen.append(bytes(data)))
    assert seen == [b'{"a": 1}', b"2", b"3"]
    assert (reply.status, reply.content) == (200, b"")


async def test_what_is_no_stream_is_read_whole() -> None:
    seen: list[bytes] = []
    async with serving(HEAD % 6, b"abc", b"def") as url, AiohttpTransport(5.0) as transport:
        reply = await transport.stream(url, {}, lambda data: seen.append(bytes(data)))
    assert (reply.content, seen) == (b"abcdef", [])


async def test_a_stream_that_breaks_has_given_what_came() -> None:
    seen: list[bytes] = []
    head = EVENTS.replace(b"\r\n\r\n", b"\r\nContent-Length: 1000\r\n\r\n")
    async with serving(head, b"data: 1\n\n") as url, AiohttpTransport(5.0) as transport:
        with pytest.raises(BackendUnavailable, match="ClientPayloadError"):
            await transport.stream(url, {}, lambda data: seen.append(bytes(data)))
    assert seen == [b"1"]
