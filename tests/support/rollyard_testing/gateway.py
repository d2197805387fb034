"""A rollout's gateway whose replies a test writes, and the protocols in front of it over HTTP.

The server does what the product's own does for one rollout, without its limits, so that the tests of a
protocol need no sandbox and no model.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from aiohttp import web
from rollyard_pipeline.gateway.calls import Delta, Finish, ModelCall, ModelReply, Opening, ReplyCall, Usage
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.interface import PendingReply
from rollyard_pipeline.gateway.protocols.base import ProviderProtocol

KEY = "key-of-this-rollout"
MODEL = "tiny-model"
CREATED = 1_764_000_000

Models = Callable[["ScriptedGateway", Mapping[str, str]], dict[str, Any]]
"""What answers a list of models: the gateway and what the path says, to the body of the answer."""


@dataclass
class ScriptedReply:
    """One answer of the script.

    `refused` is raised instead of any answer. `broken` is raised after all pieces.
    """

    text: str = ""
    thought: str = ""
    calls: tuple[ReplyCall, ...] = ()
    finish: Finish | None = None
    piece: int = 5
    """The number of characters of a piece of the stream."""
    refused: CallError | None = None
    broken: CallError | None = None

    def whole(self, number: int) -> ModelReply:
        """Return the reply, whose id is made of a number."""
        return ModelReply(
            id=f"{number:032x}",
            created=CREATED,
            model=MODEL,
            text=self.text,
            thought=self.thought,
            calls=self.calls,
            finish=self.finish or ("tool_calls" if self.calls else "stop"),
            usage=Usage(prompt=100 + number, sampled=20, thought=7 if self.thought else 0),
        )

    def pieces(self) -> Iterator[Delta]:
        """Yield the pieces of the stream."""
        for start in range(0, len(self.thought), self.piece):
            yield Delta(thought=self.thought[start : start + self.piece])
        for start in range(0, len(self.text), self.piece):
            yield Delta(text=self.text[start : start + self.piece])
        for call in self.calls:
            yield Delta(call=call)


MALFORMED = ReplyCall("call_9", "bash", '{"command": ls', "malformed tool call: not JSON")
CALLS = (ReplyCall("call_1", "bash", '{"command":  "ls\\u00e9"}'), ReplyCall("call_2", "read", "{}"))
REPLIES = {
    "text": ScriptedReply('Hello, wörld.\nHow "are" you? 🙂'),
    "thought": ScriptedReply("Four.", thought="Two and two\nare four."),
    "calls": ScriptedReply(calls=CALLS),
    "all": ScriptedReply("I look.", thought="Where?", calls=CALLS),
    "malformed": ScriptedReply("Look:", calls=(MALFORMED,)),
    "cut": ScriptedReply("One, two, th", finish="length"),
    "cut-thought": ScriptedReply(thought="One, two, th", finish="length"),
    "empty": ScriptedReply(),
}
"""Replies of every kind."""


@dataclass
class _Pending:
    """A reply of the script as the gateway's interface has it."""

    script: ScriptedReply
    whole: ModelReply

    @property
    def opening(self) -> Opening:
        """What is known of it from the beginning."""
        whole = self.whole
        return Opening(whole.id, whole.created, whole.model, whole.usage.prompt)

    async def started(self) -> None:
        """Raise the error of a reply that breaks before its first piece."""
        if self.script.broken is not None and not any(self.script.pieces()):
            raise self.script.broken

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the pieces."""
        for piece in self.script.pieces():
            yield piece
        if self.script.broken is not None:
            raise self.script.broken

    async def reply(self) -> ModelReply:
        """Return the whole reply."""
        if self.script.broken is not None:
            raise self.script.broken
        return self.whole


@dataclass
class ScriptedGateway:
    """A `RolloutGateway` that answers the calls in turn from a script, and keeps them."""

    script: deque[ScriptedReply] = field(default_factory=deque)
    calls: list[ModelCall] = field(default_factory=list)
    key: str = KEY
    model: str = MODEL
    context: int = 4096
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def say(self, *replies: ScriptedReply) -> None:
        """Add replies to the script."""
        self.script.extend(replies)

    async def answer(self, call: ModelCall, protocol: str) -> PendingReply:
        """Return the next reply of the script."""
        self.calls.append(call)
        script = self.script.popleft()
        if script.refused is not None:
            raise script.refused
        return _Pending(script, script.whole(next(self.numbers)))

    async def count_tokens(self, call: ModelCall) -> int:
        """Return the number of characters of all texts, in place of tokens."""
        self.calls.append(call)
        return sum(len(message.text) for message in call.messages)


@asynccontextmanager
async def serving(
    gateway: ScriptedGateway,
    protocols: Mapping[str, ProviderProtocol],
    models: Mapping[str, Models] | None = None,
    more: Mapping[str, Callable[[web.Request], Any]] | None = None,
) -> AsyncIterator[str]:
    """Serve protocols at paths such as `/v1/messages` until the block ends, and yield the server's URL.

    Args:
        models: What answers GET at which paths.
        more: Handlers of further POST calls, such as one that counts tokens.
    """

    async def call(request: web.Request, protocol: ProviderProtocol) -> web.StreamResponse:
        path = {**request.match_info, "query": request.query_string}
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        events = None
        try:
            headers = {name.lower(): value for name, value in request.headers.items()}
            asked = protocol.read(orjson.loads(await request.read()), headers, path)
            pending = await gateway.answer(asked, protocol.name)
            if not asked.stream:
                return web.json_response(protocol.answer(asked, await pending.reply()))
            async for delta in pending.deltas():
                if events is None:
                    await response.prepare(request)
                    events = protocol.events(asked, pending.opening)
                    await response.write(events.begin())
                await response.write(events.delta(delta))
            whole = await pending.reply()
            if events is None:
                await response.prepare(request)
                events = protocol.events(asked, pending.opening)
                await response.write(events.begin())
            await response.write(events.end(whole))
        except CallError as error:
            if events is None:
                return web.json_response(protocol.error(error), status=error.status)
            await response.write(events.fail(error))
        await response.write_eof()
        return response

    def listing(function: Models) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            try:
                return web.json_response(function(gateway, request.match_info))
            except CallError as error:
                protocol = next(iter(protocols.values()))
                return web.json_response(protocol.error(error), status=error.status)

        return handle

    app = web.Application(client_max_size=1 << 28)
    for path, protocol in protocols.items():
        app.router.add_post(path, partial(call, protocol=protocol))
    for path, function in (models or {}).items():
        app.router.add_get(path, listing(function))
    for path, handler in (more or {}).items():
        app.router.add_post(path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def unknown_fields(value: object, path: str = "") -> Iterator[str]:
    """Yield the paths of fields that a parsed model of an SDK, or a model within it, doesn't declare."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from unknown_fields(one, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for one in value:
            yield from unknown_fields(one, f"{path}[]")
    elif hasattr(value, "model_extra"):
        for name in value.model_extra or ():
            yield f"{path}.{name}".lstrip(".")
        for name in type(value).model_fields:  # type: ignore[attr-defined]
            yield from unknown_fields(getattr(value, name), f"{path}.{name}")
