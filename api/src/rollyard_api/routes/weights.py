"""Weight updates of a pool, and pause and resume: the routes for a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from rollyard_crds.backendpool import BackendPool
from rollyard_crds.base import Model
from rollyard_crds.weights import PauseMode, WeightUpdate, WeightUpdateRequest
from rollyard_inference.errors import BackendError, NoSuchCall
from rollyard_inference.weights.connect import weight_control
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.backends import pools
from rollyard_api.core.codec import loads, validated
from rollyard_api.core.problems import Conflict
from rollyard_api.routes.common import (
    MAX_WAIT,
    Namespace,
    Plane,
    StrictRoute,
    Wait,
    answer,
    body_of,
    body_schema,
    plane_of,
)
from rollyard_api.service import ControlPlane
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.rows import BackendRow, PoolRow
from rollyard_api.weights import checkpoints, records, updates
from rollyard_api.weights.steps import PAUSED

router = APIRouter(prefix="/v1/backendpools", tags=["weights"], route_class=StrictRoute)


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
        labels: Whether rollouts continue over the update, so servers must report which tokens came after it.

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
        asked = [group.create_task(one(row.url)) for row in rows if row.ready]
    refusals = [problem for task in asked if (problem := task.result())]
    if refusals:
        raise Conflict.of(*refusals, reason="VersionsUnknown")


def _choice(modes: Collection[PauseMode]) -> str:
    return " or ".join(f"'{mode}'" for mode in sorted(modes))


@router.post(
    "/{name}/weights",
    status_code=202,
    responses={200: {"model": WeightUpdate}, 202: {"model": WeightUpdate}},
    openapi_extra=body_schema(WeightUpdateRequest),
)
async def update_weights(request: Request, name: str, namespace: Namespace = "default") -> Response:
    """Bring every backend to new weights: 202 if the update begins, 200 if it was requested before.

    An update that is still running is superseded. The call returns at once; follow the update by its id.
    """
    plane = plane_of(request)
    asked = validated(WeightUpdateRequest, await body_of(request))
    pool, rows = await plane.database.read(partial(_pool, namespace=namespace, name=name))
    standing = await plane.database.read(partial(records.standing, pool=pool, request=asked))
    note = ""
    if standing is None:
        engine = loads(pool.spec)["engine"]["type"]
        urls = [row.url for row in rows]
        note = await plane.disk.run(partial(checkpoints.check, asked.source, urls, engine), namespace)
        labels = asked.in_flight == "continue" or asked.mode == "keep"
        if labels or asked.mode == "wait":
            await _require(plane, pool, rows, asked.mode, labels=labels)
    row, new = await plane.database.write(
        partial(records.add, namespace=namespace, name=name, request=asked, note=note)
    )
    return answer(updates.document(row), 202 if new else 200)


@router.get("/{name}/weights", responses={200: {"model": WeightUpdates}})
async def list_updates(plane: Plane, name: str, namespace: Namespace = "default") -> Response:
    """List the pool's weight updates, the newest first."""
    found = await plane.database.read(partial(records.listed, namespace=namespace, name=name))
    return answer({"items": found})


@router.get("/{name}/weights/{number}", responses={200: {"model": WeightUpdate}})
async def get_update(
    request: Request, plane: Plane, name: str, number: int, namespace: Namespace = "default", wait: Wait = 0.0
) -> Response:
    """Return a weight update. The call waits up to `wait` seconds while the update is running."""
    read = partial(records.one, namespace=namespace, name=name, number=number)
    row = await plane.poll(
        namespace,
        records.TOPIC,
        partial(plane.database.read, read),
        lambda found: found.state != "Running",
        wait,
        request.is_disconnected,
    )
    return answer(updates.document(row))


PauseWait = Annotated[float, Query(ge=0, le=MAX_WAIT)]


@router.post("/{name}/pause", responses={200: {"model": BackendPool}, 202: {"model": BackendPool}})
async def pause(
    request: Request,
    name: str,
    namespace: Namespace = "default",
    mode: PauseMode = "abort",
    wait: PauseWait = 30.0,
) -> Response:
    """Pause a pool until `resume`: no rollout enters Run, and the servers sample nothing.

    The status is 200 once every server is paused, or 202 if that takes longer than `wait` seconds. In that
    case the servers are paused after the answer.
    """
    plane = plane_of(request)
    pool, rows = await plane.database.read(partial(_pool, namespace=namespace, name=name))
    if mode != "abort":
        await _require(plane, pool, rows, mode, labels=mode == "keep")
    await plane.database.write(partial(records.pause, namespace=namespace, name=name, mode=mode))
    return await _until(
        request, namespace, name, wait, lambda row: not row.ready or row.weights_message == PAUSED
    )


@router.post("/{name}/resume", responses={200: {"model": BackendPool}, 202: {"model": BackendPool}})
async def resume(
    request: Request, plane: Plane, name: str, namespace: Namespace = "default", wait: PauseWait = 30.0
) -> Response:
    """Undo `pause`: 200 once every server samples again, 202 if that takes longer than `wait` seconds."""
    await plane.database.write(partial(records.pause, namespace=namespace, name=name, mode=None))
    return await _until(
        request, namespace, name, wait, lambda row: not row.ready or row.weights != "Updating"
    )


async def _until(request: Request, namespace: str, name: str, wait: float, settled: Any) -> Response:
    plane = plane_of(request)
    read = partial(_pool, namespace=namespace, name=name)

    def enough(found: tuple[PoolRow, list[BackendRow]]) -> bool:
        return all(settled(row) for row in found[1])

    found = await plane.poll(
        namespace, records.TOPIC, partial(plane.database.read, read), enough, wait, request.is_disconnected
    )
    document = (await plane.database.read(partial(pools.listed, namespace=namespace, name=name)))[0]
    return answer(document, 200 if enough(found) else 202)
