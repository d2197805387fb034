"""Probes and metrics, which need no token and reveal no secrets."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from rollyard_api.core.problems import Unavailable
from rollyard_api.routes.common import Plane

router = APIRouter(tags=["probes"])


@router.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """Return "ok" if the process answers."""
    return "ok"


@router.get("/readyz", response_class=PlainTextResponse)
async def readyz(plane: Plane) -> str:
    """Return "ok" if the database answers too; 503 otherwise, and while starting or shutting down."""
    if not plane.ready or plane.bus.closing:
        raise Unavailable("starting or shutting down")
    await plane.database.read(lambda conn: conn.exec_driver_sql("SELECT 1").scalar())
    return "ok"


@router.get("/metrics")
async def metrics(plane: Plane) -> Response:
    """Return the metrics in Prometheus text format."""
    text = await plane.database.read(plane.metrics.render)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
