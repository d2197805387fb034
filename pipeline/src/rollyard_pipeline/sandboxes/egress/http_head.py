"""The head of a request to a proxy: CONNECT, or a request with an absolute URL (RFC 9112)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from rollyard_crds.fields.allowed_hosts import host_name

from rollyard_pipeline.errors import WorkerError

MAX_HEAD: Final = 32 * 1024  # bytes
_MAX_FIELDS: Final = 128
_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_FIELD: Final = re.compile(rf"({_TOKEN}):([^\x00-\x08\x0a-\x1f\x7f]*+)")
_LINE: Final = re.compile(rf"({_TOKEN}) ([!-~]+) HTTP/1\.[01]")
_AUTHORITY: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]@/?#]+):([0-9]{1,5})")
_OF_THIS_CONNECTION: Final = frozenset(
    {
        "connection", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
        "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip


class BadHead(WorkerError):
    """The request is none that the proxy takes; `status` is the status of the answer."""

    reason = "RequestRefused"

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request, as the proxy understands it."""

    host: str | None
    """The DNS name in the form in which rules compare it, or None if it is an address or no name."""
    shown: str
    """The host as the request wrote it."""
    port: int
    forwarded: bytes
    """The head that is sent to the server. It is empty for CONNECT."""
    length: int = 0
    """The number of bytes of the body."""

    @property
    def connects(self) -> bool:
        """Whether the method is CONNECT."""
        return not self.forwarded


def parse_head(data: bytes) -> RequestHead:
    """Return the request whose head, with the empty line at its end, is `data`.

    Raises:
        BadHead: It is malformed, could be read in several ways, or is of a kind that is not taken.
    """
    first, *lines = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    found = _LINE.fullmatch(first)
    if found is None:
        raise BadHead("the request line is malformed")
    if len(lines) > _MAX_FIELDS:
        raise BadHead(f"the request has more than {_MAX_FIELDS} fields", 431)
    fields = []
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise BadHead("a field of the request is malformed")
        fields.append((field[1], field[2].strip(" \t")))
    method, target = found[1], found[2]
    if method == "CONNECT":
        authority = _AUTHORITY.fullmatch(target)
        if authority is None:
            raise BadHead("CONNECT needs HOST:PORT")
        return RequestHead(host_name(authority[1]), authority[1], _port(authority[2]), b"")
    return _forwarded(method, target, fields)


def _forwarded(method: str, target: str, fields: list[tuple[str, str]]) -> RequestHead:
    scheme, separator, _ = target.partition("://")
    if not separator or scheme.lower() != "http":
        raise BadHead("this is a proxy: it takes CONNECT HOST:PORT, and requests for http:// URLs")
    try:
        parts = urlsplit(target)
        shown = parts.hostname or ""
        port = _port(str(parts.port)) if parts.port is not None else 80
    except ValueError as error:
        raise BadHead("the URL is malformed") from error
    if "@" in parts.netloc or "#" in target or "\\" in target or not shown:
        raise BadHead("the URL must have a host, and neither credentials nor a fragment")
    named = {name.lower() for name, _ in fields}
    if "transfer-encoding" in named:
        raise BadHead("a request through the proxy needs Content-Length in the place of chunks", 411)
    lengths = [value for name, value in fields if name.lower() == "content-length"]
    if len(lengths) > 1 or not all(re.fullmatch("[0-9]{1,15}", value) for value in lengths):
        raise BadHead("Content-Length is malformed")
    dropped = _OF_THIS_CONNECTION | {
        token.strip().lower()
        for name, value in fields
        if name.lower() == "connection"
        for token in value.split(",")
    }
    dropped -= {"content-length"}
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = [
        f"{method} {path} HTTP/1.1",
        f"Host: {shown}" + ("" if port == 80 else f":{port}"),
        *(f"{name}: {value}" for name, value in fields if name.lower() not in dropped),
        "Connection: close",
    ]
    return RequestHead(
        host_name(shown),
        shown,
        port,
        "\r\n".join([*head, "", ""]).encode("latin-1"),
        int(lengths[0]) if lengths else 0,
    )


def _port(text: str) -> int:
    port = int(text)
    if not 0 < port < 65_536:
        raise BadHead("a port is a number from 1 to 65535")
    return port
