"""Search for rollouts by the words of their conversations, in bounded time per request.

The rows of the list are taken in its order, some thousand at a time. Those whose hashes have all words are
read to find out whether they really do. When the time of a request is over, it answers with what it has
found, and its `continue` begins there, so that a page may be empty and not the last.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core.problems import QueryRefused
from rollyard_api.storage.functions import PlaceIn
from rollyard_api.storage.rows import EndedRollout, read_all
from rollyard_api.storage.schema import rollouts
from rollyard_api.storage.view_tables import rollout_words
from rollyard_api.trajectories import records, words
from rollyard_api.views.job.rollout_list import RolloutFilter, ended_after
from rollyard_api.views.keyset import ListPlace

CHUNK: Final = 2000
"""The number of rollouts whose hashes one query looks at."""
READ_AT_ONCE: Final = 16
"""The number of records that are read together."""
SECONDS: Final = 1.5
"""The time after which a request answers with what it has found."""
MAX_WORDS: Final = 16


@dataclass(frozen=True, slots=True)
class FoundRollouts:
    """The rows of `ended_rollouts` that were found, and the place up to which rows were looked at."""

    rows: list[Any]
    more: ListPlace | None
    """The place to go on from, or None if all rows were looked at."""


def wanted(search: str) -> list[str]:
    """Return the words of a search in lower case, each once.

    Raises:
        QueryRefused: It has none, or too many.
    """
    found = list(dict.fromkeys(words.words_in(search)))
    if not 1 <= len(found) <= MAX_WORDS:
        detail = f"search: must have 1 to {MAX_WORDS} words of letters and digits (got {len(found)})"
        raise QueryRefused(detail, errors=[detail])
    return found


def candidates(
    conn: Connection,
    job_id: int,
    asked: RolloutFilter,
    group: tuple[int, ...] | None,
    of: Sequence[str],
    place: ListPlace | None,
) -> tuple[list[Any], set[int], ListPlace | None]:
    """Return the next rows of the list, the places of those whose hashes match, and the place after."""
    rows, last = ended_after(conn, job_id, asked, group, CHUNK, place)
    if not rows:
        return [], set(), None
    t = rollout_words.c
    query = sa.select(t.end_seq).where(t.job_id == job_id, t.end_seq.in_([row.end_seq for row in rows]))
    for word in of:
        query = query.where(PlaceIn(t.words, sa.literal(words.hash_of(word), sa.LargeBinary)) > 0)
    return rows, set(conn.scalars(query)), last


def rows_at(conn: Connection, job_id: int, places: Sequence[int]) -> list[EndedRollout]:
    """Return the rows with which records are read, in the order of their places."""
    query = records.select().where(rollouts.c.job_id == job_id, rollouts.c.end_seq.in_(places))
    return read_all(EndedRollout, conn.execute(query.order_by(rollouts.c.end_seq)))


async def search(
    limit: int,
    place: ListPlace | None,
    look: Callable[[ListPlace | None], Awaitable[tuple[list[Any], set[int], ListPlace | None]]],
    confirmed: Callable[[Sequence[Any]], Awaitable[set[int]]],
    place_of: Callable[[Any], ListPlace],
) -> FoundRollouts:
    """Return the rollouts after a place that have the words.

    Args:
        limit: The largest number of rows.
        place: The place to begin after, or None.
        look: Returns what `candidates` returns for a place.
        confirmed: Reads records of some rows, and returns the places of those that have the words. It may
            read fewer than it is given, but at least the first.
        place_of: Returns the place of a row in the list.
    """
    end = time.monotonic() + SECONDS
    found: list[Any] = []
    while True:
        rows, hits, last = await look(place)
        chosen = [row for row in rows if row.end_seq in hits]
        for at in range(0, len(chosen), READ_AT_ONCE):
            some = chosen[at : at + READ_AT_ONCE]
            true = await confirmed(some)
            for row in some:
                if row.end_seq in true:
                    found.append(row)
                    if len(found) == limit:
                        return FoundRollouts(found, place_of(row))
            if time.monotonic() > end:
                return FoundRollouts(found, place_of(some[-1]))
        place = last
        if last is None or time.monotonic() > end:
            return FoundRollouts(found, last)
