"""A page of jobs out of what the fleet's reader found, sorted and filtered in memory."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import orjson

from rollyard_api.core import cursors
from rollyard_api.views import keyset

JobSort = Literal["late", "created", "-created", "name"]
JobState = Literal["active", "finished", "late"]
_PARAMETER: Final = "continue"


def page(
    jobs: Mapping[int, dict[str, Any]],
    *,
    namespace: str | None,
    state: JobState | None,
    search: str,
    sort: JobSort,
    limit: int,
    given: str,
) -> tuple[list[dict[str, Any]], str | None]:
    """Return a page of slim rows, and the `continue` of the next page or None.

    Args:
        jobs: The slim rows by the jobs' numbers.
        namespace: The only namespace, or None for all.
        state: The only state, or None.
        search: A part of the name or of `namespace/name`, in any case of letters.
        sort: The order. By `late`, the jobs that are late longest come first, then the unfinished ones, the
            oldest first, and last those that have finished, the newest first.
        limit: The largest number of rows.
        given: The `continue` of the page before, or an empty text.

    Raises:
        QueryRefused: `given` is not a `continue` of this list.
    """
    part = search.lower()
    chosen = [
        (_key(sort, number, job), job)
        for number, job in jobs.items()
        if (namespace is None or job["namespace"] == namespace)
        and (state is None or _is(job, state))
        and (not part or part in f"{job['namespace']}/{job['name']}".lower())
    ]
    chosen.sort(key=lambda item: item[0])
    asked = keyset.digest([namespace, state, search, sort])
    after = _after(given, asked)
    if after is not None:
        chosen = _beyond(chosen, after, given)
    rows = [job for _, job in chosen[:limit]]
    if len(chosen) <= limit:
        return rows, None
    data = orjson.dumps([asked, *chosen[limit - 1][0]])
    return rows, base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _is(job: Mapping[str, Any], state: JobState) -> bool:
    if state == "late":
        return job["late"] is not None
    return (job["finished_at"] is None) == (state == "active")


def _key(sort: JobSort, number: int, job: Mapping[str, Any]) -> tuple[Any, ...]:
    match sort:
        case "late":
            if job["finished_at"] is not None:
                return (2, -job["finished_at"], number)
            # Lateness grows with the time, so its order is that of the moments from which jobs are late.
            return (1, job["created_at"], number) if job["late"] is None else (0, -job["late"], number)
        case "created":
            return (0, job["created_at"], number)
        case "-created":
            return (0, -job["created_at"], -number)
        case "name":
            return (0, f"{job['namespace']}/{job['name']}", number)


def _after(given: str, asked: str) -> tuple[Any, ...] | None:
    if not given:
        return None
    try:
        padded = given + "=" * (-len(given) % 4)
        found = orjson.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError) as error:
        raise cursors.garbage(_PARAMETER, given, "jobs") from error
    if not isinstance(found, list) or len(found) != 4 or found[0] != asked:
        raise cursors.garbage(_PARAMETER, given, "this list of jobs")
    return tuple(found[1:])


def _beyond(
    chosen: Iterable[tuple[tuple[Any, ...], dict[str, Any]]], after: tuple[Any, ...], given: str
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    try:
        return [item for item in chosen if item[0] > after]
    except TypeError as error:
        raise cursors.garbage(_PARAMETER, given, "jobs") from error
