"""The record of a rollout that has ended, as a line of JSON or in its compact form."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from sqlalchemy.engine import Connection

from rollyard_api.core.problems import Conflict, NotFound
from rollyard_api.machine.states import ENDED
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.rows import EndedRollout, JobRow, RolloutSize
from rollyard_api.storage.schema import rollouts
from rollyard_api.trajectories import records
from rollyard_api.views.rollout.records import CompactRecord, compact


def _find_ended(conn: Connection, namespace: str, name: str, rollout: str) -> tuple[JobRow, RolloutSize]:
    """Return a job, and the place of the record of one of its rollouts.

    Raises:
        NotFound: There is no such job, or it has no such rollout.
        Conflict: The rollout has not ended.
    """
    job = job_rows.find(conn, namespace, name)
    short = records.sizes().add_columns(rollouts.c.state)
    row = conn.execute(short.where(rollouts.c.job_id == job.id, rollouts.c.id == rollout)).one_or_none()
    if row is None:
        raise NotFound(f"RolloutJob {name!r} has no rollout {rollout[:128]!r}", reason="RolloutNotFound")
    if row.end_seq is None:
        raise Conflict(
            f"rollout {rollout!r} has not ended: {row.state.status} in stage "
            f"{row.state.stage}; its trajectory is there once it has",
            reason="RolloutNotEnded",
        )
    *size, _state = row
    return job, RolloutSize(*size)


async def record_line(
    plane: ControlPlane, held: AsyncExitStack, namespace: str, name: str, rollout: str
) -> bytes:
    """Return the record of a rollout of a job, as JSON. A place for it is held by `held`.

    Raises:
        NotFound: There is no such job or rollout.
        Conflict: The rollout has not ended.
        TimedOut, Unavailable: The trajectory store does not answer.
    """
    find = partial(_find_ended, namespace=namespace, name=name, rollout=rollout)
    job, short = await plane.database.read(find)
    rows = await _rows(plane, held, job, short)
    (line,) = await plane.archive.lines(rows, job, plane.settings.page_bytes)
    return line


async def _rows(
    plane: ControlPlane, held: AsyncExitStack, job: JobRow, short: RolloutSize
) -> list[EndedRollout]:
    await held.enter_async_context(plane.pages_of([short]).held(job.namespace))
    at = short.end_seq
    rows = await plane.database.read(
        partial(records.rows_of, job_id=job.id, cursor=at - 1, wanted=ENDED, last=at)
    )
    if not rows:
        raise NotFound(f"no RolloutJob {job.name!r} in namespace {job.namespace!r}", reason="JobNotFound")
    return rows


async def compact_record(
    plane: ControlPlane, namespace: str, name: str, rollout: str
) -> tuple[JobRow, CompactRecord]:
    """Return a job and the record of one of its rollouts in its compact form.

    Raises:
        NotFound: There is no such job or rollout.
        Conflict: The rollout has not ended.
        TimedOut, Unavailable: The trajectory store does not answer.
    """
    find = partial(_find_ended, namespace=namespace, name=name, rollout=rollout)
    async with plane.looks.held(namespace):
        job, short = await plane.database.read(find)
    kept = plane.views.kept_records.get(job.uid, short.id)
    if kept is not None:
        return job, kept
    async with AsyncExitStack() as held:
        rows = await _rows(plane, held, job, short)
        (data,) = await plane.archive.arrays(rows, job, plane.settings.page_bytes)
        record = await plane.views.record_threads.run(partial(compact, data), namespace)
    plane.views.kept_records.put(job.uid, short.id, record)
    return job, record
