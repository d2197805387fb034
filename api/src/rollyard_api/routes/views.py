"""What the page and the command line show of the fleet, of a job, and of a rollout, piece by piece."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any, Final

import sqlalchemy as sa
from fastapi import APIRouter, Query
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core.codec import loads
from rollyard_api.core.problems import Conflict, Malformed, NotFound
from rollyard_api.machine.jobs import prefix_of
from rollyard_api.machine.states import ENDED
from rollyard_api.routes.common import (
    Named,
    NamedCall,
    Namespace,
    Plane,
    StrictRoute,
    answer,
    from_query,
    page_answer,
)
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.rows import EndedRollout, JobRow, RolloutSize, read_all
from rollyard_api.storage.schema import rollouts
from rollyard_api.storage.statements import PlaceIn
from rollyard_api.storage.view_tables import rollout_words
from rollyard_api.trajectories import records, words
from rollyard_api.trajectories.delivery import Delivery
from rollyard_api.views import keyset
from rollyard_api.views.fleet import jobs as slim_jobs
from rollyard_api.views.fleet.feed import JobName
from rollyard_api.views.fleet.jobs import JobFilter
from rollyard_api.views.job import folding, lists
from rollyard_api.views.job.lists import GanttSort, GroupFilter, RolloutFilter
from rollyard_api.views.keyset import Page, Place
from rollyard_api.views.rollout import live as live_rollouts
from rollyard_api.views.rollout import pieces
from rollyard_api.views.rollout.records import CompactRecord, compact, row_of
from rollyard_api.views.rollout.texts import Pieces, texts_of

router = APIRouter(tags=["views"], route_class=StrictRoute)

_JOB_PATH: Final = "/v1/rolloutjobs/{name}"
_ROLLOUT_PATH: Final = f"{_JOB_PATH}/rollouts/{{rollout}}"

_Namespace = Annotated[str | None, Query(max_length=63)]


@router.get("/v1/overview")
async def overview(plane: Plane) -> Response:
    """Return an overview of the fleet: jobs by phase, queues, rates, pools, nodes and workers.

    All calls within a second get the same answer. `time` says when it was read.
    """
    return answer((await plane.views.fleet.look()).overview)


@router.get("/v1/jobs")
async def list_slim_jobs(
    plane: Plane,
    filters: Annotated[JobFilter, from_query(JobFilter)],
    limit: Annotated[int, Query(ge=1, le=lists.MAX_ROWS)] = 100,
    after: Annotated[str, Query(alias="continue", max_length=512)] = "",
) -> Response:
    """List jobs as slim rows, late ones first; `metadata.continue` begins the next page."""
    fleet = await plane.views.fleet.look()
    return page_answer(*slim_jobs.page(fleet.jobs, filters, limit, after))


@router.get("/v1/workers/{name}/rollouts")
async def worker_rollouts(plane: Plane, name: str, namespace: _Namespace = None) -> Response:
    """List the rollouts that a worker with this name holds, as slim rows with `namespace` and `job`.

    At most 200 are listed, with those that it has held for longest first.
    """

    def query(conn: Connection) -> list[dict[str, Any]]:
        leased = lists.held_by(conn, name, lists.MAX_ROWS)
        items = []
        for job_id in dict.fromkeys(row.job_id for row in leased):
            job = job_rows.by_id(conn, job_id)
            if job is not None and namespace in (None, job.namespace):
                rows = lists.slim(conn, job, [row for row in leased if row.job_id == job_id])
                items += [row | {"namespace": job.namespace, "job": job.name} for row in rows]
        return sorted(items, key=lambda row: row["since"])

    return page_answer(await plane.look(namespace or "", query), None)


_JOB: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}/[a-z0-9][a-z0-9.-]{0,62}")


@router.get("/v1/events")
async def fleet_events(plane: Plane, job: Annotated[str, Query(max_length=127)] = "") -> Response:
    """Stream events of the fleet: `overview`, `job`, `gone` and `ended`, each at most once a second.

    `job=NAMESPACE/NAME` limits `job`, `gone` and `ended` to one job. The database is read once a second at
    most, however many streams are open. A consumer that falls behind is dropped with an event `dropped`.
    """
    only: JobName | None = None
    if job:
        if not _JOB.fullmatch(job):
            raise Malformed.of(f"job: must be NAMESPACE/NAME (got {job!r})")
        namespace, _, name = job.partition("/")
        only = (namespace, name)
    await plane.views.fleet.look()  # An error of the database is answered before the stream begins.
    async with AsyncExitStack() as stack:
        stack.enter_context(plane.streams.held("" if only is None else only[0]))
        body = plane.views.feed.follow(only, lambda: plane.bus.closing)
        return Delivery(body, "text/event-stream", {"Cache-Control": "no-store"}, stack.pop_all())


FOLDS: Final = 20
"""The largest number of transactions in which a request folds what has just ended before it answers."""
CHUNK: Final = 2000
"""The number of rollouts whose hashes one query reads."""
READ_AT_ONCE: Final = 16
"""The number of records that are read together."""
SECONDS: Final = 1.5
"""The time after which a search answers with what it has found so far."""
MAX_WORDS: Final = 16


async def folded(call: NamedCall) -> JobRow:
    """Return a job after its ended rollouts were folded, as far as FOLDS transactions go.

    Raises:
        NotFound: There is no such job.
    """

    def query(conn: Connection, namespace: str, name: str) -> tuple[JobRow, bool]:
        job = job_rows.find(conn, namespace, name)
        return job, bool(folding.behind(conn, job.id))

    async with call.plane.looks.turn(call.namespace):
        job, behind = await call.read(query)
        if behind:
            await call.plane.views.folding.fold(job.id, FOLDS)
    return job


@router.get(f"{_JOB_PATH}/grid")
async def grid(
    call: Named,
    filters: Annotated[GroupFilter, from_query(GroupFilter)],
    limit: Annotated[int, Query(ge=1, le=lists.MAX_GROUPS)] = 100,
    after: Annotated[str, Query(alias="continue", max_length=256)] = "",
) -> Response:
    """List groups with one cell a sample: [id after `prefix`, q|l|s|f|c, reward], without trajectories.

    Any order but `no` lists the groups that have ended. `status` selects groups of which a sample has it.
    """
    job = await folded(call)
    look = partial(lists.group_page, job=job, filters=filters, limit=limit, cursor=after)
    items, more = await call.plane.look(job.namespace, look)
    return page_answer(items, more, prefix=f"{prefix_of(job.name, job.uid)}-")


@router.get(f"{_JOB_PATH}/statistics")
async def statistics(call: Named) -> Response:
    """Return the statistics that are kept of a job: rewards, versions, time, failures, stages.

    `upto` is the number of ended rollouts that they hold. `by_time` has the width of its buckets in seconds.
    """
    job = await folded(call)

    def look(conn: Connection) -> dict[str, Any]:
        return folding.statistics(conn, job, lists.labels(conn, job))

    return answer(await call.plane.look(job.namespace, look))


@router.get(f"{_JOB_PATH}/gantt")
async def gantt(
    call: Named,
    sort: GanttSort = "-duration",
    limit: Annotated[int, Query(ge=1, le=lists.MAX_GANTT_ROWS)] = 100,
) -> Response:
    """List rollouts with their time in each state: [state, begin, end] in seconds since the epoch.

    Those that worked longest come first, or with `sort=started` the newest in the order of their starts. A
    rollout that has not ended has `open` and ends at `time`.
    """
    now, job = time.time(), await folded(call)
    look = partial(lists.gantt, job=job, sort=sort, limit=limit, now=now)
    items = await call.plane.look(job.namespace, look)
    return answer({"time": now, "items": items, "metadata": {}})


async def slim_page(call: NamedCall, filters: RolloutFilter, limit: int, after: str) -> Response:
    """Return a page of slim rows.

    Raises:
        NotFound: There is no such job.
        Malformed: `after` is not the `continue` of this list.
    """
    job = await folded(call)
    if filters.search:
        return page_answer(*await _searched(call.plane, job, filters, limit, after))
    look = partial(lists.rollout_page, job=job, filters=filters, limit=limit, cursor=after)
    return page_answer(*await call.plane.look(job.namespace, look))


async def _searched(plane: ControlPlane, job: JobRow, filters: RolloutFilter, limit: int, after: str) -> Page:
    """Return the rollouts after a place whose conversations have all words of the search.

    The rows of the list are taken in its order, CHUNK at a time. Those whose hashes have all words are read
    to find out whether they really do. When a request's time is up, it answers with what it has found, and
    its `continue` begins there, so a page may be empty without being the last.
    """
    search_words = _words(filters.search)
    query, order = lists.ended(job.id, filters)
    position = order.place(after, job, filters)
    if not filters.states:
        return [], None
    end = time.monotonic() + SECONDS
    matches: list[Any] = []
    async with plane.searches.turn(job.namespace):
        while True:
            page = partial(order.rows, query=query, limit=CHUNK, place=position)
            look = partial(_candidates, job_id=job.id, page=page, search_words=search_words)
            chosen, position = await plane.look(job.namespace, look)
            for at in range(0, len(chosen), READ_AT_ONCE):
                chunk = chosen[at : at + READ_AT_ONCE]
                matches += await _confirmed(plane, job, chunk, search_words)
                if len(matches) >= limit:
                    del matches[limit:]
                    position = keyset.place_of(matches[-1])
                    break
                if time.monotonic() > end:
                    position = keyset.place_of(chunk[-1])
                    break
            if len(matches) == limit or position is None or time.monotonic() > end:
                break
    rows = await plane.database.read(partial(lists.slim, job=job, rows=matches))
    return rows, keyset.text(job, filters, position)


def _words(search: str) -> list[str]:
    """Return the words of a search in lower case, each once.

    Raises:
        Malformed: It has none, or too many.
    """
    distinct = list(dict.fromkeys(words.words_in(search)))
    if not 1 <= len(distinct) <= MAX_WORDS:
        raise Malformed.of(
            f"search: must have 1 to {MAX_WORDS} words of letters and digits (got {len(distinct)})"
        )
    return distinct


def _candidates(
    conn: Connection,
    job_id: int,
    page: Callable[[Connection], tuple[list[Any], Place | None]],
    search_words: Sequence[str],
) -> tuple[list[Any], Place | None]:
    """Return those rows of a page of the list whose hashes match, and the place after the page."""
    rows, last = page(conn)
    t = rollout_words.c
    query = sa.select(t.end_seq).where(t.job_id == job_id, t.end_seq.in_([row.end_seq for row in rows]))
    for word in search_words:
        query = query.where(PlaceIn(t.words, sa.literal(words.hash_of(word), sa.LargeBinary)) > 0)
    hits = set(conn.scalars(query)) if rows else set()
    return [row for row in rows if row.end_seq in hits], last


async def _confirmed(
    plane: ControlPlane, job: JobRow, rows: Sequence[Any], search_words: Sequence[str]
) -> list[Any]:
    """Return those of some rows whose records really have the words."""
    places = [row.end_seq for row in rows]
    query = records.select().where(rollouts.c.job_id == job.id, rollouts.c.end_seq.in_(places))
    ordered = query.order_by(rollouts.c.end_seq)
    left = await plane.database.read(lambda conn: read_all(EndedRollout, conn.execute(ordered)))
    true: set[int] = set()
    while left:
        # The store is read for a few records at a time, with the bound of a page.
        lines = await plane.archive.lines(left, job, plane.settings.page_bytes)
        has = await plane.views.record_threads.run(partial(_having, lines, search_words), job.namespace)
        true |= {row.end_seq for row, matches in zip(left, has, strict=False) if matches}
        left = left[len(lines) :]
    return [row for row in rows if row.end_seq in true]


def _having(lines: Sequence[bytes], search_words: Sequence[str]) -> list[bool]:
    """Return which of some records have all of these words."""
    return [words.has_all(words.texts_of(loads(line)), search_words) for line in lines]


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


@router.get(f"{_ROLLOUT_PATH}/brief")
async def brief(call: Named, rollout: str) -> Response:
    """Return an ended rollout's record without tokens, messages and arguments of calls.

    `messages` is the number of messages, of the record as of each of its `branches`.

    `spans` are [state, begin, end] in seconds since the epoch, and `neighbours` the ids of samples and
    failed rollouts before and after it.
    """
    job, record = await _compact_record(call, rollout)
    return answer(await call.plane.look(job.namespace, partial(pieces.brief, job=job, record=record)))


@router.get(f"{_ROLLOUT_PATH}/messages")
async def get_messages(
    call: Named,
    rollout: str,
    start: _Number = 0,
    limit: Annotated[int, Query(ge=1, le=pieces.MAX_MESSAGES)] = 50,
    most: Annotated[int, Query(ge=1, le=pieces.MAX_CHARACTERS)] = 20_000,
    conversation: _Number | None = None,
) -> Response:
    """Return messages of an ended rollout by range, each cut to `most` characters.

    They are those of the rollout's own conversation, or of the branch whose number is `conversation`. An
    answer may hold fewer messages than `limit`, since it is bounded in characters too.
    """
    _, record = await _compact_record(call, rollout)
    return answer(pieces.messages(pieces.conversation_of(record, conversation), start, limit, most))


@router.get(f"{_ROLLOUT_PATH}/messages/{{number}}")
async def get_message_text(
    call: Named,
    rollout: str,
    number: int,
    offset: _Number = 0,
    limit: Annotated[int, Query(ge=1, le=pieces.MAX_CHARACTERS)] = 20_000,
    conversation: _Number | None = None,
) -> Response:
    """Return a part of the text of one message: {text, offset, characters}."""
    if number < 0:
        raise Malformed.of("number: must be 0 or more")
    _, record = await _compact_record(call, rollout)
    return answer(pieces.message_text(pieces.conversation_of(record, conversation), number, offset, limit))


@router.get(f"{_ROLLOUT_PATH}/tokens")
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


@router.get(f"{_ROLLOUT_PATH}/live")
async def live(plane: Plane, name: str, rollout: str, namespace: Namespace = "default") -> Response:
    """Return what there is of a rollout that has not ended, and mark it as watched for ten seconds.

    Its worker then sends new turns with its heartbeats. The status is 409 (`RolloutEnded`) once it has
    ended, and 429 while the largest number of rollouts is watched.
    """
    look = partial(live_rollouts.look, namespace=namespace, name=name, rollout=rollout)
    async with plane.looks.turn(namespace):
        document = await plane.database.write(look, durable=False)
    plane.views.watching.note(time.time())
    return answer(document)


@router.get(f"{_ROLLOUT_PATH}/difference")
async def difference(call: Named, rollout: str, other: Annotated[str, Query(max_length=128)]) -> Response:
    """Return the first differing token of two ended rollouts of one group, with the tokens around it.

    `position` is null if the tokens are equal, or those of one are the beginning of the other's.
    """
    job, left = await _compact_record(call, rollout)
    _, right = await _compact_record(call, other)
    if left.head["group_id"] != right.head["group_id"]:
        raise Malformed.of("other: must be a rollout of the same group, since others have another prompt")
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
