"""One rollout's record, and its pieces: its head, its messages and tokens by range, and what differs."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core.problems import Conflict, NotFound, QueryRefused
from rollyard_api.machine.states import ENDED
from rollyard_api.routes.common import Named, NamedCall, Namespace, Plane, StrictRoute, answer
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.rows import EndedRollout, JobRow, RolloutSize
from rollyard_api.storage.schema import rollouts
from rollyard_api.trajectories import records
from rollyard_api.views.rollout import live as live_rollouts
from rollyard_api.views.rollout import pieces
from rollyard_api.views.rollout.records import CompactRecord, compact, row_of
from rollyard_api.views.rollout.texts import Pieces, texts_of

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/rolloutjobs/{name}/rollouts/{rollout}", tags=["views"]
)

_Number = Annotated[int, Query(ge=0, le=1 << 31)]


def _find_ended(conn: Connection, namespace: str, name: str, rollout: str) -> tuple[JobRow, RolloutSize]:
    """Return a job, and the place of the record of one of its rollouts.

    Raises:
        NotFound: There is no such job, or it has no such rollout.
        Conflict: The rollout has not ended.
    """
    job = job_rows.find(conn, namespace, name)
    row = row_of(conn, job, rollout, records.sizes().add_columns(rollouts.c.state))
    if row.end_seq is None:
        raise Conflict(
            f"rollout {rollout!r} has not ended: {row.state.status} in stage "
            f"{row.state.stage}; its trajectory is there once it has",
            reason="RolloutNotEnded",
        )
    *size, _state = row
    return job, RolloutSize(*size)


async def record_line(
    plane: ControlPlane, stack: AsyncExitStack, namespace: str, name: str, rollout: str
) -> bytes:
    """Return the record of a rollout of a job, as JSON. A place for it is held by `stack`.

    Raises:
        NotFound: There is no such job or rollout.
        Conflict: The rollout has not ended.
        TimedOut, Unavailable: The trajectory store does not answer.
    """
    find = partial(_find_ended, namespace=namespace, name=name, rollout=rollout)
    job, short = await plane.database.read(find)
    rows = await _rows(plane, stack, job, short)
    (line,) = await plane.archive.lines(rows, job, plane.settings.page_bytes)
    return line


async def _rows(
    plane: ControlPlane, stack: AsyncExitStack, job: JobRow, short: RolloutSize
) -> list[EndedRollout]:
    await stack.enter_async_context(plane.pages_of([short]).turn(job.namespace))
    at = short.end_seq
    rows = await plane.database.read(
        partial(records.rows_of, job_id=job.id, cursor=at - 1, states=ENDED, last=at)
    )
    if not rows:
        raise NotFound(f"no RolloutJob {job.name!r} in namespace {job.namespace!r}", reason="JobNotFound")
    return rows


async def _compact_record(call: NamedCall, rollout: str) -> tuple[JobRow, CompactRecord]:
    """Return a job and the record of one of its rollouts in its compact form.

    Raises:
        NotFound: There is no such job or rollout.
        Conflict: The rollout has not ended.
        TimedOut, Unavailable: The trajectory store does not answer.
    """
    plane = call.plane
    job, short = await call.look(_find_ended, rollout)
    known = plane.views.kept_records.get(job.uid, short.id)
    if known is not None:
        return job, known
    async with AsyncExitStack() as stack:
        rows = await _rows(plane, stack, job, short)
        (data,) = await plane.archive.arrays(rows, job, plane.settings.page_bytes)
        record = await plane.views.record_threads.run(partial(compact, data), job.namespace)
    plane.views.kept_records.put(job.uid, short.id, record)
    return job, record


@router.get("/brief")
async def brief(call: Named, rollout: str) -> Response:
    """Return an ended rollout's record without tokens, messages and arguments of calls.

    `spans` are [state, begin, end] in seconds since the epoch, and `neighbours` the ids of samples and
    failed rollouts before and after it.
    """
    job, record = await _compact_record(call, rollout)
    return answer(await call.plane.look(job.namespace, partial(pieces.brief, job=job, record=record)))


@router.get("/messages")
async def get_messages(
    call: Named,
    rollout: str,
    start: _Number = 0,
    limit: Annotated[int, Query(ge=1, le=pieces.MAX_MESSAGES)] = 50,
    most: Annotated[int, Query(ge=1, le=pieces.MAX_CHARACTERS)] = 20_000,
) -> Response:
    """Return messages of an ended rollout by range, each cut to `most` characters.

    An answer may hold fewer messages than `limit`, since it is bounded in characters too.
    """
    _, record = await _compact_record(call, rollout)
    return answer(pieces.messages(record, start, limit, most))


@router.get("/messages/{number}")
async def get_message_text(
    call: Named,
    rollout: str,
    number: int,
    offset: _Number = 0,
    limit: Annotated[int, Query(ge=1, le=pieces.MAX_CHARACTERS)] = 20_000,
) -> Response:
    """Return a part of the text of one message: {text, offset, characters}."""
    if number < 0:
        raise QueryRefused.of("number: must be 0 or more")
    _, record = await _compact_record(call, rollout)
    return answer(pieces.message_text(record, number, offset, limit))


@router.get("/tokens")
async def get_tokens(
    call: Named,
    rollout: str,
    segment: _Number = 0,
    start: _Number = 0,
    limit: Annotated[int, Query(ge=1, le=pieces.MAX_TOKENS)] = pieces.MAX_TOKENS,
    exact: bool = False,
    texts: bool = True,
) -> Response:
    """Return tokens of a segment by range, with their texts if this machine has the pool's tokenizer.

    Positions count from the segment's first prompt token. `mask` and `versions` are [value, length] runs.
    `logprobs` is base64 of a byte v for each token: 0 stands for none, and else about -(v - 1)/20 nats, at
    least -12.7. With `exact=true` it is a list of numbers.
    """
    job, record = await _compact_record(call, rollout)
    document = pieces.tokens(record, segment, start, limit, exact=exact)
    vocabulary = await _vocabulary(call.plane, job) if texts else ""
    document["texts"] = texts_of(vocabulary, document["ids"])
    document["texts_reason"] = vocabulary if isinstance(vocabulary, str) else ""
    return answer(document)


@router.get("/live")
async def live(plane: Plane, name: str, rollout: str, namespace: Namespace = "default") -> Response:
    """Return a rollout that has not ended as far as it has come, and mark it as watched for ten seconds.

    Its worker then sends new turns with its heartbeats. The status is 409 (`RolloutEnded`) once it has
    ended, and 429 while as many rollouts as may be are watched.
    """
    look = partial(live_rollouts.look, namespace=namespace, name=name, rollout=rollout)
    async with plane.looks.turn(namespace):
        document = await plane.database.write(look, durable=False)
    plane.views.watching.note(time.time())
    return answer(document)


@router.get("/difference")
async def difference(call: Named, rollout: str, other: Annotated[str, Query(max_length=128)]) -> Response:
    """Return the first differing token of two ended rollouts of one group, with the tokens around it.

    `position` is null if the tokens are equal, or those of one are the beginning of the other's.
    """
    job, left = await _compact_record(call, rollout)
    _, right = await _compact_record(call, other)
    if left.head["group_id"] != right.head["group_id"]:
        raise QueryRefused.of("other: must be a rollout of the same group, since others have another prompt")
    compare = partial(pieces.difference, left, right)
    document = await call.plane.views.record_threads.run(compare, job.namespace)
    vocabulary = await _vocabulary(call.plane, job)
    for side in (document["left"], document["right"]):
        side["texts"] = texts_of(vocabulary, side["ids"])
    return answer(document | {"texts_reason": vocabulary if isinstance(vocabulary, str) else ""})


async def _vocabulary(plane: ControlPlane, job: JobRow) -> Pieces | str:
    """Return the pieces of the tokenizer of a job's pool, or why there are none."""
    if job.pool is None:
        return "the job has no pool, so no tokenizer is known"
    pool = await plane.database.read(partial(pool_rows.named, namespace=job.namespace, name=job.pool))
    if pool is None:
        return f"the pool {job.pool!r} of the job is gone"
    vocabulary = await plane.views.token_texts.of(pool.tokenizer, job.namespace)
    return (
        f"no texts for the tokenizer {pool.tokenizer!r}: {vocabulary}"
        if isinstance(vocabulary, str)
        else vocabulary
    )
