"""Weight updates of a pool, and pause and resume: the routes for a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from fastapi import APIRouter
from rollyard_crds.backendpool import BackendPool
from rollyard_crds.base import Model
from rollyard_crds.weights import PauseMode, WeightUpdate, WeightUpdateRequest
from rollyard_inference.errors import BackendError, NoSuchCall
from rollyard_inference.weights.connect import weight_control
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.backends import pools
from rollyard_api.core.codec import loads
from rollyard_api.core.problems import Conflict
from rollyard_api.routes.common import Named, NamedCall, StrictRoute, Wait, answer, body_schema
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
        tasks = [group.create_task(one(row.url)) for row in rows if row.ready]
    refusals = [problem for task in tasks if (problem := task.result())]
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
async def update_weights(call: Named) -> Response:
    """Bring every backend to new weights: 202 if the update begins, 200 if it was requested before.

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


@router.get("/{name}/weights", responses={200: {"model": WeightUpdates}})
async def list_updates(pool: Named) -> Response:
    """List the pool's weight updates, the newest first."""
    return answer({"items": await pool.read(records.listed)})


@router.get("/{name}/weights/{number}", responses={200: {"model": WeightUpdate}})
async def get_update(pool: Named, number: int, wait: Wait = 0.0) -> Response:
    """Return a weight update. The call waits up to `wait` seconds while the update is running."""
    row = await pool.follow(
        records.TOPIC, partial(records.one, number=number), lambda update: update.state != "Running", wait
    )
    return answer(updates.document(row))


@router.post("/{name}/pause", responses={200: {"model": BackendPool}, 202: {"model": BackendPool}})
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


@router.post("/{name}/resume", responses={200: {"model": BackendPool}, 202: {"model": BackendPool}})
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
