"""The meaning of the status and the content of an answer. Nothing in this module does I/O."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

import orjson

from rollyard_inference.errors import (
    BackendMismatch,
    BackendRefused,
    ContextOverflow,
    ModelNotServed,
    NoSuchCall,
    ServerFailed,
)
from rollyard_inference.transports.interface import Reply

NO_SUCH_CALL: Final = frozenset({403, 404, 405, 501})
"""The statuses with which servers answer a call that they do not have. vLLM without `--enable-scale-out`
answers 403."""
_ERROR_TEXT: Final = 500  # The number of characters of an error answer that are quoted.
_TRANSIENT: Final = frozenset({408, 409, 425, 429})
_CONTEXT: Final = re.compile(
    r"maximum (?:context|model|sequence|input) length|context length|context window|maximum prompt length"
    r"|max_model_len|max_total_tokens|prompt is too long|too many (?:input |prompt )?tokens"
    # Every request asks for at least one token. If the prompt fills the context, nothing is left of that
    # number.
    r"|max_tokens must be at least 1, got (?:0|-\d+)",
    re.IGNORECASE,
)
_LIMIT: Final = re.compile(
    r"(?:maximum (?:context|model|sequence) length(?: is| of)?|context length \(|context length(?: is| of))"
    r"\s*[:=]?\s*(\d+)",
    re.IGNORECASE,
)
_NO_MODEL: Final = re.compile(
    r"\bmodel\b.{0,300}(?:does not exist|not found|not served|unknown)", re.I | re.S
)


def require_ok(call: str, reply: Reply) -> None:
    """Check that the status is 200.

    Args:
        call: The request in words, for messages.
        reply: The answer.

    Raises:
        ServerFailed: The status is 5xx, 408, 409, 425 or 429. `overloaded` is set for 429, and for 503 with a
            Retry-After.
        BackendMismatch: The status is a redirect or another 2xx.
        BackendRefused: The status is another 4xx.
    """
    status = reply.status
    if status == 200:
        return
    text = reply.content[:_ERROR_TEXT].decode(errors="replace")
    if status >= 500 or status in _TRANSIENT:
        wait = _seconds(reply.headers.get("retry-after"))
        overloaded = status == 429 or (status == 503 and wait is not None)
        raise ServerFailed(f"{call} answered {status}: {text}", overloaded=overloaded, retry_after=wait)
    if 300 <= status < 400:
        raise BackendMismatch(
            f"{call} answered {status}, a redirect to {reply.headers.get('location')}: "
            "give the pool that address"
        )
    if status < 300:
        raise BackendMismatch(f"{call} answered {status}, expected 200")
    raise BackendRefused(f"{call} answered {status}: {(_message(reply.content) or text)[:_ERROR_TEXT]}")


def require_call(call: str, reply: Reply, hint: str = "") -> None:
    """Check that the server has the call at all.

    Args:
        call: The request in words, for messages.
        reply: The answer.
        hint: What would enable the call on the server, for the message.

    Raises:
        NoSuchCall: The status is 403, 404, 405 or 501.
    """
    if reply.status in NO_SUCH_CALL:
        more = f"; {hint}" if hint else ""
        raise NoSuchCall(f"{call} answered {reply.status}: the server has no such call{more}")


def sampled(call: str, reply: Reply) -> object:
    """Return the JSON of the answer to a sampling request, in which numbers may be `NaN` and `Infinity`.

    Raises:
        ModelNotServed: The server has no such model.
        ContextOverflow: The prompt does not fit into the context.
        BackendMismatch: The answer is not JSON.
        ServerFailed, BackendMismatch, BackendRefused: See `require_ok`.
    """
    status = reply.status
    if status in (400, 404, 413, 422):
        text = _message(reply.content) or reply.content[:_ERROR_TEXT].decode(errors="replace")
        message = f"{call} answered {status}: {text[:_ERROR_TEXT]}"
        if status in (400, 404) and _NO_MODEL.search(text):
            raise ModelNotServed(message)
        if status != 404 and _CONTEXT.search(text):
            limit = _LIMIT.search(text)
            raise ContextOverflow(message, int(limit[1][:12]) if limit else None)
    require_ok(call, reply)
    return document(call, reply.content)


def document(call: str, content: bytes | bytearray) -> object:
    """Return the JSON of an answer or of an event of it, in which numbers may be `NaN` and `Infinity`.

    Raises:
        BackendMismatch: It is not JSON.
    """
    try:
        body: object = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        try:
            # Some servers write NaN, which JSON does not have. The check of its field says where it stands.
            body = json.loads(content)
            # Nothing else that JSON does not have is let through, such as half a character.
            orjson.dumps(body)
        except (TypeError, ValueError, RecursionError):
            raise BackendMismatch(f"{call}: the answer is not JSON: {error}") from error
    return body


def raise_error(call: str, body: dict[str, Any]) -> NoReturn:
    """Raise the error that an event of a stream reports, in the form of OpenAI.

    Args:
        call: The request in words, for messages.
        body: The event, which has a field `error`.

    Raises:
        BackendError: What `sampled` raises for an answer with this error. Without a status, it is a 500.
    """
    error = body["error"]
    code = error.get("code") if isinstance(error, dict) else None
    status = code if type(code) is int and 400 <= code < 600 else 500
    sampled(call, Reply(status, {}, orjson.dumps(body)))
    raise AssertionError(f"status {status} raised nothing")


def json_or_none(reply: Reply) -> Any:
    """Return the JSON of an answer, or None if the answer is not JSON."""
    try:
        return orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        return None


def _message(content: bytes) -> str:
    """Return the message of an error in the form of OpenAI or FastAPI.

    The result is empty for any other form.
    """
    try:
        body: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        return ""
    if not isinstance(body, dict):
        return ""
    error = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message", error.get("detail"))
    return error if isinstance(error, str) else ""


def _seconds(text: str | None) -> float | None:
    """Return a Retry-After in seconds, or None if it is missing or a date."""
    try:
        seconds = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
