"""Pages of slim rows of a job's rollouts: the parameters of the call, and the answer."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

from fastapi import Query
from rollyard_crds.rolloutjob import StageName
from starlette.responses import Response

from rollyard_api.core.problems import QueryRefused
from rollyard_api.routes.common import answer
from rollyard_api.routes.page.job import folded
from rollyard_api.service import ControlPlane
from rollyard_api.views.job import rollout_list
from rollyard_api.views.job.rollout_list import RolloutFilter, Sort, Status

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
        look = partial(rollout_list.page, job=job, asked=asked, limit=limit, given=after)
        found = await plane.database.read(look)
    return answer({"items": found.rows, "metadata": {} if found.more is None else {"continue": found.more}})
