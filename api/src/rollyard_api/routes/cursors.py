"""Cursors that the readers of a job's results acknowledge under a name, and resume from."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from rollyard_api.core.codec import validated
from rollyard_api.core.cursors import MAX_LENGTH
from rollyard_api.routes.common import Namespace, Plane, StrictRoute, answer, body_of, body_schema
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.trajectories import acknowledged

router = APIRouter(prefix="/v1/rolloutjobs", tags=["cursors"], route_class=StrictRoute)

CursorName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)]


class Acknowledge(BaseModel):
    """A cursor that a reader has dealt with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    cursor: Annotated[str, Field(min_length=1, max_length=MAX_LENGTH)]
    """The cursor after the last result that need not be read again."""
    expected: Annotated[str, Field(max_length=MAX_LENGTH)] | None = None
    """The cursor that it replaces, or "" for none; default: whichever is kept."""
    rewind: bool = False
    """Whether the cursor may move backwards."""


@router.get("/{name}/cursors")
async def list_cursors(plane: Plane, name: str, namespace: Namespace = "default") -> Response:
    """List the acknowledged cursors of a job: {name, kind, cursor, movedAt}."""
    items = await plane.database.read(
        lambda conn: acknowledged.listed(conn, job_rows.find(conn, namespace, name))
    )
    return answer({"items": items})


@router.get("/{name}/cursors/{cursor}")
async def get_cursor(
    plane: Plane, name: str, cursor: CursorName, namespace: Namespace = "default"
) -> Response:
    """Return the cursor that was last acknowledged under this name."""
    found = await plane.database.read(
        lambda conn: acknowledged.one(conn, job_rows.find(conn, namespace, name), cursor)
    )
    return answer(found)


@router.put("/{name}/cursors/{cursor}", openapi_extra=body_schema(Acknowledge))
async def acknowledge(
    request: Request, plane: Plane, name: str, cursor: CursorName, namespace: Namespace = "default"
) -> Response:
    """Acknowledge the results before a cursor: 200 kept, 409 it would move backwards or was moved by another.

    A repeat with the same cursor changes nothing.
    """
    asked = validated(Acknowledge, await body_of(request))

    def change(tx: Transaction) -> dict[str, Any]:
        job = job_rows.find_locked(tx, namespace, name)
        return acknowledged.acknowledge(tx, job, cursor, asked.cursor, asked.expected, rewind=asked.rewind)

    return answer(await plane.database.write(change))


@router.delete("/{name}/cursors/{cursor}")
async def delete_cursor(
    plane: Plane, name: str, cursor: CursorName, namespace: Namespace = "default"
) -> Response:
    """Forget a cursor."""
    await plane.database.write(
        lambda tx: acknowledged.forget(tx, job_rows.find_locked(tx, namespace, name), cursor)
    )
    return answer({"name": cursor, "job": name, "namespace": namespace, "deleted": True})
