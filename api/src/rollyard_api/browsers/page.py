"""The files of the page, which are read into memory once, and the layer that answers the page's paths."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard_api.browsers import origins
from rollyard_api.core.hosts import HostCheck
from rollyard_api.core.problems import ApiError, NotFound, response

_NOTHING: Final = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_POLICY: Final = (
    f"{_NOTHING}; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; font-src 'none'; "
    "require-trusted-types-for 'script'"
)
"""The content security policy of the page. It permits only the files and calls of the control plane."""
DOCS_POLICY: Final = (
    f"{_NOTHING}; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'none'"
)
"""The policy of `/docs`. The style sheet of Swagger UI contains images, and its script sets markup."""
DATA_HEADERS: Final[Mapping[str, str]] = {
    # In case a browser shows data as a document.
    "Content-Security-Policy": _NOTHING,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
"""The headers of an answer that is not a document."""

MAX_FILES: Final = 256
MAX_BYTES: Final = 16 << 20
"""The largest size of all files of the page together, in bytes."""
FOREVER: Final = "public, max-age=31536000, immutable"
ASK_AGAIN: Final = "no-cache"
TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HASHED: Final = re.compile(r".+[-.][A-Za-z0-9_]{8,}\.[a-z0-9]+")
_PREFIX_META: Final = re.compile(r'(<meta name="rollyard-prefix" content=")[^"]*(")')
_ASSET: Final = re.compile(r'\b(src|href)="/?(assets/|favicon\.)')


@dataclass(frozen=True, slots=True)
class WebFile:
    """One file as it is sent."""

    body: bytes
    packed: bytes | None
    """The body compressed by gzip, or None if that saves nothing."""
    tag: str
    """The entity tag, which changes with the content."""
    headers: Mapping[str, str]

    def answer(self, headers: Headers) -> Response:
        """Return the answer to a request with these headers."""
        packed = self.packed if takes_gzip(headers.get("accept-encoding", "")) else None
        tag = f'"{self.tag}-gzip"' if packed is not None else f'"{self.tag}"'
        sent = {**self.headers, "ETag": tag, "Vary": "Accept-Encoding"}
        known = (etag.strip().removeprefix("W/") for etag in headers.get("if-none-match", "").split(","))
        if any(etag in (tag, "*") for etag in known):
            return Response(status_code=304, headers=sent)
        if packed is not None:
            sent["Content-Encoding"] = "gzip"
        return Response(self.body if packed is None else packed, headers=sent)


def web_file(name: str, body: bytes, policy: str = "") -> WebFile:
    """Return a file as it is sent.

    Args:
        name: The name of the file, whose suffix decides its type. Browsers keep a file with a hash of the
            content in its name for ever.
        body: The content.
        policy: The content security policy of a document, or "" for any other file.
    """
    packed = gzip.compress(body, 9, mtime=0)
    sent = {**DATA_HEADERS, "Content-Type": TYPES[Path(name).suffix]}
    sent["Cache-Control"] = FOREVER if not policy and _HASHED.fullmatch(name) else ASK_AGAIN
    if policy:
        sent |= {"Content-Security-Policy": policy, "Cross-Origin-Opener-Policy": "same-origin"}
    tag = hashlib.sha256(body).hexdigest()[:32]
    return WebFile(body, packed if len(packed) < len(body) else None, tag, sent)


def read_page(folder: Path, prefix: str) -> Mapping[str, WebFile]:
    """Return the page and its assets by their paths in the folder, such as `assets/app.js`.

    Args:
        folder: The folder with index.html and assets/.
        prefix: The path prefix of the page, or "".

    Raises:
        ApiError: The folder cannot be read, or holds more than is kept in memory.
    """
    files: dict[str, WebFile] = {}
    total = 0
    try:
        # Links could lead elsewhere.
        paths = [
            path
            for path in (*folder.glob("*"), *folder.glob("assets/*"))
            if path.suffix in TYPES and path.is_file() and not path.is_symlink()
        ]
        if len(paths) > MAX_FILES:
            raise _unusable(f"{folder}: the page has more than {MAX_FILES} files")
        for path in paths:
            body = path.read_bytes()
            total += len(body)
            if total > MAX_BYTES:
                raise _unusable(f"{folder}: the page's files have more than {MAX_BYTES} bytes")
            name = path.relative_to(folder).as_posix()
            if name == "index.html":
                files[name] = web_file(name, _filled(body, prefix), PAGE_POLICY)
            else:
                files[name] = web_file(name, body)
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"the files of the page cannot be read: {error}") from error
    return files


def _unusable(problem: str) -> ApiError:
    return ApiError(problem, reason="PageUnusable")


def _filled(document: bytes, prefix: str) -> bytes:
    """Return index.html with the path prefix in its meta element and before the paths of its assets."""
    escaped = html.escape(prefix, quote=True)
    text = document.decode("utf-8")
    text = _PREFIX_META.sub(lambda match: f"{match[1]}{escaped}{match[2]}", text)
    return _ASSET.sub(lambda match: f'{match[1]}="{escaped}/{match[2]}', text).encode()


def takes_gzip(header: str) -> bool:
    """Return whether an Accept-Encoding header accepts gzip."""
    for part in header.lower().split(","):
        name, _, parameters = part.partition(";")
        if name.strip() in ("gzip", "*"):
            weight = parameters.replace(" ", "").removeprefix("q=")
            return not parameters or not re.fullmatch(r"0(\.0{0,3})?", weight)
    return False


_DOCUMENT_PATH: Final = re.compile(rb"/|/jobs/[^/]+/[^/]+(?:/(?:groups|rollouts)/[^/]+)?/?")
"""The paths of the page. They are matched before they are decoded, because a name of a task may hold an
encoded slash."""
_ASSET_PATH: Final = re.compile(rb"/(assets/[A-Za-z0-9_][A-Za-z0-9._-]*|favicon\.(?:ico|svg|png))")


class Front:
    """An ASGI application that answers the paths of the page, and passes all others on.

    The first request for the page reads and compresses its files, in a thread, because most control planes
    are asked for the page long after their start, and a start must be quick.

    Args:
        app: The application that answers all other paths.
        hosts: The Host headers under which browsers may open the page.
        prefix: The path below which browsers find the page and the calls, or "" for the root.
        folder: The folder of the page.
    """

    def __init__(self, app: ASGIApp, hosts: HostCheck, prefix: str, folder: Path) -> None:
        self._app = app
        self._hosts = hosts
        self._prefix = prefix
        self._raw_prefix = prefix.encode()
        self._folder = folder
        self._reading = asyncio.Lock()
        self._files: Mapping[str, WebFile] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI specifies it."""
        if scope["type"] == "http":
            if self._prefix:
                scope = self._without_prefix(scope)
            if not scope["path"].startswith("/v1/"):
                raw: bytes = scope.get("raw_path") or scope["path"].encode()
                asset = _ASSET_PATH.fullmatch(raw)
                if asset is not None or _DOCUMENT_PATH.fullmatch(raw):
                    answer = await self._answer(scope, "index.html" if asset is None else asset[1].decode())
                    await answer(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _without_prefix(self, scope: Scope) -> Scope:
        """Return the request without the prefix, which a proxy may have removed already."""
        path: str = scope["path"]
        raw: bytes = scope.get("raw_path") or path.encode()
        is_below = path == self._prefix or path.startswith(f"{self._prefix}/")
        if not is_below or not (raw == self._raw_prefix or raw.startswith(self._raw_prefix + b"/")):
            return scope
        shorter = {"path": path[len(self._prefix) :] or "/", "raw_path": raw[len(self._raw_prefix) :] or b"/"}
        return {**scope, **shorter}

    async def _answer(self, scope: Scope, name: str) -> Response:
        try:
            headers = origins.BrowserHeaders(scope)
            origins.check_host(headers, self._hosts)
            if not headers.is_read:
                raise ApiError(
                    f"the page does not take {scope['method']}",
                    status=405,
                    reason="MethodNotAllowed",
                    headers={"Allow": "GET, HEAD"},
                )
            async with self._reading:
                if self._files is None:
                    self._files = await asyncio.to_thread(read_page, self._folder, self._prefix)
            if name in self._files:
                return self._files[name].answer(headers)
            if name == "index.html":
                raise NotFound(
                    "this installation lacks the page (rollyard_api/page/index.html); install Rollyard from "
                    "its wheel, or build the page as CONTRIBUTING.md says",
                    reason="PageNotBuilt",
                )
            raise NotFound(f"there is no {name} in the page; reload it, because it may have been upgraded")
        except ApiError as error:
            return response(error)
