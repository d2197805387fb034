"""What the status and the content of an answer mean. Nothing here does I/O."""

from __future__ import annotations

import math
import re
from typing import Any, Final

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
"""How servers answer a call that they do not have (vLLM without `--enable-scale-out` answers 403)."""
_ERROR_TEXT: Final = 500  # characters of an error answer that are worth repeating
_TRANSIENT: Final = frozenset({408, 409, 425, 429})
_CONTEXT = re.compile(
    r"maximum (?:context|model|sequence|input) length|context length|context window|maximum prompt length"
    r"|max_model_len|max_total_tokens|prompt is too long|too many (?:input |prompt )?tokens"
    # We ask for one token at least; what is left of it is none where the prompt fills the context.
    r"|max_tokens must be at least 1, got (?:0|-\d+)",
    re.IGNORECASE,
)
_LIMIT = re.compile(
    r"(?:maximum (?:context|model|sequence) length(?: is| of)?|context length \(|context length(?: is| of))"
    r"\s*[:=]?\s*(\d+)",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(r"\bmodel\b.{0,300}(?:does not exist|not found|not served|unknown)", re.I | re.S)


def require_ok(call: str, reply: Reply) -> None:
    """Check that the status is 200.

    Args:
        call: the request in words, for messages.

    Raises:
        ServerFailed: 5xx, 408, 409, 425 or 429; `overloaded` with 429, and with 503 that has a Retry-After.
        BackendMismatch: a redirect, or another 2xx.
        BackendRefused: another 4xx.
    """
    status = reply.status
    if status == 200:
        return
    said = reply.content[:_ERROR_TEXT].decode(errors="replace")
    if status >= 500 or status in _TRANSIENT:
        wait = _seconds(reply.headers.get("retry-after"))
        overloaded = status == 429 or (status == 503 and wait is not None)
        raise ServerFailed(f"{call} answered {status}: {said}", overloaded=overloaded, retry_after=wait)
    if 300 <= status < 400:
        raise BackendMismatch(
            f"{call} answered {status}, a redirect to {reply.headers.get('location')}: "
            "give the pool that address"
        )
    if status < 300:
        raise BackendMismatch(f"{call} answered {status}, expected 200")
    raise BackendRefused(f"{call} answered {status}: {(_message(reply.content) or said)[:_ERROR_TEXT]}")


def require_call(call: str, reply: Reply, hint: str = "") -> None:
    """Check that the server has the call at all.

    Args:
        hint: what would give it that call, for the message.

    Raises:
        NoSuchCall: 403, 404, 405 or 501.
    """
    if reply.status in NO_SUCH_CALL:
        more = f"; {hint}" if hint else ""
        raise NoSuchCall(f"{call} answered {reply.status}: the server has no such call{more}")


def sampled(call: str, reply: Reply) -> object:
    """The JSON of the answer to a sampling request.

    Raises:
        ModelNotServed: the server has no such model.
        ContextOverflow: the prompt does not fit.
        BackendMismatch: the answer is not JSON.
        ServerFailed, BackendMismatch, BackendRefused: see `require_ok`.
    """
    status = reply.status
    if status in (400, 404, 413, 422):
        said = _message(reply.content) or reply.content[:_ERROR_TEXT].decode(errors="replace")
        message = f"{call} answered {status}: {said[:_ERROR_TEXT]}"
        if status in (400, 404) and _NO_MODEL.search(said):
            raise ModelNotServed(message)
        if status != 404 and _CONTEXT.search(said):
            limit = _LIMIT.search(said)
            raise ContextOverflow(message, int(limit[1][:12]) if limit else None)
    require_ok(call, reply)
    try:
        body: object = orjson.loads(reply.content)
    except orjson.JSONDecodeError as error:
        raise BackendMismatch(f"{call}: the answer is not JSON: {error}") from error
    return body


def json_or_none(reply: Reply) -> Any:
    """The JSON of an answer; None where it is none."""
    try:
        return orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        return None


def _message(content: bytes) -> str:
    """The message of an error in OpenAI's or FastAPI's form; empty for any other."""
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
    """A Retry-After in seconds; None without one, or where it is a date."""
    try:
        seconds = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
