"""The control plane over REST, with the exceptions that the worker's loops handle.

The one HTTP library of a worker is aiohttp, with which it also samples from backends. It takes a quarter of
the processor time that httpx takes for a call, and a worker makes several calls for each rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ssl
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

import orjson
from rollyard_client.context import Context, verify
from rollyard_client.environment import USER_AGENT
from rollyard_client.errors import ContextError, RollyardError, from_answer, unreachable
from rollyard_client.unixsocket import base_of, socket_of
from rollyard_crds.base import build
from rollyard_crds.lease import (
    CompleteRequest,
    HeartbeatRequest,
    LeaseRequest,
    LeaseResponse,
    OutcomeResponse,
)
from rollyard_crds.rolloutjob import RolloutJobSpec, WorkerJobSpec

from rollyard_pipeline.control_plane.calls import (
    ControlPlaneUnavailable,
    WorkerCall,
    WorkerCalls,
    persistent,
)
from rollyard_pipeline.errors import ControlPlaneRefused, JobEnded, NotThere

if TYPE_CHECKING:
    import aiohttp

A = TypeVar("A")

MAX_ANSWER_BYTES: Final = 1 << 30
"""The largest size of an answer in bytes. The tasks of the largest data sets fit, many of them at once."""
_IMPORTED_LATE: Final = ("aiohttp", "encodings.idna")
"""The modules that calls import with the first of them."""
_FIRST: Final = (
    LeaseRequest,
    LeaseResponse,
    WorkerJobSpec,
    HeartbeatRequest,
    CompleteRequest,
    OutcomeResponse,
)
"""The models that every worker needs, in the order in which it needs them."""
_TIMEOUT: Final = 30.0  # How long a call that does not wait may leave the connection silent, in seconds.
_CONNECT_SECONDS: Final = 5.0
_TRANSFER_SECONDS: Final = 600.0  # The limit of a whole call that does not wait, in seconds.
_KEEP_ALIVE: Final = 5.0  # seconds; the control plane keeps an idle connection for longer
_CONNECTIONS: Final = 100
_START_SECONDS: Final = 60.0  # How long a worker that starts waits for its job, in seconds.


def import_late() -> None:
    """Import what calls would import with the first of them."""
    for name in _IMPORTED_LATE:
        # They only save time. A module that this installation lacks is not needed by it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class RestControlPlane(WorkerCalls):
    """The control plane at a URL. It is an async context manager.

    Args:
        url: Its address, `http:`, `https:`, or that of a Unix socket.
        token: The bearer token of the worker.
        timeout: How long a call may leave the connection silent, in seconds, beyond what it waits.
    """

    def __init__(self, url: str, token: str, timeout: float = _TIMEOUT) -> None:
        self._context = Context(url.rstrip("/"), token)
        self._base = base_of(self._context.url)
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    def prepare(self) -> None:
        """Import and build what the first requests need. Without this call, they take that time themselves.

        It takes 0.2 s of a processor, and may run in a thread until the first request is sent.

        Raises:
            ControlPlaneRefused: The file with the authorities to trust cannot be used.
        """
        _ = self._tls
        import_late()
        for model in _FIRST:
            build(model)

    async def __aenter__(self) -> RestControlPlane:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(self, call: WorkerCall[A]) -> A:
        """Send a call once, without following a redirect, and return what its answer says."""
        import aiohttp

        if self._session is None:
            self._session = self._open()
        timeout = aiohttp.ClientTimeout(
            total=_TRANSFER_SECONDS + call.wait,
            connect=self._timeout,
            sock_connect=_CONNECT_SECONDS,
            sock_read=self._timeout + call.wait,
        )
        body = None if call.request is None else call.request.model_dump_json().encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                call.method,
                self._base + call.path,
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                content = await _content(answer)
        except (aiohttp.ClientError, OSError) as error:
            raise ControlPlaneUnavailable(str(unreachable(self._context.url, error))) from error
        if not 200 <= answer.status < 300:
            raise _failure(answer.status, content, answer.headers.get("Retry-After"))
        try:
            return call.read(content)
        except (ValueError, LookupError, TypeError) as error:
            raise ControlPlaneUnavailable(
                f"{self._context.url} gave {call.method} {call.path} an answer of another form: {error}"
            ) from error

    async def job_when_there(self, namespace: str, name: str) -> RolloutJobSpec:
        """Return the spec of a job by its name, and wait for a control plane that is still starting.

        Raises:
            ControlPlaneRefused: There is no such job, or no control plane answers within a minute.
        """
        try:
            async with asyncio.timeout(_START_SECONDS):
                return await persistent(lambda: self.job_spec(namespace, name))
        except TimeoutError as error:
            raise ControlPlaneRefused(
                f"the control plane did not answer within {_START_SECONDS:g} s"
            ) from error

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """What checks the server's certificate, which is the same as for other clients."""
        try:
            return verify(self._context)
        except ContextError as error:
            raise ControlPlaneRefused(str(error)) from error

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        socket = socket_of(self._context.url)
        connector: aiohttp.BaseConnector
        if socket is not None:
            connector = aiohttp.UnixConnector(socket, limit=_CONNECTIONS, keepalive_timeout=_KEEP_ALIVE)
        else:
            connector = aiohttp.TCPConnector(ssl=self._tls, limit=_CONNECTIONS, keepalive_timeout=_KEEP_ALIVE)
        return aiohttp.ClientSession(
            connector=connector,
            headers={
                "Accept": "application/json",
                "Authorization": f"Bearer {self._context.token}",
                "User-Agent": USER_AGENT,
            },
            cookie_jar=aiohttp.DummyCookieJar(),
        )


async def _content(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer.

    Raises:
        ControlPlaneRefused: It is longer than `MAX_ANSWER_BYTES`.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise ControlPlaneRefused(f"the control plane's answer is longer than {MAX_ANSWER_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _failure(status: int, content: bytes, retry_after: str | None) -> Exception:
    """Return the exception for an answer that is not a success."""
    try:
        problem = orjson.loads(content)
    except ValueError:
        problem = content[:500].decode(errors="replace")
    error: RollyardError = from_answer(status, problem, retry_after)
    if status == 429 or status >= 500:
        return ControlPlaneUnavailable(str(error), error.retry_after)
    if error.reason == JobEnded.__name__:
        return JobEnded(str(error))
    return NotThere(str(error)) if status == 404 else ControlPlaneRefused(str(error))
