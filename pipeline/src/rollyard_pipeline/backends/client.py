"""HTTP to inference backends: one connection pool for the process, and what each backend can do.

Which call a backend has is learnt from its first answer, never assumed: a server without
`/inference/v1/generate` answers 403, 404, 405 or 501 there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import aiohttp
import orjson
from rollyard_crds.lease import BackendAssignment

from rollyard_pipeline.backends import wire
from rollyard_pipeline.backends.wire import Sampling
from rollyard_pipeline.errors import BackendMismatch, BackendRefused, BackendUnavailable
from rollyard_pipeline.recorder import Sample

_MAX_ANSWER_BYTES: Final = 64 << 20
_ERROR_TEXT: Final = 500  # characters of an error answer that are worth repeating
_NO_SUCH_CALL: Final = frozenset({403, 404, 405, 501})
_TRANSIENT: Final = frozenset({408, 409, 425, 429})
_PROBE_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Known:
    """What is known of one backend."""

    has_generate: bool | None = None
    max_model_len: dict[str, int] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class BackendClient:
    """Asks backends for samples. Use as an async context manager.

    Args:
        request_timeout: seconds after which one request counts as hung.
        connect_timeout: seconds to wait for a connection.
    """

    def __init__(self, *, request_timeout: float = 300.0, connect_timeout: float = 5.0) -> None:
        self._timeout = aiohttp.ClientTimeout(total=request_timeout, sock_connect=connect_timeout)
        self._session: aiohttp.ClientSession | None = None
        self._known: dict[str, _Known] = {}

    async def __aenter__(self) -> BackendClient:
        # The Run pool's places bound how many requests are in flight, so the connector need not.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def sample(self, backend: BackendAssignment, prompt: Sequence[int], sampling: Sampling) -> Sample:
        """One request.

        Raises:
            BackendUnavailable: no connection, no answer in time, or a 5xx; another try may help.
            BackendRefused: the request itself is refused.
            BackendMismatch: the answer fails a check.
        """
        known = self._known.setdefault(backend.url, _Known())
        if known.has_generate is None:
            async with known.lock:
                if known.has_generate is None:
                    return await self._first(known, backend, prompt, sampling)
        if known.has_generate:
            status, answer = await self._post(
                backend.url + wire.GENERATE_PATH, wire.generate_body(backend.model, prompt, sampling)
            )
            if status in _NO_SUCH_CALL:  # another server took the address over
                known.has_generate = None
                raise BackendUnavailable(f"{backend.url}{wire.GENERATE_PATH} is gone (HTTP {status})")
            return wire.parse_generate(
                _checked(backend.url, status, answer), prompt, sampling, backend.policy_version
            )
        return await self._completions(backend, prompt, sampling)

    async def max_model_len(self, backend: BackendAssignment) -> int | None:
        """Context length of the backend's model in tokens; None where the server does not say."""
        known = self._known.setdefault(backend.url, _Known())
        if known.max_model_len is None:
            try:
                status, body = await self._get(backend.url + "/v1/models")
            except BackendUnavailable:
                return None  # asked again at the next turn; sampling reports the trouble
            known.max_model_len = _model_lengths(body) if status == 200 else {}
        return known.max_model_len.get(backend.model)

    async def _first(
        self, known: _Known, backend: BackendAssignment, prompt: Sequence[int], sampling: Sampling
    ) -> Sample:
        status, answer = await self._post(
            backend.url + wire.GENERATE_PATH, wire.generate_body(backend.model, prompt, sampling)
        )
        if status in _NO_SUCH_CALL:
            sample = await self._completions(backend, prompt, sampling)
            known.has_generate = False
            return sample
        body = _checked(backend.url, status, answer)
        known.has_generate = True
        return wire.parse_generate(body, prompt, sampling, backend.policy_version)

    async def _completions(
        self, backend: BackendAssignment, prompt: Sequence[int], sampling: Sampling
    ) -> Sample:
        status, answer = await self._post(
            backend.url + wire.COMPLETIONS_PATH, wire.completions_body(backend.model, prompt, sampling)
        )
        return wire.parse_completions(
            _checked(backend.url, status, answer), prompt, sampling, backend.policy_version
        )

    async def _post(self, url: str, body: dict[str, Any]) -> tuple[int, bytes]:
        return await self._request("POST", url, orjson.dumps(body), self._timeout)

    async def _get(self, url: str) -> tuple[int, bytes]:
        return await self._request("GET", url, None, aiohttp.ClientTimeout(total=_PROBE_SECONDS))

    async def _request(
        self, method: str, url: str, data: bytes | None, timeout: aiohttp.ClientTimeout
    ) -> tuple[int, bytes]:
        if self._session is None:
            raise RuntimeError("BackendClient is used outside of its 'async with'")
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with self._session.request(
                method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                return answer.status, await _read(answer, url)
        except TimeoutError as error:
            raise BackendUnavailable(f"{url}: no answer within {timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise BackendUnavailable(f"{url}: {type(error).__name__}: {error}") from error


async def _read(answer: aiohttp.ClientResponse, url: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        if size > _MAX_ANSWER_BYTES:
            raise BackendMismatch(f"{url}: the answer is longer than {_MAX_ANSWER_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _checked(url: str, status: int, answer: bytes) -> object:
    if status != 200:
        said = answer[:_ERROR_TEXT].decode(errors="replace")
        if status >= 500 or status in _TRANSIENT:
            raise BackendUnavailable(f"{url} answered {status}: {said}")
        raise BackendRefused(f"{url} answered {status}: {said}")
    try:
        body: object = orjson.loads(answer)
    except orjson.JSONDecodeError as error:
        raise BackendMismatch(f"{url}: the answer is not JSON: {error}") from error
    return body


def _model_lengths(body: bytes) -> dict[str, int]:
    try:
        models = orjson.loads(body)["data"]
        return {
            model["id"]: model["max_model_len"]
            for model in models
            if isinstance(model.get("max_model_len"), int)
        }
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return {}
