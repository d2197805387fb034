"""The outermost layer: it takes the path prefix away, and answers the paths of the page."""

from __future__ import annotations

import re
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard_api.browsers import origins
from rollyard_api.browsers.config import BrowserSettings
from rollyard_api.browsers.files import PageFiles
from rollyard_api.core.problems import ApiError, MethodNotAllowed, NotFound, response

_SEGMENT: Final = rb"[^/]+"
_DOCUMENT: Final = re.compile(
    rb"/|/jobs/%(s)s/%(s)s/?|/jobs/%(s)s/%(s)s/(?:groups|rollouts)/%(s)s/?" % {b"s": _SEGMENT}
)
"""The paths of the page. They are matched before they are decoded, because a name of a task may hold an
encoded slash."""
_ASSET: Final = re.compile(rb"/(assets/[A-Za-z0-9_][A-Za-z0-9._-]*|favicon\.(?:ico|svg|png))")


class PageNotBuilt(NotFound):
    """This installation lacks the page's files."""

    reason = "PageNotBuilt"


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
                is_document = _DOCUMENT.fullmatch(raw) is not None
                asset = None if is_document else _ASSET.fullmatch(raw)
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
