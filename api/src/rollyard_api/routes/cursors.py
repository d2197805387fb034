"""Cursors that the readers of a job's results acknowledge under a name, and resume from."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field
from rollyard_crds.base import Model
from starlette.responses import Response

from rollyard_api.core.cursors import MAX_LENGTH
from rollyard_api.routes.common import Named, StrictRoute, answer, body_schema
from rollyard_api.trajectories import acknowledged

router = APIRouter(prefix="/v1/rolloutjobs", tags=["cursors"], route_class=StrictRoute)

CursorName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)]


class Acknowledge(Model, strict=True):
    """A cursor that a reader has dealt with."""

    cursor: Annotated[str, Field(min_length=1, max_length=MAX_LENGTH)]
    """The cursor after the last result that need not be read again."""
    expected: Annotated[str, Field(max_length=MAX_LENGTH)] | None = None
    """The cursor that it replaces, or "" for none; default: whichever is kept."""
    rewind: bool = False
    """Whether the cursor may move backwards."""


@router.get("/{name}/cursors")
async def list_cursors(job: Named) -> Response:
    """List the acknowledged cursors of a job: {name, kind, cursor, movedAt}."""
    return answer({"items": await job.read(acknowledged.listed)})


@router.get("/{name}/cursors/{cursor}")
async def get_cursor(job: Named, cursor: CursorName) -> Response:
    """Return the cursor that was last acknowledged under this name."""
    return answer(await job.read(acknowledged.one, cursor))


@router.put("/{name}/cursors/{cursor}", openapi_extra=body_schema(Acknowledge))
async def acknowledge(job: Named, cursor: CursorName) -> Response:
    """Acknowledge the results before a cursor: 200 kept, 409 it would move backwards or was moved by another.

    A repeat with the same cursor changes nothing.
    """
    asked = await job.body(Acknowledge)
    return answer(
        await job.write(acknowledged.acknowledge, cursor, asked.cursor, asked.expected, rewind=asked.rewind)
    )


@router.delete("/{name}/cursors/{cursor}")
async def delete_cursor(job: Named, cursor: CursorName) -> Response:
    """Forget a cursor."""
    await job.write(acknowledged.forget, cursor)
    return answer({"name": cursor, "job": job.name, "namespace": job.namespace, "deleted": True})
