"""The files of `/docs`: Swagger UI from an installed package, and the document that starts it.

Nothing is loaded from the internet, and no script stands in the document, because the content security policy
permits neither.
"""

from __future__ import annotations

import asyncio
import html
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from rollyard_api.browsers.page import DOCS_POLICY, WebFile, web_file
from rollyard_api.core.problems import NotFound
from rollyard_api.routes.common import Plane

router = APIRouter(include_in_schema=False)

PACKAGE: Final = "fastapi_swagger"
"""The package with the files of Swagger UI. Its code is not used, and not imported."""
_SHIPPED: Final = ("swagger-ui.css", "swagger-ui-bundle.js")
_OWN: Final = "start.js"
_DOCUMENT: Final = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="rollyard-prefix" content="{prefix}">
    <title>Rollyard: the calls of the control plane</title>
    <link rel="stylesheet" href="{prefix}/docs/swagger-ui.css">
    <script src="{prefix}/docs/swagger-ui-bundle.js" defer></script>
    <script src="{prefix}/docs/start.js" defer></script>
  </head>
  <body>
    <div id="docs"></div>
    <noscript>These pages need JavaScript. The calls are described at {prefix}/openapi.json, too.</noscript>
  </body>
</html>
"""


@lru_cache(maxsize=len(_SHIPPED) + 1)
def asset(name: str) -> WebFile:
    """Return a file that the document names.

    Raises:
        NotFound: The document names no such file, or the package with it is not installed (the reason
            DocsNotInstalled).
    """
    if name == _OWN:
        return web_file(name, (Path(__file__).parent / "docs" / name).read_bytes())
    if name not in _SHIPPED:
        raise NotFound(f"there is no /docs/{name[:200]}")
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "resources" / name
        if path.is_file():
            return web_file(name, path.read_bytes())
    raise NotFound(
        "this installation lacks Swagger UI; `pip install 'rollyard[api]'` installs it, and "
        "/openapi.json describes the calls without it",
        reason="DocsNotInstalled",
    )


@router.api_route("/docs", methods=["GET", "HEAD"])
async def documents(request: Request, plane: Plane) -> Response:
    """Return the document that shows the calls."""
    prefix = html.escape(plane.settings.browsers.path_prefix, quote=True)
    return web_file("docs.html", _DOCUMENT.format(prefix=prefix).encode(), DOCS_POLICY).answer(
        request.headers
    )


@router.api_route("/docs/{name}", methods=["GET", "HEAD"])
async def document_asset(request: Request, name: str) -> Response:
    """Return a file of the document."""
    # The first call reads and packs the files.
    return (await asyncio.to_thread(asset, name)).answer(request.headers)
