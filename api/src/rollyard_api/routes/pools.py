"""BackendPools, and the reports of drivers about their backends."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from rollyard_crds.backendpool import BackendPool, BackendPoolStatus, BackendStatus
from rollyard_crds.base import Model
from rollyard_crds.fields.annotations import OBJECT_UID
from rollyard_crds.reading.vocabulary import TokenizerInvalid, Vocabulary, of_file
from rollyard_crds.reading.vocabulary import find as find_tokenizer
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.backends import pools
from rollyard_api.core.problems import Invalid, NotFound
from rollyard_api.jobs import registration
from rollyard_api.routes.common import (
    Call,
    DefaultNamespace,
    Named,
    RestCall,
    StrictRoute,
    answer,
    body_schema,
)
from rollyard_api.routes.jobs import manifest_of, registered
from rollyard_api.storage import pools as pool_rows

router = APIRouter(prefix="/v1/backendpools", tags=["backendpools"], route_class=StrictRoute)


class Backends(Model):
    """All backends of a pool, as its driver reports them."""

    backends: Annotated[list[BackendStatus], Field(max_length=1024)]


class PoolPatch(Model):
    """A merge patch (RFC 7386) of a pool's spec, in which null removes a field."""

    spec: dict[str, Any]


def _read(conn: Connection, namespace: str, name: str) -> dict[str, Any]:
    pool_rows.find(conn, namespace, name)
    return pools.listed(conn, namespace, name)[0]


@router.post("", openapi_extra=body_schema(BackendPool))
async def create(call: Call, namespace: DefaultNamespace = None) -> Response:
    """Create a pool: 201 created, 200 the same pool exists, 409 it exists with another spec."""
    pool: BackendPool = await manifest_of(call, "BackendPool", namespace)
    pool.metadata.annotations.pop(OBJECT_UID, None)  # Only a pool that a driver registers has it.
    created = await call.plane.database.write(partial(pools.create, pool=pool))
    return await _answer_made(call, pool, created)


@router.put("/{name}", openapi_extra=body_schema(BackendPool))
async def register(call: Call, name: str, namespace: DefaultNamespace = None) -> Response:
    """Register a driver's pool: 201 created, 200 exists and updated, 409 another pool exists, 422 refused.

    The annotation `rollyard.dev/object-uid` distinguishes a new pool of the same name, which replaces the
    old one, from a changed one.
    """
    pool: BackendPool = registered(await call.document(), "BackendPool", namespace, name)
    created = await call.plane.database.write(partial(registration.register_pool, pool=pool))
    return await _answer_made(call, pool, created)


async def _answer_made(call: RestCall, pool: BackendPool, created: bool) -> Response:
    meta = pool.metadata
    read = partial(_read, namespace=meta.namespace, name=meta.name)
    return answer(await call.plane.database.read(read), 201 if created else 200)


@router.get("")
async def list_pools(call: Call, namespace: Annotated[str | None, Query(max_length=63)] = None) -> Response:
    """List the pools of one namespace, or of all."""
    items = await call.plane.database.read(partial(pools.listed, namespace=namespace))
    return answer({"apiVersion": "rollyard.dev/v1alpha1", "kind": "BackendPoolList", "items": items})


@router.get("/{name}")
async def get_pool(pool: Named) -> Response:
    """Return a pool with its backends."""
    return answer(await pool.read(_read))


class TokenizerAnswer(Model):
    """What is known of a pool's tokenizer."""

    name: str
    """The folder or the model of the pool's spec."""
    sha256: str
    """The hash of its vocabulary; see `rollyard_crds.reading.vocabulary`."""
    size: int
    """The number of its tokens, including added ones."""


@router.get("/{name}/tokenizer", responses={200: {"model": TokenizerAnswer}})
async def get_tokenizer(call: Named) -> Response:
    """Return the hash of the pool's tokenizer, with which a trainer compares its own.

    The status is 404 (`TokenizerUnseen`) if the control plane's machine has no such folder or model, and 422
    (`TokenizerInvalid`) if the file there is no tokenizer.json.
    """
    pool = await call.read(pool_rows.find)

    def look() -> Vocabulary | None:
        path = find_tokenizer(pool.tokenizer)
        return None if path is None else of_file(path)

    try:
        file = await call.plane.disk.run(look, call.namespace)
    except TokenizerInvalid as error:
        raise Invalid(f"spec.tokenizer: {error}", reason=error.reason, errors=[str(error)]) from error
    if file is None:
        raise NotFound(
            f"the control plane sees no tokenizer.json of {pool.tokenizer!r}, the tokenizer of BackendPool "
            f"{pool.name!r}: set spec.tokenizer to a folder that it can read, or put the model into the "
            "cache of Hugging Face on its machine",
            reason="TokenizerUnseen",
        )
    document = TokenizerAnswer(name=pool.tokenizer, sha256=file.sha256, size=file.size)
    return answer(document.to_json())


@router.patch("/{name}", openapi_extra=body_schema(PoolPatch))
async def patch_pool(pool: Named) -> Response:
    """Change the spec by a merge patch: replicas, limits, arguments or external URLs."""
    body = await pool.body(PoolPatch)
    await pool.write(pools.patch, body.spec)
    return answer(await pool.read(_read))


@router.delete("/{name}")
async def delete_pool(pool: Named) -> Response:
    """Remove a pool.

    A pool that is registered for a Kubernetes object stays (`"deleted": false`), with the annotation
    `rollyard.dev/delete-requested`, until its driver, which deletes the object, deletes the pool too.
    """
    if pool.caller.role == "driver":
        await pool.write(pools.delete)
        deleted = True
    else:
        deleted = await pool.write(registration.delete_pool)
    return answer({"name": pool.name, "namespace": pool.namespace, "deleted": deleted})


@router.put("/{name}/backends", openapi_extra=body_schema(Backends))
async def put_backends(pool: Named) -> Response:
    """Take the driver's report of all of the pool's backends."""
    body = await pool.body(Backends)
    await pool.write(pools.put_backends, body.backends)
    return answer(await pool.read(_read))


@router.put("/{name}/status", openapi_extra=body_schema(BackendPoolStatus))
async def put_status(pool: Named) -> Response:
    """Take the driver's report: conditions, observedGeneration and replicas."""
    status = await pool.body(BackendPoolStatus)
    await pool.write(pools.put_status, status.to_json())
    return answer(await pool.read(_read))
