"""The HTTP routes of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import orjson
from rollyard_process.version import installed_version
from rollyard_process.waiting import first_of
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rollyard_engine.errors import EngineError, InvalidRequest
from rollyard_engine.generation.scheduler import PauseMode
from rollyard_engine.serving import protocol, responses
from rollyard_engine.serving.service import (
    EngineService,
    QueuedRequest,
    exposition,
    new_request_id,
    now,
)
from rollyard_engine.tokens import Detokenizer

Handler = Callable[[EngineService, Request], Awaitable[Response]]

T = TypeVar("T")

MAX_BODY_BYTES: Final = 32 << 20
LOGPROBS_MODE: Final = "processed_logprobs"


def create_app(service: EngineService) -> Starlette:
    """Return the application that serves ``service``."""

    def route(path: str, method: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            return await handler(service, request)

        return Route(path, endpoint, methods=[method])

    return Starlette(
        routes=[
            route("/v1/completions", "POST", completions),
            route("/inference/v1/generate", "POST", generate),
            route("/inference/v1/abort_requests", "POST", abort_named),
            route("/abort_requests", "POST", abort_any),
            route("/v1/models", "GET", models),
            route("/health", "GET", health),
            route("/version", "GET", version),
            route("/tokenize", "POST", tokenize),
            route("/detokenize", "POST", detokenize),
            route("/metrics", "GET", metrics),
            route("/pause", "POST", pause),
            route("/resume", "POST", resume),
            route("/is_paused", "GET", is_paused),
            route("/update_weight_version", "POST", update_weight_version),
            route("/weight_info", "GET", weight_info),
            route("/reset_prefix_cache", "POST", reset_prefix_cache),
            route("/collective_rpc", "POST", collective_rpc),
            route("/v1/load_lora_adapter", "POST", load_lora_adapter),
        ],
        exception_handlers={EngineError: _on_engine_error, HTTPException: _on_http_error},
    )


# -- generating --------------------------------------------------------------------------------------


async def completions(service: EngineService, request: Request) -> Response:
    """Handle ``POST /v1/completions``."""
    body = protocol.parse(protocol.CompletionBody, await _read_json(request))
    service.check_model(body.model)
    prompt = _prompt_ids(service, body)
    shape = responses.CompletionShape(
        request_id=f"cmpl-{new_request_id(request.headers.get('x-request-id'), body.request_id)}",
        created=now(),
        model=service.served.names[0],
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )
    submission = service.submit(
        f"{shape.request_id}-0",
        prompt,
        body,
        default_max_tokens=protocol.DEFAULT_MAX_TOKENS,
        stream=bool(body.stream),
    )
    if body.stream:
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return _sse_response(_completion_chunks(service, submission, shape, with_usage=with_usage))
    sequence = await _unless_disconnected(request, submission.finished())
    if sequence is None:
        return Response(status_code=499)
    return _json_response(responses.completion(sequence, shape, service.tokenizer))


def _prompt_ids(service: EngineService, body: protocol.CompletionBody) -> list[int]:
    """Return the ids of the prompt.

    Raises:
        InvalidRequest: The request has several prompts.
    """
    prompt: Any = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) != 1:
            raise InvalidRequest("one prompt a request; send several requests", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return service.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
    ids: list[int] = prompt
    return ids


async def _completion_chunks(
    service: EngineService, submission: QueuedRequest, shape: responses.CompletionShape, *, with_usage: bool
) -> AsyncIterator[object]:
    sequence = submission.sequence
    detokenizer = Detokenizer(service.tokenizer)
    offset = 0
    async with aclosing(submission.progress()) as progress:
        async for start, end in progress:
            final = sequence.finished and end == len(sequence.output)
            shown = responses.text_ids(sequence) if final else None
            ids = shown[start:] if shown is not None else [t.token_id for t in sequence.output[start:end]]
            text = detokenizer.push(ids, final=final)
            chunk = responses.completion_chunk(sequence, shape, service.tokenizer, start, end, text, offset)
            logprobs = chunk["choices"][0]["logprobs"]
            offset += sum(map(len, logprobs["tokens"])) if logprobs else 0
            yield chunk
    if with_usage:
        yield responses.usage_chunk(sequence, shape)


async def generate(service: EngineService, request: Request) -> Response:
    """Handle ``POST /inference/v1/generate``."""
    body = protocol.parse(protocol.GenerateBody, await _read_json(request))
    service.check_model(body.model)
    request_id = new_request_id(request.headers.get("x-request-id"), body.request_id)
    submission = service.submit(
        f"generate-tokens-{request_id}",
        body.token_ids,
        body.sampling_params,
        default_max_tokens=None,
        stream=bool(body.stream),
    )
    return_prompt = bool(body.return_token_ids)
    if body.stream:
        options = body.stream_options or protocol.StreamOptions(include_usage=False)
        return _sse_response(_generation_chunks(submission, options, return_prompt=return_prompt))
    sequence = await _unless_disconnected(request, submission.finished())
    if sequence is None:
        return Response(status_code=499)
    return _json_response(
        responses.generation(
            sequence, service.tokenizer, now(), service.served.names[0], return_prompt=return_prompt
        )
    )


async def _generation_chunks(
    submission: QueuedRequest, options: protocol.StreamOptions, *, return_prompt: bool
) -> AsyncIterator[object]:
    sequence = submission.sequence
    every_chunk = bool(options.include_usage and options.continuous_usage_stats)
    async with aclosing(submission.progress()) as progress:
        async for start, end in progress:
            chunk = responses.generation_chunk(sequence, start, end, return_prompt=return_prompt)
            yield chunk | {"usage": responses.usage(sequence)} if every_chunk else chunk
    if options.include_usage:
        yield {"request_id": sequence.request_id, "choices": [], "usage": responses.usage(sequence)}


async def abort_named(service: EngineService, request: Request) -> Response:
    """Handle ``POST /inference/v1/abort_requests``.

    The ids have the prefixed form ``generate-tokens-ID`` or ``cmpl-ID-0``.
    """
    body = protocol.parse(protocol.AbortBody, await _read_json(request))
    if body.request_ids is None:
        raise InvalidRequest("Missing 'request_ids' in request body", param="request_ids")
    ids = body.request_ids
    if ids:  # Without ids, somebody only asks whether the call is here.
        await service.call(lambda scheduler: scheduler.abort_ids(ids))
    return Response(status_code=200)


async def abort_any(service: EngineService, request: Request) -> Response:
    """Handle ``POST /abort_requests``. Without ids, all requests are aborted."""
    body = protocol.parse(protocol.AbortBody, await _read_json(request))
    aborted = await service.call(lambda scheduler: scheduler.abort_ids(body.request_ids or None))
    return _json_response({"status": "aborted", "aborted": aborted})


# -- about the server --------------------------------------------------------------------------------


async def models(service: EngineService, request: Request) -> Response:
    """Handle ``GET /v1/models``. The field ``logprobs_mode`` is an addition to vLLM's fields."""
    served = service.served
    cards: list[dict[str, object]] = [
        {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "rollyard",
            "root": str(served.root),
            "parent": None,
            "max_model_len": served.max_model_len,
            "permission": [],
            "logprobs_mode": LOGPROBS_MODE,
        }
        for name in served.names
    ]
    return _json_response({"object": "list", "data": cards})


async def health(service: EngineService, request: Request) -> Response:
    """Handle ``GET /health``.

    The status is 200 while the engine thread serves (even when it is paused), and 503 otherwise.
    """
    return Response(status_code=200 if service.engine.alive else 503)


async def version(service: EngineService, request: Request) -> Response:
    """Handle ``GET /version``. The fields ``engine`` and ``logprobs_mode`` are additions to vLLM's fields."""
    return _json_response(
        {"version": installed_version(), "engine": "rollyard_engine", "logprobs_mode": LOGPROBS_MODE}
    )


async def metrics(service: EngineService, request: Request) -> Response:
    """Handle ``GET /metrics``."""
    text = exposition(service.engine, service.served.names[0])
    return Response(text, media_type="text/plain; version=0.0.4")


async def tokenize(service: EngineService, request: Request) -> Response:
    """Handle ``POST /tokenize``.

    It tokenizes a prompt, or messages that the chat template has rendered.
    """
    body = protocol.parse(protocol.TokenizeBody, await _read_json(request))
    service.check_model(body.model)
    if body.messages is not None:
        text = service.tokenizer.render(
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            chat_template=body.chat_template,
            variables=body.chat_template_kwargs,
        )
        ids = service.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    else:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = service.tokenizer.encode(body.prompt or "", add_special_tokens=special)
    strings = [service.tokenizer.token_string(token) for token in ids] if body.return_token_strs else None
    return _json_response(
        {
            "count": len(ids),
            "max_model_len": service.served.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


async def detokenize(service: EngineService, request: Request) -> Response:
    """Handle ``POST /detokenize``. Special tokens are shown, as in vLLM."""
    body = protocol.parse(protocol.DetokenizeBody, await _read_json(request))
    service.check_model(body.model)
    return _json_response({"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)})


# -- weights -----------------------------------------------------------------------------------------


async def pause(service: EngineService, request: Request) -> Response:
    """Handle ``POST /pause?mode=abort|wait|keep&clear_cache=true``."""
    mode = request.query_params.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise InvalidRequest("mode must be 'abort', 'wait' or 'keep'", param="mode", value=mode)
    checked: PauseMode = mode  # type: ignore[assignment]  # checked against the type's own members
    clear = _flag(request, "clear_cache", default=True)
    await _unless_disconnected(request, service.pause(checked, clear_cache=clear))
    return _json_response({"status": "paused"})


async def resume(service: EngineService, request: Request) -> Response:
    """Handle ``POST /resume``."""
    await service.call(lambda scheduler: scheduler.resume())
    return _json_response({"status": "resumed"})


async def is_paused(service: EngineService, request: Request) -> Response:
    """Handle ``GET /is_paused``."""
    return _json_response({"is_paused": service.engine.scheduler.paused})


async def update_weight_version(service: EngineService, request: Request) -> Response:
    """Handle ``POST /update_weight_version {"new_version"}``."""
    body = protocol.parse(protocol.WeightVersionBody, await _read_json(request))
    await service.set_version(body.new_version)
    return _json_response({"success": True, "new_version": body.new_version})


async def weight_info(service: EngineService, request: Request) -> Response:
    """Handle ``GET /weight_info``."""
    return _json_response({"weight_version": service.engine.scheduler.version})


async def reset_prefix_cache(service: EngineService, request: Request) -> Response:
    """Handle ``POST /reset_prefix_cache?reset_running_requests=false``."""
    running_too = _flag(request, "reset_running_requests", default=False)
    await service.call(lambda scheduler: scheduler.reset_prefix_cache(running_too=running_too))
    return _json_response({"success": True})


async def collective_rpc(service: EngineService, request: Request) -> Response:
    """Handle ``POST /collective_rpc {"method": "reload_weights", "kwargs": {"weights_path": DIR}}``."""
    body = protocol.parse(protocol.RpcBody, await _read_json(request))
    if body.method != "reload_weights":
        raise InvalidRequest("the only method is 'reload_weights'", param="method", value=body.method)
    path = body.kwargs.get("weights_path", body.args[0] if body.args else None)
    if not isinstance(path, str) or not path:
        raise InvalidRequest("kwargs.weights_path must name a model folder", param="weights_path")
    await service.reload_weights(Path(path))
    return _json_response({"results": [None]})


async def load_lora_adapter(service: EngineService, request: Request) -> Response:
    """Handle ``POST /v1/load_lora_adapter``, which is always refused."""
    await _read_json(request)
    raise InvalidRequest(
        "this engine has no LoRA adapters: merge the adapter into the weights and load the folder by "
        "/collective_rpc reload_weights",
        param="lora_name",
    )


def _flag(request: Request, name: str, *, default: bool) -> bool:
    value = request.query_params.get(name, str(default)).lower()
    if value not in {"true", "false", "1", "0"}:
        raise InvalidRequest(f"{name} must be true or false", param=name, value=value)
    return value in {"true", "1"}


async def _on_engine_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, EngineError):
        raise error
    return _error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Return an error for unknown paths and methods, in vLLM's form."""
    if not isinstance(error, HTTPException):
        raise error
    content = {"message": error.detail, "type": error.detail, "param": None, "code": error.status_code}
    return _json_response({"error": content}, error.status_code, dict(error.headers or {}))


# The functions below read bodies, write JSON and streams, and detect disconnected clients.


def _json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def _error_response(error: EngineError) -> Response:
    """Return a response with vLLM's error object.

    If the queue is full, it also says when to retry.
    """
    headers = None if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return _json_response(responses.error_body(error), error.status, headers)


async def _read_json(request: Request) -> object:
    """Return the decoded body of a request.

    Raises:
        EngineError: The body is larger than ``MAX_BODY_BYTES``, or is not JSON.
    """
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise EngineError(
                f"the request body is larger than {MAX_BODY_BYTES} bytes", reason="BodyTooLarge"
            )
        pieces.append(piece)
    try:
        return orjson.loads(b"".join(pieces))
    except orjson.JSONDecodeError as error:
        raise EngineError(
            f"the request body is not JSON: {error}", reason="MalformedRequest", param="body"
        ) from error


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
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


def _sse_response(chunks: AsyncIterator[object]) -> StreamingResponse:
    """Return server-sent events as vLLM sends them, with ``[DONE]`` at the end.

    An error becomes the last event before that.
    """

    async def events() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        except EngineError as error:
            yield b"data: " + orjson.dumps(responses.error_body(error)) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
