"""BackendPools: the reports of drivers about their backends, and weight updates and pauses for trainers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from rollyard_crds.backendpool import BackendPool, BackendPoolStatus, BackendStatus
from rollyard_crds.base import Model
from rollyard_crds.fields.annotations import OBJECT_UID
from rollyard_crds.reading.vocabulary import TokenizerInvalid, Vocabulary, of_file
from rollyard_crds.weights import PauseMode, WeightUpdate, WeightUpdateRequest
from rollyard_inference.errors import BackendError, NoSuchCall
from rollyard_inference.weights.connect import weight_control
from rollyard_process import hub
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.backends import pools
from rollyard_api.core.codec import loads
from rollyard_api.core.problems import Conflict, Invalid, NotFound
from rollyard_api.jobs import registration
from rollyard_api.routes.common import (
    Call,
    DefaultNamespace,
    Named,
    NamedCall,
    RestCall,
    StrictRoute,
    Wait,
    answer,
    body_schema,
)
from rollyard_api.routes.jobs import manifest_of, registered
from rollyard_api.service import ControlPlane
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.rows import BackendRow, PoolRow
from rollyard_api.weights import checkpoints, records, updates
from rollyard_api.weights.steps import PAUSED

router = APIRouter(prefix="/v1/backendpools", tags=["backendpools"], route_class=StrictRoute)
of_weights = APIRouter(prefix="/v1/backendpools", tags=["weights"], route_class=StrictRoute)


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

    The annotation `rollyard.dev/object-uid` distinguishes a new pool with the same name, which replaces the
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
    """What is known about a pool's tokenizer."""

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
    (`TokenizerInvalid`) if the file there is not a tokenizer.json.
    """
    pool = await call.read(pool_rows.find)

    def look() -> Vocabulary | None:
        path = hub.find(pool.tokenizer)
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


class WeightUpdates(Model):
    """A pool's weight updates, the newest first."""

    items: list[WeightUpdate]


def _pool(conn: Connection, namespace: str, name: str) -> tuple[PoolRow, list[BackendRow]]:
    pool = pool_rows.find(conn, namespace, name)
    return pool, pool_rows.backends_of(conn, pool.id)


async def _require(
    plane: ControlPlane, pool: PoolRow, rows: list[BackendRow], mode: PauseMode, *, labels: bool
) -> None:
    """Check that the ready servers support the requested mode.

    Args:
        labels: Whether rollouts continue across the update, so servers must report which tokens came after
            it.

    Raises:
        Conflict: A server lacks support; the message names it.
    """

    async def one(url: str) -> str | None:
        try:
            server = await weight_control(plane.transport, url, plane.settings.weight_limits)
            if mode not in server.pause_modes:
                return f"mode: {url} has no '{mode}', use {_choice(server.pause_modes)}"
            if labels:
                await server.label()
            if mode == "keep" and not await server.reports_versions_of_tokens(
                pool.served_model or pool.model
            ):
                return (
                    f"mode: {url} cannot say which tokens came before and after (weight_versions in an "
                    "answer; vLLM: --enable-scale-out): 'keep' is refused, use "
                    + _choice(server.pause_modes - {"keep"})
                )
        except NoSuchCall:
            return (
                f"inFlight: {url} has no label of its weights (vLLM: /weight_info), so old tokens could not "
                "be distinguished from new ones; use inFlight 'restart' (vLLM: VLLM_SERVER_DEV_MODE=1)"
            )
        except BackendError:
            return None  # The steps of the update report this error.
        return None

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(row.url)) for row in rows if row.ready]
    refusals = [problem for task in tasks if (problem := task.result())]
    if refusals:
        raise Conflict.of(*refusals, reason="VersionsUnknown")


def _choice(modes: Collection[PauseMode]) -> str:
    return " or ".join(f"'{mode}'" for mode in sorted(modes))


@of_weights.post(
    "/{name}/weights",
    status_code=202,
    responses={200: {"model": WeightUpdate}, 202: {"model": WeightUpdate}},
    openapi_extra=body_schema(WeightUpdateRequest),
)
async def update_weights(call: Named) -> Response:
    """Update every backend to new weights: 202 if the update begins, 200 if it was requested before.

    An update that is still running is superseded. The call returns at once; follow the update by its id.
    """
    plane = call.plane
    body = await call.body(WeightUpdateRequest)
    pool, rows = await call.read(_pool)
    standing = await plane.database.read(partial(records.standing, pool=pool, request=body))
    note = ""
    if standing is None:
        engine = loads(pool.spec)["engine"]["type"]
        urls = [row.url for row in rows]
        note = await plane.disk.run(partial(checkpoints.check, body.source, urls, engine), call.namespace)
        labels = body.in_flight == "continue" or body.mode == "keep"
        if labels or body.mode == "wait":
            await _require(plane, pool, rows, body.mode, labels=labels)
    row, new = await call.write(records.add, body, note)
    return answer(updates.document(row), 202 if new else 200)


@of_weights.get("/{name}/weights", responses={200: {"model": WeightUpdates}})
async def list_updates(pool: Named) -> Response:
    """List the pool's weight updates, the newest first."""
    return answer({"items": await pool.read(records.listed)})


@of_weights.get("/{name}/weights/{number}", responses={200: {"model": WeightUpdate}})
async def get_update(pool: Named, number: int, wait: Wait = 0.0) -> Response:
    """Return a weight update. The call waits up to `wait` seconds while the update is running."""
    row = await pool.follow(
        records.TOPIC, partial(records.one, number=number), lambda update: update.state != "Running", wait
    )
    return answer(updates.document(row))


@of_weights.post("/{name}/pause", responses={200: {"model": BackendPool}, 202: {"model": BackendPool}})
async def pause(call: Named, mode: PauseMode = "abort", wait: Wait = 30.0) -> Response:
    """Pause a pool until `resume`: no rollout enters Run, and the servers sample nothing.

    The status is 200 once every server is paused, or 202 if that takes longer than `wait` seconds. In that
    case the servers are paused after the answer.
    """
    pool, rows = await call.read(_pool)
    if mode != "abort":
        await _require(call.plane, pool, rows, mode, labels=mode == "keep")
    await call.write(records.pause, mode)
    return await _until(call, wait, lambda row: not row.ready or row.weights_message == PAUSED)


@of_weights.post("/{name}/resume", responses={200: {"model": BackendPool}, 202: {"model": BackendPool}})
async def resume(pool: Named, wait: Wait = 30.0) -> Response:
    """Undo `pause`: 200 once every server samples again, 202 if that takes longer than `wait` seconds."""
    await pool.write(records.pause, mode=None)
    return await _until(pool, wait, lambda row: not row.ready or row.weights != "Updating")


async def _until(pool: NamedCall, wait: float, settled: Callable[[BackendRow], bool]) -> Response:
    def enough(result: tuple[PoolRow, list[BackendRow]]) -> bool:
        return all(map(settled, result[1]))

    result = await pool.follow(records.TOPIC, _pool, enough, wait)
    (document,) = await pool.read(pools.listed)
    return answer(document, 200 if enough(result) else 202)
