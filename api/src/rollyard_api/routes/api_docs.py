"""`/docs` shows the calls of the control plane, without the internet."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from rollyard_api.browsers import api_docs
from rollyard_api.routes.common import Plane

router = APIRouter(include_in_schema=False)


@router.api_route("/docs", methods=["GET", "HEAD"])
async def documents(request: Request, plane: Plane) -> Response:
    """Return the document that shows the calls."""
    return api_docs.document(plane.settings.browsers.path_prefix).answer(request.headers)


@router.api_route("/docs/{name}", methods=["GET", "HEAD"])
async def document_asset(request: Request, name: str) -> Response:
    """Return a file of the document."""
    # The first call reads and packs the files.
    return (await asyncio.to_thread(api_docs.asset, name)).answer(request.headers)
