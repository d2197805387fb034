"""A worker's calls over REST: what is sent, and which exceptions answers and broken connections become."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rollyard_client.unixsocket import socket_url
from rollyard_crds.lease import HeartbeatRequest, LeaseRequest
from rollyard_pipeline.control_plane import rest
from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable
from rollyard_pipeline.control_plane.rest import RestControlPlane
from rollyard_pipeline.errors import ControlPlaneRefused
from rollyard_testing.pace import patience

BEAT = HeartbeatRequest(worker="w", node="n", leases=[], sandboxes=[])
EMPTY = json.dumps({"lost": [], "cancelled": [], "orphans": ["s-1"]}).encode()


def http(status: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """Return an answer."""
    said = (f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers)
    return "\r\n".join((*said, "", "")).encode() + body


class Server:
    """A server that answers each request of a connection in turn, and keeps what it was sent."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. It is closed when there are no more answers."""
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(length)))
                if not self.answers:
                    break
                writer.write(self.answers.pop(0))
                await writer.drain()
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.ended.set()
            writer.close()


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    """Yield the URL of the server."""
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def test_a_call_is_sent_and_read() -> None:
    server = Server(http("200 OK", EMPTY), http("200 OK", EMPTY))
    async with listening(server) as url, RestControlPlane(f"{url}/below/a%20path", "the-token") as control:
        assert (await control.heartbeat(BEAT)).orphans == ["s-1"]
        assert (await control.heartbeat(BEAT)).orphans == ["s-1"]
    assert server.connections == 1, "the connection is used again"
    head, body = server.requests[1]
    assert head.startswith(b"POST /below/a%20path/v1/leases/heartbeat HTTP/1.1\r\n")
    lines = {line.lower() for line in head.decode().split("\r\n")}
    assert {"authorization: bearer the-token", "user-agent: rollyard-client"} <= lines
    assert {"accept: application/json", "content-type: application/json"} <= lines
    assert HeartbeatRequest.model_validate_json(body) == BEAT


async def test_a_compressed_answer_is_read() -> None:
    import gzip

    packed = http("200 OK", gzip.compress(EMPTY), "Content-Encoding: gzip")
    async with listening(Server(packed)) as url, RestControlPlane(url, "t") as control:
        assert (await control.heartbeat(BEAT)).orphans == ["s-1"]


@pytest.mark.parametrize(
    ("answer", "kind", "pause"),
    [
        (http("503 Service Unavailable", b"{}", "Retry-After: 7"), ControlPlaneUnavailable, 7.0),
        (http("500 Internal Server Error", b"no json"), ControlPlaneUnavailable, None),
        (http("403 Forbidden", b'{"detail": "no", "reason": "Forbidden"}'), ControlPlaneRefused, None),
        (http("307 Temporary Redirect", b"", "Location: http://127.0.0.1:1/"), ControlPlaneRefused, None),
        (http("200 OK", EMPTY, length=len(EMPTY) + 9), ControlPlaneUnavailable, None),
        (http("200 OK", b'{"lost": 1}'), ControlPlaneUnavailable, None),
        (http("200 OK", b"<html>"), ControlPlaneUnavailable, None),
        (b"not http at all\r\n\r\n", ControlPlaneUnavailable, None),
        (b"", ControlPlaneUnavailable, None),
    ],
)
async def test_what_is_no_success_is_an_error_of_the_same_kind(
    answer: bytes, kind: type[Exception], pause: float | None
) -> None:
    server = Server(*([answer] if answer else []))
    serve = server.serve

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A truncated answer ends with the connection.
        task = asyncio.ensure_future(serve(reader, writer))
        while not server.requests or server.answers:  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.005)
        writer.close()
        await task

    server.serve = once
    async with listening(server) as url, RestControlPlane(url, "t") as control:
        with pytest.raises(kind) as caught:
            await control.heartbeat(BEAT)
    if isinstance(caught.value, ControlPlaneUnavailable):
        assert caught.value.retry_after == pause
    assert len(server.requests) == 1, "the worker's own loops send a call again"


async def test_nobody_listens(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:1", socket_url(str(tmp_path / "absent"))):
        async with RestControlPlane(url, "t") as control:
            with pytest.raises(ControlPlaneUnavailable, match="no server at"):
                await control.heartbeat(BEAT)


async def test_a_unix_socket(tmp_path: Path) -> None:
    server = Server(http("200 OK", EMPTY))
    path = str(tmp_path / "s")
    listener = await asyncio.start_unix_server(server.serve, path)
    async with listener, RestControlPlane(socket_url(path), "t") as control:
        assert (await control.heartbeat(BEAT)).orphans == ["s-1"]


async def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "MAX_ANSWER_BYTES", len(EMPTY) - 1)
    async with listening(Server(http("200 OK", EMPTY))) as url, RestControlPlane(url, "t") as control:
        with pytest.raises(ControlPlaneRefused, match="longer than"):
            await control.heartbeat(BEAT)


async def test_authorities_that_cannot_be_read_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLYARD_CA_FILE", str(tmp_path / "absent"))
    async with RestControlPlane("https://127.0.0.1:1", "t") as control:
        with pytest.raises(ControlPlaneRefused, match="ROLLYARD_CA_FILE"):
            control.prepare()


async def test_a_server_that_does_not_answer_is_given_up_in_time() -> None:
    server = Server(b"HTTP/1.1 200 OK\r\n")
    async with listening(server) as url, RestControlPlane(url, "t", timeout=0.1) as control:
        async with asyncio.timeout(patience(20)):
            with pytest.raises(ControlPlaneUnavailable, match="Timeout"):
                await control.heartbeat(BEAT)
            await server.ended.wait()


async def test_a_cancelled_call_closes_its_connection() -> None:
    """The control plane then grants no leases to a worker that has gone."""
    server = Server(b"HTTP/1.1 200 OK\r\n")
    async with listening(server) as url, RestControlPlane(url, "t") as control:
        ask = LeaseRequest(worker="w", node="n", capacity={"init": 1}, wait=20)
        call = asyncio.create_task(control.lease(ask))
        async with asyncio.timeout(patience(20)):
            while not server.requests:  # noqa: ASYNC110 (nothing tells of it)
                await asyncio.sleep(0.005)
            call.cancel()
            await server.ended.wait()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate of 127.0.0.1 and its key."""
    made = tmp_path / "tls.crt", tmp_path / "tls.key"
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "2", "-subj", "/CN=rollyard", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-out", str(made[0]), "-keyout", str(made[1])]
    subprocess.run([*new, *names, *files], check=True, capture_output=True, timeout=patience(30))
    return made


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_only_a_trusted_certificate_is_accepted(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(http("200 OK", EMPTY))
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(*certificate)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=own)
    url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        async with RestControlPlane(url, "t") as control:
            with pytest.raises(ControlPlaneUnavailable, match=r"(?i)certificate"):
                await control.heartbeat(BEAT)
        assert not server.requests, "no token is sent before the server is known"
        monkeypatch.setenv("ROLLYARD_CA_FILE", str(certificate[0]))
        async with RestControlPlane(url, "t") as control:
            assert (await control.heartbeat(BEAT)).orphans == ["s-1"]
