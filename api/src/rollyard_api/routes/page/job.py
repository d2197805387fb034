"""What people look at of one job: its groups, its statistics, its stages over time, and lists of rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final

import sqlalchemy as sa
from fastapi import APIRouter, Query
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core.codec import loads
from rollyard_api.core.problems import QueryRefused
from rollyard_api.machine.jobs import prefix_of
from rollyard_api.routes.common import Named, NamedCall, StrictRoute, answer, from_query, page_answer
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.rows import EndedRollout, JobRow, read_all
from rollyard_api.storage.schema import rollouts
from rollyard_api.storage.statements import PlaceIn
from rollyard_api.storage.view_tables import rollout_words
from rollyard_api.trajectories import records, words
from rollyard_api.views import keyset
from rollyard_api.views.job import folding, rollout_list
from rollyard_api.views.job import gantt as gantt_rows
from rollyard_api.views.job import grid as grid_rows
from rollyard_api.views.job.gantt import GanttSort
from rollyard_api.views.job.grid import GroupFilter
from rollyard_api.views.job.rollout_list import RolloutFilter
from rollyard_api.views.keyset import Page, Place

router = APIRouter(prefix="/v1/rolloutjobs", tags=["views"], route_class=StrictRoute)

FOLDS: Final = 20
"""The number of transactions with which a request folds what has just ended, before it answers."""
CHUNK: Final = 2000
"""The number of rollouts whose hashes one query looks at."""
READ_AT_ONCE: Final = 16
"""The number of records that are read together."""
SECONDS: Final = 1.5
"""The time after which a search answers with what it has found."""
MAX_WORDS: Final = 16


async def folded(call: NamedCall) -> JobRow:
    """Return a job after what has ended of it was folded, as far as FOLDS transactions go.

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


@router.get("/{name}/grid")
async def grid(
    call: Named,
    filters: Annotated[GroupFilter, from_query(GroupFilter)],
    limit: Annotated[int, Query(ge=1, le=grid_rows.MAX_GROUPS)] = 100,
    after: Annotated[str, Query(alias="continue", max_length=256)] = "",
) -> Response:
    """List groups with one cell a sample: [id after `prefix`, q|l|s|f|c, reward], without trajectories.

    Any order but `no` lists the groups that have ended. `status` selects groups of which a sample has it.
    """
    job = await folded(call)
    look = partial(grid_rows.page, job=job, filters=filters, limit=limit, cursor=after)
    items, more = await call.plane.look(job.namespace, look)
    return page_answer(items, more, prefix=f"{prefix_of(job.name, job.uid)}-")


@router.get("/{name}/statistics")
async def statistics(call: Named) -> Response:
    """Return the statistics that are kept of a job: rewards, versions, time, failures, stages.

    `upto` is the number of ended rollouts that they hold. `by_time` has the width of its buckets in seconds.
    """
    job = await folded(call)

    def look(conn: Connection) -> dict[str, Any]:
        return folding.statistics(conn, job, rollout_list.labels(conn, job))

    return answer(await call.plane.look(job.namespace, look))


@router.get("/{name}/gantt")
async def gantt(
    call: Named,
    sort: GanttSort = "-duration",
    limit: Annotated[int, Query(ge=1, le=gantt_rows.MAX_ROWS)] = 100,
) -> Response:
    """List rollouts with their time in each state: [state, begin, end] in seconds since the epoch.

    Those that worked longest come first, or with `sort=started` the newest in the order of their begins. A
    rollout that has not ended has `open` and ends at `time`.
    """
    now, job = time.time(), await folded(call)
    look = partial(gantt_rows.rows, job=job, sort=sort, limit=limit, now=now)
    items = await call.plane.look(job.namespace, look)
    return answer({"time": now, "items": items, "metadata": {}})


async def slim_page(call: NamedCall, filters: RolloutFilter, limit: int, after: str) -> Response:
    """Return a page of slim rows.

    Raises:
        NotFound: There is no such job.
        QueryRefused: `after` is not the `continue` of this list.
    """
    job = await folded(call)
    if filters.search:
        return page_answer(*await _searched(call.plane, job, filters, limit, after))
    look = partial(rollout_list.page, job=job, filters=filters, limit=limit, cursor=after)
    return page_answer(*await call.plane.look(job.namespace, look))


async def _searched(plane: ControlPlane, job: JobRow, filters: RolloutFilter, limit: int, after: str) -> Page:
    """Return the rollouts after a place whose conversations have all words of the search.

    The rows of the list are taken in its order, CHUNK at a time. Those whose hashes have all words are read
    to find out whether they really do. When the time of a request is over, it answers with what it has found,
    and its `continue` begins there, so that a page may be empty and not the last.
    """
    search_words = _words(filters.search)
    query, order = rollout_list.ended(job.id, filters)
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
    rows = await plane.database.read(partial(rollout_list.slim, job=job, rows=matches))
    return rows, keyset.text(job, filters, position)


def _words(search: str) -> list[str]:
    """Return the words of a search in lower case, each once.

    Raises:
        QueryRefused: It has none, or too many.
    """
    distinct = list(dict.fromkeys(words.words_in(search)))
    if not 1 <= len(distinct) <= MAX_WORDS:
        raise QueryRefused.of(
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
