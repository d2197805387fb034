"""Uploads, which are files that jobs name by their SHA-256 instead of by a URL."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request
from rollyard_crds.base import NAME_PATTERN
from starlette.responses import Response

from rollyard_api.core.problems import NotFound
from rollyard_api.jobs import blobs
from rollyard_api.routes.common import Plane, StrictRoute, answer

PREFIX: Final = "/v1/blobs/"

router = APIRouter(prefix=PREFIX.rstrip("/"), tags=["blobs"], route_class=StrictRoute)

Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]
# No job can have a namespace with another name, so no job could use such an upload.
Namespace = Annotated[str, Query(pattern=NAME_PATTERN, max_length=63)]

_RAW: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def _document(namespace: str, sha256: str) -> dict[str, Any]:
    return {"namespace": namespace, "sha256": sha256, "url": f"blob:sha256:{sha256}"}


@router.put("/{sha256}", openapi_extra=_RAW)
async def put_blob(
    request: Request, plane: Plane, sha256: Sha256, namespace: Namespace = "default"
) -> Response:
    """Upload a file: 201 if it is new, 200 if it exists, 422 if its SHA-256 differs. Repeats are harmless.

    The answer's `url` is used as `spec.tasks.url` of jobs of this namespace. An upload that no job uses is
    removed after a while. A HEAD request restarts that time.
    """
    created = await plane.uploads.take(namespace, sha256, request.stream())
    return answer(_document(namespace, sha256), 201 if created else 200)


@router.head("/{sha256}", include_in_schema=False)
@router.get("/{sha256}")
async def get_blob(plane: Plane, sha256: Sha256, namespace: Namespace = "default") -> Response:
    """Return the size of an upload in bytes, never its content; 404 if the namespace does not have it."""
    touch = partial(blobs.touch, namespace=namespace, sha256=sha256)
    row = await plane.database.write(touch, durable=False)
    if row is None:
        raise NotFound(f"this namespace has no upload sha256:{sha256}", reason="BlobNotFound")
    return answer({**_document(namespace, sha256), "size": row.size})
