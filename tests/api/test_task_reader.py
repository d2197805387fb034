"""The list of task sources, and the reader behind it: where it connects, who waits, and for how long."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import httpcore
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.problems import ApiError, Invalid, LimitReached
from rollyard_api.jobs import source_readers
from rollyard_api.jobs.allow_lists import AllowList, blob_of
from rollyard_api.jobs.task_reader import TaskFileLimits, TaskReader
from rollyard_testing.pace import patience
from rollyard_testing.sandboxes.outside import HOST, certificate

TASK = json.dumps({"id": "a", "prompt": "1 + 1?"}).encode() + b"\n"


async def no_uploads(_namespace: str, _sha256: str) -> AsyncGenerator[bytes, None]:
    yield TASK


@contextmanager
def answering(answer: bytes, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Answer one request with these bytes, and yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                made, _ = listening.accept()
                with made if tls is None else tls.wrap_socket(made, server_side=True) as client:
                    client.recv(65_536)
                    client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(patience(30))


def reader_of(*prefixes: str, networks: tuple[str, ...] = (), **limits: Any) -> TaskReader:
    return TaskReader(AllowList.of(prefixes, networks), TaskFileLimits(**limits), no_uploads)


@pytest.mark.parametrize(
    "prefix",
    ["ftp://host/x", "memory://x", "local:///x", "file://host/x", "data", "http://a@b/", "http://b/?q", "s3://",
     "http://{namespace}.org/", "file:///x/{name}", "file:///../x", "simplecache::file:///x", "http://host:x/"],
)  # fmt: skip
def test_what_cannot_be_listed(prefix: str) -> None:
    with pytest.raises(OptionInvalid) as refused:
        AllowList.of([prefix])
    assert repr(prefix) in str(refused.value)


def test_a_network_is_one() -> None:
    with pytest.raises(OptionInvalid, match=r"such as 10\.0\.0\.0/8"):
        AllowList.of([], ["10.1.2.3/8"])


@given(st.text(alphabet="afile:/.%25\\2e@#?[]{}s3htp\u0000\n ~", max_size=40))
def test_no_text_leads_out_of_the_list(text: str) -> None:
    allowed = AllowList.of(["file:///data/x", "http://host/x", "s3://bucket/x"])
    for url in (text, f"file:///data/x{text}", f"http://host/x{text}", f"s3://bucket/x{text}"):
        try:
            source = allowed.source(url, "default")
        except Invalid:
            continue
        assert source.location.path == "/x" or source.location.path.startswith(("/x/", "/data/x"))
        assert ".." not in source.location.path.split("/")
        assert source.location.authority in ("", "host:80", "bucket")


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("10.9.1.1", True), ("10.8.1.1", False),
        ("127.0.0.1", False), ("169.254.169.254", False), ("0.0.0.0", False), ("224.0.0.1", False),
        ("255.255.255.255", False), ("192.168.1.1", False), ("100.64.0.1", False), ("::1", False),
        ("::", False),
        ("fe80::1", False), ("fd00::1", False), ("ff02::1", False), ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True), ("2002:7f00:1::", False), ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::7f00:1", False), ("fd00:ec2::254", False),
    ],
)  # fmt: skip
def test_addresses(address: str, allowed: bool) -> None:
    found = AllowList.of(["http://host/"], ["10.9.0.0/16"])
    source = found.source("http://host/x", "default")
    assert found.permits_address(source, ipaddress.ip_address(address)) is allowed


@pytest.mark.attack(
    "a listed name leads to loopback or a private address; other spellings of a host; credentials",
    boundary="control plane",
    surface="`spec.tasks.url`",
    stopped_by="hosts are compared as text, and every address is checked before it is connected to",
)
async def test_the_checked_address_is_the_one_that_is_connected_to(monkeypatch: Any) -> None:
    """A name server that answers otherwise the second time gains nothing, because there is no second time."""
    answers = [["93.184.216.34"], ["127.0.0.1"]]
    connected: list[str] = []

    async def connect(_self: Any, host: str, *_arguments: Any, **_options: Any) -> Any:
        connected.append(host)
        raise httpcore.ConnectError("refused")

    def resolve(_host: str, _port: int) -> list[Any]:
        return [ipaddress.ip_address(text) for text in answers.pop(0)]

    monkeypatch.setattr(source_readers, "_resolve", resolve)
    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    reader = reader_of("http://host/")
    with pytest.raises(Invalid, match="cannot be reached"):
        await reader.read("http://host/x", "default")
    assert connected == ["93.184.216.34"]
    with pytest.raises(Invalid, match="cannot be used"):
        await reader.read("http://host/x", "default")
    assert connected == ["93.184.216.34"]
    reader.close()


async def test_one_forbidden_address_of_several_refuses_the_host(monkeypatch: Any) -> None:
    found = [ipaddress.ip_address(text) for text in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(source_readers, "_resolve", lambda _host, _port: found)
    reader = reader_of("http://host/")
    with pytest.raises(Invalid, match="cannot be used"):
        await reader.read("http://host/x", "default")
    reader.close()


class Slow:
    """A file system that hangs until it is released, and counts what is open."""

    released: ClassVar[threading.Event]
    open: ClassVar[int] = 0

    def read(self, _size: int) -> bytes:
        Slow.released.wait(patience(60))
        return b""

    def close(self) -> None:
        Slow.open -= 1


async def test_a_source_that_hangs_keeps_its_slot_until_it_ends(monkeypatch: Any, tmp_path: Path) -> None:
    def opened(_source: Any, _allowed: Any) -> Slow:
        Slow.open += 1
        return Slow()

    Slow.released = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(source_readers, "open_file", opened)
        reader = reader_of(tmp_path.as_uri(), seconds=0.2, per_namespace=1, external=2)
        url = (tmp_path / "tasks.jsonl").as_uri()
        for namespace in ("a", "b"):
            with pytest.raises(Invalid, match=r"not read within 0\.2 seconds"):
                await reader.read(url, namespace)
        with pytest.raises(LimitReached, match="task files are being read for jobs of namespace 'a'"):
            await reader.read(url, "a")
        with pytest.raises(ApiError) as full:
            await reader.read(url, "c")
        assert full.value.status == 503
        assert full.value.headers["Retry-After"]
        assert len(await reader.read(f"blob:sha256:{'0' * 64}", "a")) == 1, "uploads are read beside them"
        Slow.released.set()
    (tmp_path / "tasks.jsonl").write_bytes(TASK)
    async with asyncio.timeout(patience(60)):
        while True:
            try:
                assert len(await reader.read(url, "a")) == 1
                break
            except LimitReached:
                await asyncio.sleep(0.01)
    reader.close()


async def test_a_bucket(monkeypatch: Any) -> None:
    monkeypatch.setattr(fsspec, "filesystem", lambda scheme: {"s3": MemoryFileSystem()}[scheme])
    MemoryFileSystem().pipe_file("/bucket/team-a/tasks.jsonl", TASK)
    MemoryFileSystem().pipe_file("/bucket/team-b/tasks.jsonl", b"secret\n")
    reader = reader_of("s3://bucket/{namespace}/")
    assert len(await reader.read("s3://bucket/team-a/tasks.jsonl", "team-a")) == 1
    with pytest.raises(Invalid, match="cannot be used"):
        await reader.read("s3://bucket/team-b/tasks.jsonl", "team-a")
    with pytest.raises(Invalid, match="line 1: not valid JSON") as refused:
        await reader.read("s3://bucket/team-b/tasks.jsonl", "team-b")
    assert "secret" not in refused.value.detail
    with pytest.raises(Invalid, match="no such object"):
        await reader.read("s3://bucket/team-a/none", "team-a")
    reader.close()


def test_a_reference_to_an_upload() -> None:
    assert blob_of(f"blob:sha256:{'0a' * 32}") == "0a" * 32
    assert blob_of("file:///x") is None


@pytest.mark.parametrize(("host", "reached"), [(HOST, True), ("another.example.org", False)])
async def test_a_certificate_is_that_of_the_name_although_an_address_is_connected_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, reached: bool
) -> None:
    file, key = certificate(tmp_path)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(file, key)
    trusting = ssl.create_default_context(cafile=str(file))
    monkeypatch.setattr(ssl, "create_default_context", lambda: trusting)
    monkeypatch.setattr(source_readers, "_resolve", lambda *_: [ipaddress.ip_address("127.0.0.1")])
    with answering(b"HTTP/1.1 200 OK\r\n\r\n" + TASK, tls=serving) as port:
        prefix = f"https://{host}:{port}/"
        reader = reader_of(prefix, networks=("127.0.0.0/8",))
        try:
            if reached:
                assert [task.id for task in await reader.read(f"{prefix}tasks", "default")] == ["a"]
            else:
                with pytest.raises(Invalid, match="the server cannot be reached"):
                    await reader.read(f"{prefix}tasks", "default")
        finally:
            reader.close()


async def test_a_redirect_to_no_url_is_a_refusal() -> None:
    with answering(b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n") as port:
        prefix = f"http://127.0.0.1:{port}/"
        reader = reader_of(prefix)
        try:
            with pytest.raises(Invalid, match="it redirects to no URL"):
                await reader.read(f"{prefix}tasks", "default")
        finally:
            reader.close()
