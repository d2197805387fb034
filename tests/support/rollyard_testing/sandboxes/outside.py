"""A small world outside of sandboxes: web servers on loopback, and names that lead to them.

The servers are on 127.0.0.2 and 127.0.0.3, which count as public here. Other addresses are judged as usual.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollyard_crds.rolloutjob import SandboxSpec
from rollyard_pipeline.sandboxes.egress.destinations import Address, why_refused
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.egress.limits import EgressLimits

from rollyard_testing.pace import patience

PUBLIC = "127.0.0.2"
PLANE = "127.0.0.3"
HOST = "pkgs.example.org"
# A program without tools: it sends its standard input to the proxy, and prints all that comes back.
TALK = 'exec 3<>"/dev/tcp/127.0.0.1/${http_proxy##*:}" && cat >&3 && cat <&3'


class Outside:
    """Two web servers, what they have received, and the addresses of names."""

    def __init__(self) -> None:
        self.port = 0
        """The port of the plain server, at both addresses."""
        self.tls_port = 0
        """The port of the server that speaks TLS."""
        self.folder = Path()
        """The folder with the certificate `tls.crt` of `HOST`."""
        self.names: dict[str, list[list[str]]] = {HOST: [[PUBLIC]]}
        """The addresses of each name: one list for each time that it is resolved, the last one for good."""
        self.resolved: list[str] = []
        self.received: list[bytes] = []
        self.arrived = asyncio.Event()
        """A request has come."""
        self.body = b"reached"
        self.at_once = self.most_at_once = 0
        self.pause = 0.0

    async def resolve(self, host: str) -> list[Address]:
        self.resolved.append(host)
        answers = self.names.get(host)
        if answers is None:
            raise OSError(f"{host} is unknown")
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [ipaddress.ip_address(text) for text in found]

    def egress(self, *urls: str, limits: EgressLimits | None = None) -> Egress:
        """Return a worker's egress into this world, in which the URLs are those of the installation."""
        return Egress(urls, limits, self.resolve, self._check)

    def spec(self, *hosts: str) -> SandboxSpec:
        """Return the part of a job that allows these hosts, which are this world's web servers by default."""
        usual = (f"{HOST}:{self.port}", f"{HOST}:{self.tls_port}")
        return SandboxSpec.model_validate({"network": "allowlist", "allowedHosts": list(hosts or usual)})

    @staticmethod
    def _check(address: Address) -> str:
        return "" if str(address) in (PUBLIC, PLANE) else why_refused(address)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            async with asyncio.timeout(patience(20)):
                head = await reader.readuntil(b"\r\n\r\n")
                size = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                self.received.append(head + await reader.readexactly(int(size or 0)))
                self.arrived.set()
                await asyncio.sleep(self.pause)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self.body) + self.body)
                await writer.drain()
                writer.close()
        except asyncio.IncompleteReadError as error:
            if error.partial:
                self.received.append(error.partial)
        except (OSError, TimeoutError):
            return
        finally:
            self.at_once -= 1
            writer.close()

    @asynccontextmanager
    async def serving(self, folder: Path) -> AsyncIterator[Outside]:
        """Serve until the context ends."""
        self.folder = folder
        made = certificate(folder)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*made)
        plain = await asyncio.start_server(self._serve, PUBLIC, 0)
        self.port = plain.sockets[0].getsockname()[1]
        plane = await asyncio.start_server(self._serve, PLANE, self.port)
        tls = await asyncio.start_server(self._serve, PUBLIC, 0, ssl=context)
        self.tls_port = tls.sockets[0].getsockname()[1]
        async with plain, plane, tls:
            yield self


def certificate(folder: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate of `HOST` and its key."""
    made = folder / "tls.crt", folder / "tls.key"
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "2", "-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"]
    files = ["-out", str(made[0]), "-keyout", str(made[1])]
    subprocess.run([*new, *names, *files], check=True, capture_output=True, timeout=patience(30))
    return made


def client_hello(name: str | None) -> bytes:
    """Return the first bytes of a TLS client that asks for a server of this name."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("no server has answered")


def with_extension(hello: bytes, kind: int, content: bytes) -> bytes:
    """Return a ClientHello in one record with another extension at its end."""
    body = bytearray(hello[9:])
    at = 2 + 32
    at += 1 + body[at]
    at += 2 + int.from_bytes(body[at : at + 2])
    at += 1 + body[at]
    size = int.from_bytes(body[at : at + 2])
    extension = kind.to_bytes(2) + len(content).to_bytes(2) + content
    body[at : at + 2] = (size + len(extension)).to_bytes(2)
    message = bytes([1]) + (len(body) + len(extension)).to_bytes(3) + bytes(body) + extension
    return hello[:3] + len(message).to_bytes(2) + message
