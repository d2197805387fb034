"""Pages of slim rows of a job's rollouts: the parameters of the call, and the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Final

import sqlalchemy as sa
from fastapi import Query
from rollyard_crds.rolloutjob import StageName
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core.codec import loads
from rollyard_api.core.problems import QueryRefused
from rollyard_api.routes.common import page_answer
from rollyard_api.routes.page.job import folded
from rollyard_api.service import ControlPlane
from rollyard_api.storage.rows import EndedRollout, JobRow, read_all
from rollyard_api.storage.schema import rollouts
from rollyard_api.storage.statements import PlaceIn
from rollyard_api.storage.view_tables import rollout_words
from rollyard_api.trajectories import records, words
from rollyard_api.views import keyset
from rollyard_api.views.job import rollout_list
from rollyard_api.views.job.rollout_list import RolloutFilter, RolloutPage, Sort, Status
from rollyard_api.views.keyset import ListPlace

MAX_SEARCH: Final = 256
CHUNK: Final = 2000
"""The number of rollouts whose hashes one query looks at."""
READ_AT_ONCE: Final = 16
"""The number of records that are read together."""
SECONDS: Final = 1.5
"""The time after which a search answers with what it has found."""
MAX_WORDS: Final = 16


async def rollout_filter(
    sort: Sort = "id",
    stage: StageName | None = None,
    status: Status | None = None,
    reason: Annotated[str | None, Query(max_length=128)] = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    task: Annotated[str | None, Query(max_length=128)] = None,
    after_time: float | None = None,
    before_time: float | None = None,
    search: Annotated[str, Query(max_length=MAX_SEARCH)] = "",
    retried: bool = False,
) -> RolloutFilter:
    """Return the order and the filters of a request.

    Raises:
        QueryRefused: A number is not finite.
    """
    numbers = {
        "min_reward": min_reward,
        "max_reward": max_reward,
        "after_time": after_time,
        "before_time": before_time,
    }
    for name, value in numbers.items():
        if value is not None and not math.isfinite(value):
            raise QueryRefused.of(f"{name}: must be a finite number (got {value})")
    return RolloutFilter(
        sort=sort,
        stage=stage,
        status=status,
        reason=reason,
        task=task,
        search=search.strip(),
        retried=retried,
        **numbers,
    )


def check_plain_list(asked: RolloutFilter) -> None:
    """Check that a request without `slim=true` asks for nothing that only slim rows have.

    Raises:
        QueryRefused: It does.
    """
    if asked != RolloutFilter(stage=asked.stage, status=asked.status, retried=asked.retried):
        raise QueryRefused.of(
            "slim: must be true where rollouts are sorted, searched or filtered by more than stage and status"
        )


async def slim_page(
    plane: ControlPlane, namespace: str, name: str, asked: RolloutFilter, limit: int, after: str
) -> Response:
    """Return a page of slim rows.

    Raises:
        NotFound: There is no such job.
        QueryRefused: `after` is not the `continue` of this list.
    """
    async with plane.looks.held(namespace):
        job = await folded(plane, namespace, name)
        if not asked.search:
            look = partial(rollout_list.page, job=job, asked=asked, limit=limit, given=after)
            found = await plane.database.read(look)
    if asked.search:
        found = await _searched(plane, job, asked, limit, after)
    return page_answer(found.rows, found.more)


async def _searched(
    plane: ControlPlane, job: JobRow, asked: RolloutFilter, limit: int, after: str
) -> RolloutPage:
    """Return the rollouts after a place whose conversations have all words of the search.

    The rows of the list are taken in its order, CHUNK at a time. Those whose hashes have all words are read
    to find out whether they really do. When the time of a request is over, it answers with what it has found,
    and its `continue` begins there, so that a page may be empty and not the last.
    """
    wanted = _words(asked.search)
    place = keyset.place(after, job.uid, job.name, asdict(asked), float)
    if not asked.states:
        return RolloutPage([], None)
    read = plane.database.read
    end = time.monotonic() + SECONDS
    found: list[Any] = []
    async with plane.searches.held(job.namespace):
        while True:
            look = partial(_candidates, job_id=job.id, asked=asked, wanted=wanted, place=place)
            async with plane.looks.held(job.namespace):
                chosen, place = await read(look)
            for at in range(0, len(chosen), READ_AT_ONCE):
                some = chosen[at : at + READ_AT_ONCE]
                found += await _confirmed(plane, job, some, wanted)
                if len(found) >= limit:
                    del found[limit:]
                    place = rollout_list.place_of(found[-1], asked.sort)
                    break
                if time.monotonic() > end:
                    place = rollout_list.place_of(some[-1], asked.sort)
                    break
            if len(found) == limit or place is None or time.monotonic() > end:
                break
    rows = await read(partial(rollout_list.slim_ended, job=job, rows=found))
    return RolloutPage(rows, None if place is None else keyset.text(job.uid, asdict(asked), place))


def _words(search: str) -> list[str]:
    """Return the words of a search in lower case, each once.

    Raises:
        QueryRefused: It has none, or too many.
    """
    found = list(dict.fromkeys(words.words_in(search)))
    if not 1 <= len(found) <= MAX_WORDS:
        raise QueryRefused.of(
            f"search: must have 1 to {MAX_WORDS} words of letters and digits (got {len(found)})"
        )
    return found


def _candidates(
    conn: Connection, job_id: int, asked: RolloutFilter, wanted: Sequence[str], place: ListPlace | None
) -> tuple[list[Any], ListPlace | None]:
    """Return those of the next rows of the list whose hashes match, and the place after these rows."""
    rows, last = rollout_list.ended_after(conn, job_id, asked, CHUNK, place)
    t = rollout_words.c
    query = sa.select(t.end_seq).where(t.job_id == job_id, t.end_seq.in_([row.end_seq for row in rows]))
    for word in wanted:
        query = query.where(PlaceIn(t.words, sa.literal(words.hash_of(word), sa.LargeBinary)) > 0)
    hits = set(conn.scalars(query)) if rows else set()
    return [row for row in rows if row.end_seq in hits], last


async def _confirmed(
    plane: ControlPlane, job: JobRow, rows: Sequence[Any], wanted: Sequence[str]
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
        has = await plane.views.record_threads.run(partial(_having, lines, wanted), job.namespace)
        true |= {row.end_seq for row, one in zip(left, has, strict=False) if one}
        left = left[len(lines) :]
    return [row for row in rows if row.end_seq in true]


def _having(lines: Sequence[bytes], wanted: Sequence[str]) -> list[bool]:
    """Return which of some records have all of these words."""
    return [words.has_all(words.texts_of(loads(line)), wanted) for line in lines]
