"""One rollout piece by piece: its head, its messages and tokens by range, and how it differs from others."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from rollyard_api.core.problems import QueryRefused
from rollyard_api.routes.common import Namespace, Plane, StrictRoute, answer
from rollyard_api.routes.page.records import compact_record
from rollyard_api.service import ControlPlane
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.rows import JobRow
from rollyard_api.views.rollout import live as live_rollouts
from rollyard_api.views.rollout import pieces
from rollyard_api.views.rollout.texts import Pieces

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/rolloutjobs/{name}/rollouts/{rollout}", tags=["views"]
)

_Number = Annotated[int, Query(ge=0, le=1 << 31)]


@router.get("/brief")
async def brief(plane: Plane, name: str, rollout: str, namespace: Namespace = "default") -> Response:
    """Return an ended rollout's record without tokens, messages and arguments of calls.

    `spans` are [state, begin, end] in seconds since the epoch, and `neighbours` the ids of samples and
    failed rollouts before and after it.
    """
    job, record = await compact_record(plane, namespace, name, rollout)
    look = partial(pieces.around, job_id=job.id, rollout=rollout)
    async with plane.looks.held(namespace):
        spans, neighbours = await plane.database.read(look)
    return answer(pieces.brief(record, spans, neighbours))


@router.get("/messages")
async def get_messages(
    plane: Plane,
    name: str,
    rollout: str,
    namespace: Namespace = "default",
    start: _Number = 0,
    limit: Annotated[int, Query(ge=1, le=pieces.MAX_MESSAGES)] = 50,
    most: Annotated[int, Query(ge=1, le=pieces.MAX_CHARACTERS)] = 20_000,
) -> Response:
    """Return messages of an ended rollout by range, each cut to `most` characters.

    An answer may hold fewer messages than `limit`, since it is bounded in characters too.
    """
    _, record = await compact_record(plane, namespace, name, rollout)
    return answer(pieces.messages(record, start, limit, most))


@router.get("/messages/{number}")
async def get_message_text(
    plane: Plane,
    name: str,
    rollout: str,
    number: int,
    namespace: Namespace = "default",
    offset: _Number = 0,
    limit: Annotated[int, Query(ge=1, le=pieces.MAX_CHARACTERS)] = 20_000,
) -> Response:
    """Return a part of the text of one message: {text, offset, characters}."""
    if number < 0:
        raise QueryRefused("number: must be 0 or more", errors=["number: must be 0 or more"])
    _, record = await compact_record(plane, namespace, name, rollout)
    return answer(pieces.message_text(record, number, offset, limit))


@router.get("/tokens")
async def get_tokens(
    plane: Plane,
    name: str,
    rollout: str,
    namespace: Namespace = "default",
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
    job, record = await compact_record(plane, namespace, name, rollout)
    document = pieces.tokens(record, segment, start, limit, exact=exact)
    document |= {"texts": None, "texts_reason": ""}
    if texts:
        vocabulary, document["texts_reason"] = await _vocabulary(plane, job)
        if vocabulary is not None:
            document["texts"] = vocabulary.texts(document["ids"])
    return answer(document)


@router.get("/live")
async def live(plane: Plane, name: str, rollout: str, namespace: Namespace = "default") -> Response:
    """Return a rollout that has not ended as far as it has come, and mark it as watched for ten seconds.

    Its worker then sends new turns with its heartbeats. The status is 409 (`RolloutEnded`) once it has
    ended, and 429 while as many rollouts as may be are watched.
    """
    look = partial(live_rollouts.look, namespace=namespace, name=name, rollout=rollout)
    async with plane.looks.held(namespace):
        document = await plane.database.write(look, durable=False)
    plane.views.watching.note(time.time())
    return answer(document)


@router.get("/difference")
async def difference(
    plane: Plane,
    name: str,
    rollout: str,
    other: Annotated[str, Query(max_length=128)],
    namespace: Namespace = "default",
) -> Response:
    """Return the first differing token of two ended rollouts of one group, with the tokens around it.

    `position` is null if the tokens are equal, or those of one are the beginning of the other's.
    """
    job, left = await compact_record(plane, namespace, name, rollout)
    _, right = await compact_record(plane, namespace, name, other)
    if left.head["group_id"] != right.head["group_id"]:
        raise QueryRefused.of("other: must be a rollout of the same group, since others have another prompt")
    document = await plane.views.record_threads.run(partial(pieces.difference, left, right), namespace)
    vocabulary, reason = await _vocabulary(plane, job)
    for side in (document["left"], document["right"]):
        side["texts"] = None if vocabulary is None else vocabulary.texts(side["ids"])
    return answer(document | {"texts_reason": reason})


async def _vocabulary(plane: ControlPlane, job: JobRow) -> tuple[Pieces | None, str]:
    """Return the texts of the tokens of a job's pool, or None and why there are none."""
    if job.pool is None:
        return None, "the job has no pool, so no tokenizer is known"
    pool = await plane.database.read(partial(pool_rows.named, namespace=job.namespace, name=job.pool))
    if pool is None:
        return None, f"the pool {job.pool!r} of the job is gone"
    found = await plane.views.token_texts.of(pool.tokenizer, job.namespace)
    if isinstance(found, str):
        return None, f"no texts for the tokenizer {pool.tokenizer!r}: {found}"
    return found, ""
