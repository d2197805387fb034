"""The files of the page, which are read into memory once, and the layer that answers the page's paths."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard_api.browsers import origins
from rollyard_api.browsers.config import BrowserSettings
from rollyard_api.core.problems import ApiError, MethodNotAllowed, NotFound, response

_NOTHING: Final = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_POLICY: Final = (
    f"{_NOTHING}; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; font-src 'none'; "
    "require-trusted-types-for 'script'"
)
"""The content security policy of the page. It permits the files and calls of the control plane alone."""
DOCS_POLICY: Final = (
    f"{_NOTHING}; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'none'"
)
"""The policy of `/docs`. The style sheet of Swagger UI has images in itself, and its script sets markup."""
DATA_POLICY: Final = _NOTHING
"""The policy of answers that are data, in case a browser shows one as a document."""

COMMON: Final[tuple[tuple[str, str], ...]] = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("X-Frame-Options", "DENY"),
)
"""The headers of every answer to a browser."""
DOCUMENT: Final = (("Cross-Origin-Opener-Policy", "same-origin"),)
"""The headers of documents in addition."""


def data_headers() -> dict[str, str]:
    """Return the headers of an answer that is no document."""
    return {"Content-Security-Policy": DATA_POLICY, **dict(COMMON)}


MAX_FILES: Final = 256
MAX_BYTES: Final = 16 << 20
"""The largest size of all files of the page together, in bytes."""
WORTH_PACKING: Final = 256
"""The smallest size of a file in bytes that is packed."""
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
    ".woff2": "font/woff2",
}
_PACKED: Final = frozenset({".css", ".html", ".js", ".json", ".svg", ".txt"})
_HASHED: Final = re.compile(r".+[-.][A-Za-z0-9_]{8,}\.[a-z0-9]+")
_PREFIX_META: Final = re.compile(r'(<meta name="rollyard-prefix" content=")[^"]*(")')
_ASSET: Final = re.compile(r'\b(src|href)="/?(assets/|favicon\.)')


class PageUnusable(ApiError):
    """The folder of the page cannot be read, or holds more than is kept in memory."""


@dataclass(frozen=True, slots=True)
class WebFile:
    """One file as it is sent."""

    body: bytes
    packed: bytes | None
    """The body packed by gzip, or None if that saves nothing."""
    tag: str
    """The entity tag, which changes with the content."""
    headers: tuple[tuple[str, str], ...]

    def answer(self, given: Mapping[str, str]) -> Response:
        """Return the answer to a request with these headers, whose names are in lower case."""
        packed = self.packed if takes_gzip(given.get("accept-encoding", "")) else None
        tag = f'"{self.tag}-gzip"' if packed is not None else f'"{self.tag}"'
        sent = {**dict(self.headers), "ETag": tag, "Vary": "Accept-Encoding"}
        known = (one.strip().removeprefix("W/") for one in given.get("if-none-match", "").split(","))
        if any(one in (tag, "*") for one in known):
            return Response(status_code=304, headers=sent)
        if packed is not None:
            sent["Content-Encoding"] = "gzip"
        return Response(self.body if packed is None else packed, headers=sent)


def web_file(name: str, body: bytes, policy: str = "") -> WebFile:
    """Return a file as it is sent.

    Args:
        name: The name of the file, whose ending decides its type. A name with a hash of the content in it is
            kept by browsers for ever.
        body: The content.
        policy: The content security policy of a document, or "" for any other file.
    """
    ending = Path(name).suffix
    packed = gzip.compress(body, 9, mtime=0) if ending in _PACKED and len(body) >= WORTH_PACKING else None
    sent = data_headers() | ({"Content-Security-Policy": policy, **dict(DOCUMENT)} if policy else {})
    sent["Content-Type"] = TYPES[ending]
    sent["Cache-Control"] = FOREVER if not policy and _HASHED.fullmatch(name) else ASK_AGAIN
    tag = hashlib.sha256(body).hexdigest()[:32]
    return WebFile(body, packed, tag, tuple(sent.items()))


class PageFiles:
    """The page and its assets.

    The first request reads and packs them, in a thread, because most control planes are asked for the page
    long after their start, and a start must be quick.

    Args:
        folder: The folder with index.html and assets/.
        prefix: The path prefix of the page, or "".
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._lock = asyncio.Lock()
        self._files: Mapping[str, WebFile] | None = None

    async def get(self, path: str) -> WebFile | None:
        """Return a file by its path in the folder, such as `assets/app.js`, or None if there is none.

        Raises:
            PageUnusable: The folder cannot be read, or holds more than is kept in memory.
        """
        if self._files is None:
            async with self._lock:
                if self._files is None:
                    self._files = await asyncio.to_thread(self._read)
        return self._files.get(path)

    def _read(self) -> Mapping[str, WebFile]:
        found: dict[str, WebFile] = {}
        total = 0
        try:
            for path in _paths(self._folder):
                body = path.read_bytes()
                total += len(body)
                if total > MAX_BYTES:
                    raise PageUnusable(f"{self._folder}: the page's files have more than {MAX_BYTES} bytes")
                name = path.relative_to(self._folder).as_posix()
                is_document = name == "index.html"
                content = _filled(body, self._prefix) if is_document else body
                found[name] = web_file(name, content, PAGE_POLICY if is_document else "")
        except (OSError, UnicodeDecodeError) as error:
            raise PageUnusable(f"the files of the page cannot be read: {error}") from error
        return found


def _paths(folder: Path) -> Sequence[Path]:
    """Return the files of the folder and of its folder assets, without links, which could lead elsewhere."""
    paths = sorted([*folder.glob("*"), *folder.glob("assets/*")])
    files = [path for path in paths if path.suffix in TYPES and path.is_file() and not path.is_symlink()]
    if len(files) > MAX_FILES:
        raise PageUnusable(f"{folder}: the page has more than {MAX_FILES} files")
    return files


def _filled(document: bytes, prefix: str) -> bytes:
    """Return index.html with the path prefix in its meta element, and before the paths of its assets."""
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


_SEGMENT: Final = rb"[^/]+"
_DOCUMENT_PATH: Final = re.compile(
    rb"/|/jobs/%(s)s/%(s)s/?|/jobs/%(s)s/%(s)s/(?:groups|rollouts)/%(s)s/?" % {b"s": _SEGMENT}
)
"""The paths of the page. They are matched before they are decoded, because a name of a task may hold an
encoded slash."""
_ASSET_PATH: Final = re.compile(rb"/(assets/[A-Za-z0-9_][A-Za-z0-9._-]*|favicon\.(?:ico|svg|png))")


class PageNotBuilt(NotFound):
    """This installation lacks the page's files."""


class Front:
    """An ASGI application that answers the paths of the page, and passes all others on.

    Args:
        app: What answers all other paths.
        settings: The prefix, the folder of the page, and the names under which browsers may open it.
    """

    def __init__(self, app: ASGIApp, settings: BrowserSettings) -> None:
        self._app = app
        self._prefix = settings.path_prefix
        self._raw_prefix = settings.path_prefix.encode()
        self._hosts = settings.hosts
        self._files = PageFiles(settings.page_folder, settings.path_prefix)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI specifies it."""
        if scope["type"] == "http":
            if self._prefix:
                scope = self._without_prefix(scope)
            if not scope["path"].startswith("/v1/"):
                raw: bytes = scope.get("raw_path") or scope["path"].encode()
                is_document = _DOCUMENT_PATH.fullmatch(raw) is not None
                asset = None if is_document else _ASSET_PATH.fullmatch(raw)
                if is_document or asset is not None:
                    name = "index.html" if asset is None else asset[1].decode()
                    answer = await self._answer(scope, name)
                    await answer(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _without_prefix(self, scope: Scope) -> Scope:
        """Return the request without the prefix. One without it, as from a proxy that removes it, stays."""
        path: str = scope["path"]
        raw: bytes = scope.get("raw_path") or path.encode()
        is_below = path == self._prefix or path.startswith(f"{self._prefix}/")
        if not is_below or not (raw == self._raw_prefix or raw.startswith(self._raw_prefix + b"/")):
            return scope
        shorter = {"path": path[len(self._prefix) :] or "/", "raw_path": raw[len(self._raw_prefix) :] or b"/"}
        return {**scope, **shorter}

    async def _answer(self, scope: Scope, name: str) -> Response:
        try:
            given = origins.headers_of(scope)
            origins.check_host(given, self._hosts)
            if not given.is_read:
                raise MethodNotAllowed(
                    f"the page does not take {scope['method']}", headers={"Allow": "GET, HEAD"}
                )
            found = await self._files.get(name)
            if found is not None:
                sent = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
                return found.answer(sent)
            if name == "index.html":
                raise PageNotBuilt(
                    "this installation lacks the page (rollyard_api/page/index.html); install Rollyard from "
                    "its wheel, or build the page as CONTRIBUTING.md says"
                )
            raise NotFound(f"there is no {name} in the page; reload it, because it may have been upgraded")
        except ApiError as error:
            return response(error)
