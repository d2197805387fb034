"""Helpers of the routes, which read bodies, write JSON and streams, and detect disconnected clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import orjson
from rollyard_crds.waiting import first_of
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rollyard_engine.errors import BodyTooLarge, EngineError, MalformedRequest, TooManyRequests
from rollyard_engine.serving.responses import error_body

T = TypeVar("T")

MAX_BODY_BYTES = 32 << 20


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_response(error: EngineError) -> Response:
    """Return a response with vLLM's error object.

    If the queue is full, it also says when to retry.
    """
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, TooManyRequests) else None
    return json_response(error_body(error), error.status, headers)


async def read_json(request: Request) -> object:
    """Return the decoded body of a request.

    Raises:
        BodyTooLarge: The body is larger than ``MAX_BODY_BYTES``.
        MalformedRequest: The body is not JSON.
    """
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the request body is larger than {MAX_BODY_BYTES} bytes")
        pieces.append(piece)
    try:
        return orjson.loads(b"".join(pieces))
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"the request body is not JSON: {error}", param="body") from error


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the outcome of ``work``.

    If the client disconnects first, ``work`` is cancelled and the result is ``None``.
    """
    number, ended = await first_of(work, _disconnected(request))
    return ended.result() if number == 0 else None


async def _disconnected(request: Request) -> None:
    """Return once the client has disconnected.

    The body has been read already, so no other message can arrive.
    """
    while (await request.receive())["type"] != "http.disconnect":
        pass


def sse_response(chunks: AsyncIterator[object]) -> StreamingResponse:
    """Return server-sent events as vLLM sends them, with ``[DONE]`` at the end.

    An error becomes the last event before that.
    """

    async def events() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        except EngineError as error:
            yield b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
