"""Keyset pages: a page continues after a sort key and a number, and never skips or repeats a row.

The `continue` of a page is bound to the sort order and the filters that made it, and to the job. A forged one
can name any place of the same list, which shows nothing that the list does not show.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core import cursors

_DIGEST_BYTES: Final = 6
_PARAMETER: Final = "continue"


@dataclass(frozen=True, slots=True)
class ListPlace:
    """A place between two rows of a sorted list: after the row with this key and this number.

    A key of None stands for the rows without a value, which come last in either direction.
    """

    key: float | str | None
    number: int


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows by a key and a number, in which those without a key come last."""

    key: sa.ColumnElement[Any]
    number: sa.ColumnElement[Any]
    missing: sa.ColumnElement[bool] | None = None
    """The condition that selects the rows without a key, which come by number; None if every row has one."""
    falls: bool = False
    """Whether the largest key comes first."""
    ties_fall: bool = False
    """Whether the largest number comes first among rows with the same key."""

    def rows(self, conn: Connection, query: sa.Select[Any], limit: int, place: ListPlace | None) -> list[Any]:
        """Return the first rows of a query after a place, up to one more than `limit`."""
        key, number = self.key, self.number
        rows: list[Any] = []
        where: list[sa.ColumnElement[bool]]
        if place is None or place.key is not None:
            where = [] if self.missing is None else [key.is_not(None)]
            if place is not None:
                # The first condition alone lets an index begin at the place.
                where.append(key <= place.key if self.falls else key >= place.key)
                beyond = key < place.key if self.falls else key > place.key
                further = number < place.number if self.ties_fall else number > place.number
                where.append(sa.or_(beyond, further))
            order = (key.desc() if self.falls else key, number.desc() if self.ties_fall else number)
            rows += conn.execute(query.where(*where).order_by(*order).limit(limit + 1))
        if self.missing is not None and len(rows) <= limit:
            where = [self.missing]
            if place is not None and place.key is None:
                where.append(number > place.number)
            rows += conn.execute(query.where(*where).order_by(number).limit(limit + 1 - len(rows)))
        return rows


def digest(asked: Any) -> str:
    """Return a short digest of a sort order and filters, which are values of JSON."""
    data = orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def text(uid: str, asked: Any, place: ListPlace) -> str:
    """Return the `continue` of a place in a job's list."""
    key = orjson.dumps(place.key).decode()
    return cursors.text("views", uid, f"{digest(asked)}.{place.number}.{key}")


def place(
    given: str, uid: str, job: str, asked: Any, kind: type[float] | type[str] | None
) -> ListPlace | None:
    """Return the place of a `continue`, or None for an empty one.

    Args:
        given: The parameter of the request.
        uid: The uid of the job that has the name now.
        job: The name of the job.
        asked: The sort order and the filters of the request.
        kind: The type of the sort key, or None if only numbers sort.

    Raises:
        QueryRefused: It is not one, or it is one of another sort order or other filters.
        Gone: It belongs to another job.
    """
    if not given:
        return None
    word = cursors.word(given, "views", uid=uid, job=job, parameter=_PARAMETER)
    bound, _, rest = word.partition(".")
    number, _, key = rest.partition(".")
    if bound != digest(asked):
        raise cursors.garbage(_PARAMETER, given, "this list with these filters and this order")
    try:
        value = orjson.loads(key)
    except ValueError as error:
        raise cursors.garbage(_PARAMETER, given, "views") from error
    numeric = float if isinstance(value, int) and not isinstance(value, bool) else type(value)
    if not number.isdigit() or len(number) > 18 or (value is not None and numeric is not kind):
        raise cursors.garbage(_PARAMETER, given, "views")
    return ListPlace(float(value) if kind is float and value is not None else value, int(number))
