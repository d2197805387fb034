"""Reading allowed URLs piece by piece: files, answers of web servers, and objects in buckets."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, BinaryIO, Final, TypeVar
from urllib.parse import urljoin

import fsspec
import httpcore

from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.jobs.allow_lists import Address, AllowList, Source

T = TypeVar("T")

PIECE_BYTES: Final = 256 << 10
MAX_REDIRECTS: Final = 5
CONNECT_SECONDS: Final = 10.0
SILENT_SECONDS: Final = 30.0
"""The number of seconds without data after which reading from a server is given up."""
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_OK: Final = 200


class SourceUnreadable(ControlPlaneError):
    """An allowed source cannot be read. The message contains nothing from the other side's answer.

    `retryable` says whether another try may succeed.
    """

    def __init__(self, why: str, *, retryable: bool = True) -> None:
        super().__init__(why)
        self.retryable = retryable


class Blocking:
    """A runner of calls that may hang, in threads of their own, which knows when the last call has ended.

    Args:
        threads: The executor in which the calls run.
        free: Called once, when `finish` was called and no call is running.
    """

    def __init__(self, threads: Executor, free: Callable[[], None]) -> None:
        self._threads = threads
        self._free = free
        self._closers: list[Callable[[], None]] = []
        self._running = 0
        self._finished = False

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what the function returns. A call that is no longer awaited still runs to its end."""
        return await asyncio.shield(self._start(lambda: function(*arguments)))

    async def open(self, function: Callable[[], BinaryIO]) -> BinaryIO:
        """Return the file that the function opens. The file is closed after the last call."""

        def opened() -> BinaryIO:
            file = function()
            self._closers.append(file.close)
            return file

        return await self.call(opened)

    def _start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        future = asyncio.get_running_loop().run_in_executor(self._threads, function)
        self._running += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            future.exception()  # Without this call, asyncio would log an error if the caller no longer waits.
        self._running -= 1
        self._look()

    def finish(self) -> None:
        """Mark the end of the calls. After this no more calls are made."""
        self._finished = True
        self._look()

    def _look(self) -> None:
        if not self._finished or self._running:
            return
        if self._closers:
            self._start(self._closers.pop())
        else:
            self._finished = False
            self._free()


def pieces(
    source: Source, allowed: AllowList, namespace: str, blocking: Blocking
) -> AsyncGenerator[bytes, None]:
    """Return the bytes of a source as they arrive, never more than one piece at a time.

    Raises:
        Invalid: The source leads to a link target, a redirect target or an address that is not allowed.
        SourceUnreadable: The source cannot be read.
    """
    match source.location.kind:
        case "web":
            return _answer(source, allowed, namespace, blocking)
        case "file":
            return _pieces_of(lambda: open_file(source, allowed), blocking)
        case "bucket":
            return _pieces_of(lambda: _open_object(source), blocking)


async def _pieces_of(open_: Callable[[], BinaryIO], blocking: Blocking) -> AsyncGenerator[bytes, None]:
    file = await blocking.open(open_)
    while data := await blocking.call(_read, file):
        yield data


def _read(file: BinaryIO) -> bytes:
    try:
        return file.read(PIECE_BYTES)
    except Exception as error:
        # The file systems of fsspec raise errors of their own libraries.
        raise SourceUnreadable(getattr(error, "strerror", None) or type(error).__name__) from error


def open_file(source: Source, allowed: AllowList) -> BinaryIO:
    """Open a regular file beneath the listed folder.

    The file is first held by a descriptor that does not open it, and then judged by the path that the kernel
    has for it. An author who swaps a link or a folder between the check and the opening gains nothing.

    Raises:
        Invalid: The file is elsewhere once links are followed.
        SourceUnreadable: There is no such file, or it cannot be read.
    """
    path = source.location.path
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        # The answer must not reveal what exists outside of the folder.
        if not allowed.permits_file(source, os.path.realpath(path)):
            raise allowed.refusal(source.url) from error
        raise SourceUnreadable(getattr(error, "strerror", None) or "the path is malformed") from error
    try:
        link = f"/proc/self/fd/{descriptor}"
        if not allowed.permits_file(source, os.readlink(link)):
            raise allowed.refusal(source.url)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SourceUnreadable("it is not a regular file")
        try:
            return os.fdopen(os.open(link, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0)
        except OSError as error:
            raise SourceUnreadable(error.strerror or type(error).__name__) from error
    finally:
        os.close(descriptor)


def _open_object(source: Source) -> BinaryIO:
    location = source.location
    try:
        system: Any = fsspec.filesystem(location.scheme)
        opened: BinaryIO = system.open(f"{location.authority}{location.path}", "rb")
    except FileNotFoundError as error:
        raise SourceUnreadable("there is no such object") from error
    except Exception as error:
        raise SourceUnreadable(f"the object store cannot be used: {type(error).__name__}") from error
    return opened


async def _addresses(source: Source, allowed: AllowList, blocking: Blocking) -> list[Address]:
    """Return the addresses of a source's host, to all of which a connection is permitted.

    Raises:
        Invalid: One of them is not permitted.
        SourceUnreadable: The host has no address.
    """
    try:
        addresses = await blocking.call(_resolve, source.location.host, source.location.port)
    except (OSError, UnicodeError) as error:
        raise SourceUnreadable("its host cannot be resolved") from error
    if not all(allowed.permits_address(source, address) for address in addresses):
        # The author of a job must not learn which address it was.
        why = "its host has an address that is neither public nor in the installer's networks"
        raise allowed.refusal(source.url, why)
    if not addresses:
        raise SourceUnreadable("its host has no address")
    return addresses


def _resolve(host: str, port: int) -> list[Address]:
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ipaddress.ip_address(str(item[4][0]).partition("%")[0]) for item in entries))


async def _answer(
    source: Source, allowed: AllowList, namespace: str, blocking: Blocking
) -> AsyncGenerator[bytes, None]:
    for _ in range(MAX_REDIRECTS + 1):
        tls = ssl.create_default_context() if source.location.scheme == "https" else None
        async with exchange(source, allowed, blocking, tls) as answer:
            if answer.status == _OK:
                async for data in answer.aiter_stream():
                    for at in range(0, len(data), PIECE_BYTES):
                        yield data[at : at + PIECE_BYTES]
                return
            if answer.status not in _REDIRECTS:
                raise SourceUnreadable(f"the server answered {answer.status}")
            # Each redirect target is checked against the list as if the job had named it.
            locations = (value for name, value in answer.headers if name.lower() == b"location")
            try:
                target = urljoin(source.url, next(locations, b"").decode("latin-1"))
            except ValueError as error:
                raise SourceUnreadable("it redirects to no URL") from error
            source = allowed.source(target, namespace)
        if source.location.kind != "web":
            raise allowed.refusal(source.url, "a redirect leads to no web server")
    raise SourceUnreadable(f"it redirects more than {MAX_REDIRECTS} times")


@asynccontextmanager
async def exchange(
    source: Source,
    allowed: AllowList,
    blocking: Blocking,
    tls: ssl.SSLContext | None,
    *,
    seconds: tuple[float, float] = (CONNECT_SECONDS, SILENT_SECONDS),
    body: bytes | None = None,
) -> AsyncIterator[httpcore.Response]:
    """Send one request over a connection of its own, and yield the answer, whose body is read in the block.

    The host is resolved once, here, and the connection goes to a checked address instead of its name.

    Args:
        source: The URL.
        allowed: The list that decides which addresses may be connected to.
        blocking: Resolves the name of the host.
        tls: The context of TLS, or None if the URL needs none.
        seconds: The longest time for the connection, and for each read and write.
        body: The JSON that is sent, with POST; without it, the request is a GET.

    Raises:
        Invalid: The host has an address that is not permitted.
        SourceUnreadable: The server cannot be reached, or does not speak HTTP.
    """
    location = source.location
    default = ":80" if location.scheme == "http" else ":443"
    headers = {"Host": location.authority.removesuffix(default), "User-Agent": "rollyard"}
    headers["Accept-Encoding"] = "identity"
    if body is not None:
        json = "application/json"
        headers |= {"Accept": json, "Content-Type": json, "Content-Length": str(len(body))}
    target = location.path + (f"?{location.query}" if location.query else "")
    connect, silent = seconds
    extensions = {
        "timeout": {"connect": connect, "read": silent, "write": silent, "pool": 1.0},
        "sni_hostname": location.host,
    }
    method = b"GET" if body is None else b"POST"
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    addresses = await _addresses(source, allowed, blocking)
    try:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(httpcore.AsyncConnectionPool(ssl_context=tls))
            for number, address in enumerate(addresses, 1):
                host = f"[{address}]" if address.version == 6 else f"{address}"
                url = f"{location.scheme}://{host}:{location.port}{target}"
                sent = pool.stream(method, url, headers=encoded, content=body, extensions=extensions)
                try:
                    answer = await stack.enter_async_context(sent)
                    break
                except (httpcore.ConnectError, httpcore.ConnectTimeout):
                    if number == len(addresses):
                        raise
            yield answer
    except (httpcore.NetworkError, httpcore.TimeoutException, ssl.SSLError) as error:
        raise SourceUnreadable(f"{allowed.server} cannot be reached ({type(error).__name__})") from error
    except httpcore.ProtocolError as error:
        raise SourceUnreadable(f"{allowed.server} does not speak HTTP") from error
