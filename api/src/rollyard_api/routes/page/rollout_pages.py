"""Pages of slim rows of a job's rollouts: the parameters of the call, and the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import Query
from rollyard_crds.rolloutjob import StageName
from starlette.responses import Response

from rollyard_api.core.codec import loads
from rollyard_api.core.problems import QueryRefused
from rollyard_api.routes.common import answer
from rollyard_api.routes.page.job import folded
from rollyard_api.service import ControlPlane
from rollyard_api.storage.rows import JobRow
from rollyard_api.trajectories import words
from rollyard_api.views import keyset
from rollyard_api.views.job import rollout_list
from rollyard_api.views.job import search as searches
from rollyard_api.views.job.rollout_list import RolloutFilter, RolloutPage, Sort, Status
from rollyard_api.views.keyset import ListPlace

MAX_SEARCH = 256


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
            detail = f"{name}: must be a finite number (got {value})"
            raise QueryRefused(detail, errors=[detail])
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
        detail = (
            "slim: must be true where rollouts are sorted, searched or filtered by more than stage and status"
        )
        raise QueryRefused(detail, errors=[detail])


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
            return _answer(await plane.database.read(look))
    return _answer(await _searched(plane, job, asked, limit, after))


def _answer(found: RolloutPage) -> Response:
    return answer({"items": found.rows, "metadata": {} if found.more is None else {"continue": found.more}})


async def _searched(
    plane: ControlPlane, job: JobRow, asked: RolloutFilter, limit: int, after: str
) -> RolloutPage:
    wanted = searches.wanted(asked.search)
    place = keyset.place(after, job.uid, job.name, asdict(asked), float)
    if not asked.states:
        return RolloutPage([], None)
    read, namespace = plane.database.read, job.namespace
    group = await read(partial(rollout_list.group_of, job_id=job.id, task=asked.task))
    if group == ():
        return RolloutPage([], None)

    async def look(place: ListPlace | None) -> tuple[list[Any], set[int], ListPlace | None]:
        query = partial(searches.candidates, job_id=job.id, asked=asked, group=group, of=wanted, place=place)
        async with plane.looks.held(namespace):
            return await read(query)

    async def confirmed(rows: Sequence[Any]) -> set[int]:
        # The store is read for one batch of a few records at a time, with the bound of a page.
        found = await read(partial(searches.rows_at, job_id=job.id, places=[row.end_seq for row in rows]))
        true: set[int] = set()
        while found:
            lines = await plane.archive.lines(found, namespace, job.name, job.uid, plane.settings.page_bytes)
            has = await plane.views.record_threads.run(partial(_having, lines, wanted), namespace)
            true |= {row.end_seq for row, one in zip(found, has, strict=False) if one}
            found = found[len(lines) :]
        return true

    async with plane.searches.held(namespace):
        found = await searches.search(
            limit, place, look, confirmed, partial(rollout_list.place_of, sort=asked.sort)
        )
    rows = await read(partial(rollout_list.slim_ended, job=job, rows=found.rows))
    more = None if found.more is None else keyset.text(job.uid, asdict(asked), found.more)
    return RolloutPage(rows, more)


def _having(lines: Sequence[bytes], wanted: Sequence[str]) -> list[bool]:
    """Return which of some records have all of these words."""
    return [words.has_all(words.texts_of(loads(line)), wanted) for line in lines]
