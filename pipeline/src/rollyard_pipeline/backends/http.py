"""HTTP to inference backends: one connection pool for the process, and what an error answer means."""

from __future__ import annotations

import asyncio
import importlib
import math
import re
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import orjson

from rollyard_pipeline.errors import (
    BackendMismatch,
    BackendRefused,
    BackendUnavailable,
    ContextOverflow,
    ModelNotServed,
)

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER_BYTES: Final = 64 << 20
_KEEP_ALIVE: Final = 4.0  # seconds; less than uvicorn's 5, so that no request meets a closing connection
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


class Http:
    """Requests with bounded answers. Use as an async context manager."""

    def __init__(self, connect_timeout: float) -> None:
        self._connect_timeout = connect_timeout
        self._entered = False
        self._opening: asyncio.Task[aiohttp.ClientSession] | None = None

    async def __aenter__(self) -> Http:
        self._entered = True
        return self

    def begin(self) -> asyncio.Task[aiohttp.ClientSession]:
        """Imports what requests need, once, in the background: a rollout of no model does without it."""
        if not self._entered:
            raise RuntimeError("BackendClient is used outside of its 'async with'")
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="backend connections")
        return self._opening

    async def _open(self) -> aiohttp.ClientSession:
        await asyncio.to_thread(importlib.import_module, "aiohttp")
        import aiohttp

        # The Run pool's places bound how many requests are in flight, so the connector need not.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout)
        return aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        if self._opening is not None:
            opening, self._opening = self._opening, None
            await (await opening).close()

    async def request(self, method: str, url: str, body: object = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (names in lower case) and content. Bounded in size, not in time: see the callers.

        Raises:
            BackendUnavailable: no connection, or it broke.
            BackendMismatch: the answer is too long.
        """
        session = await asyncio.shield(self.begin())
        import aiohttp

        data = orjson.dumps(body) if body is not None else None
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with session.request(
                method, url, data=data, headers=headers, allow_redirects=False
            ) as answer:
                content = await _read(answer, url)
                return answer.status, {name.lower(): value for name, value in answer.headers.items()}, content
        except (aiohttp.ClientError, OSError) as error:  # a connection's own timeout is an OSError
            raise BackendUnavailable(f"{url}: {type(error).__name__}: {error}") from error


async def _read(answer: aiohttp.ClientResponse, url: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise BackendMismatch(f"{url}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def checked(url: str, status: int, headers: dict[str, str], content: bytes) -> object:
    """The JSON of an answer with status 200.

    Raises:
        BackendUnavailable: 5xx, 408, 409, 425 or 429; `overloaded` with 429, and 503 with Retry-After.
        BackendMismatch: no JSON, or a redirect.
        ModelNotServed: the server has no such model.
        ContextOverflow: the prompt does not fit.
        BackendRefused: another 4xx.
    """
    if status == 200:
        try:
            body: object = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise BackendMismatch(f"{url}: the answer is not JSON: {error}") from error
        return body
    said = content[:_ERROR_TEXT].decode(errors="replace")
    if status >= 500 or status in _TRANSIENT:
        wait = _seconds(headers.get("retry-after"))
        overloaded = status == 429 or (status == 503 and wait is not None)
        raise BackendUnavailable(f"{url} answered {status}: {said}", overloaded=overloaded, retry_after=wait)
    if 300 <= status < 400:
        raise BackendMismatch(
            f"{url} answered {status}, a redirect to {headers.get('location')}: give the pool that address"
        )
    if status < 300:
        raise BackendMismatch(f"{url} answered {status}, expected 200")
    said = _message(content) or said
    if status in (400, 404) and _NO_MODEL.search(said):
        raise ModelNotServed(f"{url} answered {status}: {said[:_ERROR_TEXT]}")
    if status in (400, 413, 422) and _CONTEXT.search(said):
        limit = _LIMIT.search(said)
        raise ContextOverflow(
            f"{url} answered {status}: {said[:_ERROR_TEXT]}", int(limit[1][:12]) if limit else None
        )
    raise BackendRefused(f"{url} answered {status}: {said[:_ERROR_TEXT]}")


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
