"""The gateway's HTTP server: paths, keys, bodies, streams, and clients that hang up or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import google.genai
import httpx
import openai
import pytest
from rollyard_pipeline.gateway import server as server_module
from rollyard_pipeline.gateway.calls import Delta, ModelCall, ModelReply, Opening
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.interface import PendingReply
from rollyard_pipeline.gateway.routes import find_route, wire_of
from rollyard_pipeline.gateway.server import MAX_BODY, GatewayServer
from rollyard_testing.gateway import KEY, MODEL, ScriptedGateway, ScriptedReply
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

LIMIT_SECONDS = patience(20.0)
CHAT = "/v1/chat/completions"
HELLO = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Held:
    """A reply whose pieces come when the test says so."""

    whole: ModelReply
    pieces: asyncio.Queue[Delta | BaseException | None] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    first: list[Delta | BaseException | None] = field(default_factory=list)

    @property
    def opening(self) -> Opening:
        return Opening(self.whole.id, self.whole.created, self.whole.model, self.whole.usage.prompt)

    async def started(self) -> None:
        self.first.append(await self.pieces.get())
        if isinstance(self.first[0], BaseException):
            raise self.first[0]

    async def deltas(self) -> AsyncIterator[Delta]:
        try:
            while (piece := self.first.pop() if self.first else await self.pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.ended.set()

    async def reply(self) -> ModelReply:
        return self.whole


@dataclass
class HeldGateway(ScriptedGateway):
    """A gateway with held replies."""

    held: list[Held] = field(default_factory=list)

    async def answer(self, call: ModelCall, protocol: str) -> PendingReply:
        self.calls.append(call)
        self.held.append(Held(ScriptedReply("hello").whole(len(self.calls))))
        return self.held[-1]


@asynccontextmanager
async def served(gateway: ScriptedGateway) -> AsyncIterator[str]:
    server = GatewayServer(gateway, "r-1")
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await server.aclose()


@pytest.fixture
async def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with served(gateway) as url, _client(url) as client:
        yield client


@pytest.fixture
async def held() -> HeldGateway:
    return HeldGateway()


@pytest.fixture
async def streams(held: HeldGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with served(held) as url, _client(url) as client:
        yield client


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=LIMIT_SECONDS, trust_env=False
    )


@asynccontextmanager
async def raw(client: httpx.AsyncClient) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a plain connection."""
    async with asyncio.timeout(LIMIT_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        try:
            yield reader, writer
        finally:
            writer.close()


def head(*fields: str, method: str = "POST", path: str = CHAT) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway", f"Authorization: Bearer {KEY}", *fields, "", ""]
    return "\r\n".join(lines).encode()


_GOOGLES = {"generateContent": "call", "streamGenerateContent": "call", "countTokens": "count"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "route"),
    [
        ("POST", "/v1/chat/completions", {}, ("chat", "call", {})),
        ("POST", "/chat/completions/", {}, ("chat", "call", {})),
        ("POST", "//v1//responses", {}, ("responses", "call", {})),
        ("POST", "/messages", {}, ("anthropic", "call", {})),
        ("POST", "/v1/messages/count_tokens", {}, ("anthropic", "count", {"method": "count_tokens"})),
        ("GET", "/v1/responses", {"upgrade": "websocket"}, ("responses", "upgrade", {})),
        ("GET", "/v1/models", {}, ("chat", "models", {})),
        ("GET", "/v1/models", {"anthropic-version": "2023-06-01"}, ("anthropic", "models", {})),
        ("GET", "/v1/models", {"x-goog-api-key": "k"}, ("google", "models", {})),
        ("GET", "/v1beta/models", {}, ("google", "models", {})),
        ("GET", "/models/Qwen/Qwen3", {}, ("chat", "models", {"model": "Qwen/Qwen3"})),
        *(
            ("POST", f"{version}/models/a/b:{name}", {}, ("google", action, {"model": "a/b", "method": name}))
            for version in ("/v1beta", "/v1", "")
            for name, action in _GOOGLES.items()
        ),
    ],
)  # fmt: skip
def test_the_paths_of_clients(method: str, path: str, headers: dict[str, str], route: object) -> None:
    found = find_route(method, path, headers)
    assert (found.wire, found.action, dict(found.path)) == route


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"), ("POST", "/v1/models"), ("POST", "/v2/responses"),
        ("GET", "/v1/responses"), ("POST", "/v1/completions"), ("POST", "/v1/../v1/responses"),
        ("POST", "/v1beta/models/m:tuneModel"), ("DELETE", "/v1/models/m"), ("CONNECT", ""), ("POST", "/"),
        ("GET", "/etc/passwd"), ("PUT", "/messages"),
    ],
)  # fmt: skip
def test_there_is_nothing_else(method: str, path: str) -> None:
    with pytest.raises(CallError) as caught:
        find_route(method, path, {})
    assert caught.value.problem == "not_found"


def test_an_unknown_path_is_answered_with_the_known_ones() -> None:
    with pytest.raises(CallError) as caught:
        find_route("POST", "/v1/completions", {})
    first, known = caught.value.message.split("; there is ")
    assert first == "there is nothing at POST /v1/completions"
    paths = [word.strip(",") for word in known.split() if word.startswith("/")]
    assert len(paths) == 6
    for path in paths[:-1]:
        assert find_route("POST", path, {}).action in ("call", "count")
    assert find_route("GET", paths[-1], {}).action == "models"


def test_the_form_of_an_error_is_that_of_the_client() -> None:
    assert wire_of("/v1beta/x", {}) == wire_of("/x", {"x-goog-api-key": ""}) == "google"
    assert wire_of("/v1/messages/x", {}) == wire_of("/x", {"x-api-key": ""}) == "anthropic"
    assert wire_of("/v1/responses", {}) == "responses"
    assert wire_of("/x", {}) == "chat"


async def test_the_sdk_calls(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.say(ScriptedReply("one"), ScriptedReply("two, in pieces"))
    sdk = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key=KEY, max_retries=0)
    async with sdk:
        listed = [model.id async for model in sdk.models.list()]
        assert listed == [MODEL]
        answer = await sdk.chat.completions.create(**HELLO)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == "one"
        assert answer._request_id.startswith("req_")
        stream = await sdk.chat.completions.create(stream=True, **HELLO)  # type: ignore[call-overload]
        text = "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])
        assert text == "two, in pieces"
        with pytest.raises(openai.AuthenticationError, match="key of this rollout"):
            await sdk.with_options(api_key="another").models.list()
    assert [call.stream for call in gateway.calls] == [False, True]


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
async def test_the_sdks_of_other_providers_call(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.say(*(ScriptedReply(f"reply {number}, in pieces") for number in range(4)))
    url = str(client.base_url)
    async with anthropic.AsyncAnthropic(base_url=url, auth_token=KEY, max_retries=0) as sdk:
        asked: dict[str, Any] = {"model": "any", "messages": HELLO["messages"]}
        message = await sdk.messages.create(max_tokens=9, **asked)
        assert message.content[0].to_dict()["text"] == "reply 0, in pieces"
        async with sdk.messages.stream(max_tokens=9, **asked) as stream:
            assert await stream.get_final_text() == "reply 1, in pieces"
        assert (await sdk.messages.count_tokens(**asked)).input_tokens == len("hello")
        assert [model.id async for model in await sdk.models.list()] == [MODEL]
        with pytest.raises(anthropic.AuthenticationError, match="key of this rollout"):
            await sdk.with_options(auth_token="another").messages.create(max_tokens=9, **asked)
    options = google.genai.types.HttpOptions(base_url=url)
    with google.genai.Client(api_key=KEY, http_options=options) as whole:
        models = whole.aio.models
        response = await models.generate_content(model="any", contents="hello")
        assert response.text == "reply 2, in pieces"
        pieces = await models.generate_content_stream(model="any", contents="hello")
        assert "".join([piece.text or "" async for piece in pieces]) == "reply 3, in pieces"
        assert (await models.count_tokens(model="any", contents="hello")).total_tokens == len("hello")
        assert [model.name async for model in await models.list()] == [f"models/{MODEL}"]
        await whole.aio.aclose()


async def test_something_is_there_and_nothing_is_said_of_it(client: httpx.AsyncClient) -> None:
    for method in ("GET", "HEAD"):
        answer = await client.request(method, "/", headers={"authorization": ""})
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["server"] == "rollyard"


@pytest.mark.parametrize(
    ("headers", "query", "status"),
    [
        ({"authorization": f"Bearer {KEY}"}, "", 200),
        ({"x-api-key": KEY}, "", 200),
        ({"x-goog-api-key": KEY}, "", 200),
        ({}, f"?key={KEY}", 200),
        ({"authorization": f"bearer  {KEY}"}, "", 200),
        ({"authorization": "Bearer other", "x-api-key": KEY}, "", 200),
        ({}, "", 401),
        ({"authorization": f"Bearer {KEY}x"}, "", 401),
        ({"authorization": f"Basic {KEY}"}, "", 401),
        ({"authorization": "Bearer \xff\udcff".encode("utf-8", "surrogatepass").decode("latin-1")}, "", 401),
        ({"x-api-key": KEY[:-1]}, "?key=", 401),
    ],
)  # fmt: skip
async def test_keys(client: httpx.AsyncClient, headers: dict[str, str], query: str, status: int) -> None:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    client.headers.pop("authorization")
    assert (await client.get(f"/v1/models{query}", headers=encoded)).status_code == status


async def test_an_error_has_one_id(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/messages", json={})
    assert answer.status_code == 400
    assert answer.headers["request-id"] == answer.json()["request_id"]


async def test_a_websocket_is_refused_with_the_status_that_codex_knows(client: httpx.AsyncClient) -> None:
    async with raw(client) as (reader, writer):
        fields = (
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: eA==",
        )
        writer.write(head(*fields, method="GET", path="/v1/responses"))
        assert (await reader.read()).startswith(b"HTTP/1.1 426 ")


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"{", {}, 400, "the body is not JSON"),
        (b"[]", {}, 400, "the body is not a JSON object"),
        (b"", {}, 400, "the body is not JSON"),
        (b'{"model": "\xff"}', {}, 400, "the body is not JSON"),
        (b"{" + b'"a":[' * 3000, {}, 400, "the body is not JSON"),
        (b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}", {}, 400, "the body is not JSON"),
        (b"{}", {"content-encoding": "gzip"}, 400, "Content-Encoding 'gzip' is not taken"),
        (b'{"a":[' + b"[]," * 600_000 + b"1]}", {}, 413, "too many values"),
        (b'{"a":[' + b"1," * 1_600_000 + b"1]}", {}, 413, "too many values"),
        (b" " * (MAX_BODY + 1), {}, 413, f"the body has more than {MAX_BODY} bytes"),
    ],
    ids=range(10),
)  # fmt: skip
async def test_bodies_that_are_refused(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    body: bytes,
    headers: dict[str, str],
    status: int,
    words: str,
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield body

    for content in (body, chunks()):
        answer = await client.post(CHAT, content=content, headers=headers)
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]["message"]
    assert gateway.calls == []
    gateway.say(ScriptedReply("still there"))
    assert (await client.post(CHAT, json=HELLO)).status_code == 200


async def test_a_large_body_is_taken_and_its_memory_given_back(
    client: httpx.AsyncClient, gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "word, [word] and several other words " * 200_000
    for _ in range(5):
        gateway.say(ScriptedReply("read"))
        answer = await client.post(CHAT, json={**HELLO, "messages": [{"role": "user", "content": text}]})
        assert answer.status_code == 200, answer.text
        assert gateway.calls.pop().messages[0].text == text
    monkeypatch.setattr(server_module, "_MAX_HELD", 1000)
    answer = await client.post(CHAT, json={**HELLO, "user": "x" * 2000})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    gateway.say(ScriptedReply("read"))
    assert (await client.post(CHAT, json=HELLO)).status_code == 200


async def test_a_client_that_asks_first_is_told_to_send_its_body(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.say(ScriptedReply("yes"))
    body = json.dumps(HELLO).encode()
    async with raw(client) as (reader, writer):
        writer.write(head("Expect: 100-continue", f"Content-Length: {len(body)}"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert b" 200 OK" in await reader.readline()
        writer.write(head("Expect: 100-continue", f"Content-Length: {MAX_BODY + 1}"))
        assert b"HTTP/1.1 413 " in await reader.read()


@asynccontextmanager
async def streaming(
    client: httpx.AsyncClient, held: HeldGateway
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Held]]:
    """Yield a connection on which a stream has been asked for, and its reply."""
    body = json.dumps({**HELLO, "stream": True}).encode()
    async with raw(client) as (reader, writer):
        before = len(held.held)
        writer.write(head(f"Content-Length: {len(body)}") + body)
        await eventually(lambda: len(held.held) > before)
        yield reader, writer, held.held[-1]


async def test_each_piece_is_sent_when_it_comes(streams: httpx.AsyncClient, held: HeldGateway) -> None:
    async with streaming(streams, held) as (reader, _, reply):
        for word in ("first", "second"):
            reply.pieces.put_nowait(Delta(text=word))
            # Nothing else comes before the next piece is there.
            assert word.encode() in await reader.readuntil(word.encode())
            await reader.readuntil(b"\n\n\r\n")
        reply.pieces.put_nowait(None)
        assert (await reader.readuntil(b"\r\n0\r\n\r\n")).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_failure_before_the_first_piece_has_a_status_of_its_own(
    streams: httpx.AsyncClient, held: HeldGateway
) -> None:
    call = asyncio.create_task(streams.post(CHAT, json={**HELLO, "stream": True}))
    await eventually(lambda: held.held)
    held.held[0].pieces.put_nowait(CallError("unavailable", "no backend answers", retry_after=2.5))
    answer = await call
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.json()["error"]["message"] == "no backend answers"


async def test_a_failure_in_the_stream_is_an_event(
    streams: httpx.AsyncClient, held: HeldGateway, caplog: pytest.LogCaptureFixture
) -> None:
    for failure, words in (
        (CallError("ended", "the harness has ended"), b"the harness has ended"),
        (ValueError("a secret of the worker"), b"the gateway has failed"),
    ):
        async with streaming(streams, held) as (reader, _, reply):
            reply.pieces.put_nowait(Delta(text="some"))
            reply.pieces.put_nowait(failure)
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert b" 200 OK" in answer
            assert words in answer
            assert b"secret" not in answer
    assert "gateway of r-1: ValueError at " in caplog.text
    assert "secret" not in caplog.text


async def test_a_silent_stream_shows_that_it_is_alive(
    streams: httpx.AsyncClient, held: HeldGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_HEADERS_SECONDS", 0.01)
    monkeypatch.setattr(server_module, "_BEAT_SECONDS", 0.01)
    async with streaming(streams, held) as (reader, _, reply):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        for _ in range(3):
            assert await reader.readuntil(b"\r\n\n\r\n") == b"1\r\n\n\r\n"
        reply.pieces.put_nowait(CallError("unavailable", "no backend answers"))
        assert b"no backend answers" in await reader.readuntil(b"\r\n0\r\n\r\n")


async def test_a_silent_response_sends_what_resets_the_timer_of_codex(
    streams: httpx.AsyncClient, held: HeldGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK adds up the other events as if there were none of these."""
    monkeypatch.setattr(server_module, "_HEADERS_SECONDS", 0.01)
    monkeypatch.setattr(server_module, "_BEAT_SECONDS", 0.01)
    sdk = openai.AsyncOpenAI(base_url=f"{streams.base_url}/v1", api_key=KEY, max_retries=0)

    async def feed() -> None:
        await eventually(lambda: bool(held.held))
        held.held[0].pieces.put_nowait(Delta(thought="Well"))

    async with asyncio.timeout(LIMIT_SECONDS), sdk, asyncio.TaskGroup() as group:
        group.create_task(feed())
        seen = 0
        async with sdk.responses.stream(model="m", input="Hi") as stream:
            async for event in stream:
                seen += event.type == "response.in_progress"
                if seen == 3:
                    seen = 4
                    for piece in (Delta(text="hel"), Delta(text="lo"), None):
                        held.held[0].pieces.put_nowait(piece)
            final = await stream.get_final_response()
    assert seen >= 4
    assert (final.status, final.output_text) == ("completed", "hello")
    assert [item.type for item in final.output] == ["reasoning", "message"]


async def test_a_client_that_hangs_up_ends_only_the_writing(
    streams: httpx.AsyncClient, held: HeldGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with streaming(streams, held) as (reader, _, reply):
        reply.pieces.put_nowait(Delta(text="some"))
        await reader.readuntil(b"some")
    for _ in range(3):
        reply.pieces.put_nowait(Delta(text="more"))
    await reply.ended.wait()
    async with streaming(streams, held) as (reader, _, _):
        held.held[-1].pieces.put_nowait(Delta(text="other"))
        await reader.readuntil(b"other")
    assert "ERROR" not in caplog.text


async def test_a_client_that_does_not_read_is_cut(
    streams: httpx.AsyncClient, held: HeldGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.1)
    async with streaming(streams, held) as (reader, writer, reply):
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        for _ in range(400):
            reply.pieces.put_nowait(Delta(text="x" * 50_000))
        await reply.ended.wait()
        assert reply.pieces.qsize() > 0, "what nobody reads is not collected"
        transport.resume_reading()
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 20):
                received = piece
        assert not received.endswith(b"0\r\n\r\n")


async def test_what_nobody_expected_is_said_without_its_words(
    client: httpx.AsyncClient, gateway: ScriptedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.script.clear()  # The gateway raises IndexError.
    answer = await client.post(CHAT, json=HELLO)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the gateway has failed"
    assert "Traceback" not in answer.text
    (line,) = caplog.messages
    assert line.startswith("gateway of r-1: IndexError at ")
    assert "an empty deque" not in line, "words of an exception may be the policy's"


async def test_an_end_of_the_gateway_ends_calls_without_noise(
    held: HeldGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(held) as url, _client(url) as client:
        calls = [asyncio.create_task(client.post(CHAT, json={**HELLO, "stream": True})) for _ in range(3)]
        await eventually(lambda: len(held.held) == 3)
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, httpx.HTTPError)
    assert caplog.text == ""


async def test_connections_without_a_request_are_cut(
    client: httpx.AsyncClient, gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.1)
    for begun in (b"", b"POST", head("X: y")[:-2]):
        async with raw(client) as (reader, writer):
            writer.write(begun)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
    async with raw(client) as (reader, writer):
        writer.write(head(method="GET", path="/v1/models"))
        assert b" 200 OK" in await reader.readline()
        writer.write(head("X: y")[:-2])
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readuntil(b"HTTP/1.1")


async def test_a_body_that_does_not_come_is_not_waited_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "BODY_SECONDS", 0.1)
    monkeypatch.setattr(server_module, "_LINGER_SECONDS", 0.1)
    async with raw(client) as (reader, writer):
        writer.write(head("Content-Length: 1000") + b"{")
        answer = await reader.read()
        assert b"HTTP/1.1 400 " in answer
        assert b"the body did not come within" in answer
