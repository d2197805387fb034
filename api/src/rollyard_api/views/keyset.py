"""Keyset pages: a page continues after a sort key and a number, and never skips or repeats a row.

The `continue` of a page is bound to the sort order and the filters that made it, and to the job. A forged one
can name any place in the same list, which reveals nothing that the list does not.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.engine import Connection

from rollyard_api.core import cursors
from rollyard_api.storage.rows import JobRow

_DIGEST_BYTES: Final = 6
_PARAMETER: Final = "continue"
Place = tuple[Any, int]
"""A place between two rows of a sorted list: after the row with this key and this number.

A key of None stands for the rows without a value, which come last in either direction."""


Page = tuple[list[dict[str, Any]], str | None]
"""Some rows of a list, and the `continue` of the next page, or None if there are no more."""


def encode(filters: BaseModel, place: Sequence[Any]) -> str:
    """Return the `continue` of a place in the requested list."""
    data = msgspec.json.encode((_digest(filters), *place))
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode(cursor: str, filters: BaseModel, kinds: Sequence[Any]) -> list[Any]:
    """Return the place of a `continue`, whose values have these types.

    Raises:
        Malformed: It is not one, or it is one of another sort order or other filters.
    """
    try:
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        bound, *values = msgspec.json.decode(data, type=list[Any])
        place = [msgspec.convert(value, kind) for value, kind in zip(values, kinds, strict=True)]
    except ValueError as error:
        raise cursors.garbage(_PARAMETER, cursor, "this list") from error
    if bound != _digest(filters):
        raise cursors.garbage(_PARAMETER, cursor, "this list with these filters and this order")
    return place


def _digest(filters: BaseModel) -> str:
    return hashlib.blake2b(filters.model_dump_json().encode(), digest_size=_DIGEST_BYTES).hexdigest()


def text(job: JobRow, filters: BaseModel, place: Place | None) -> str | None:
    """Return the `continue` of a place in a job's list, or None for none."""
    return None if place is None else cursors.text("views", job.uid, encode(filters, place))


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows by a key and a number, with those without a key last."""

    key: sa.ColumnElement[Any]
    number: sa.ColumnElement[Any]
    missing: sa.ColumnElement[bool] | None = None
    """The condition that selects the rows without a key, which come by number; None if every row has one."""
    falls: bool = False
    """Whether the largest key comes first, and the largest number among rows with the same key."""

    def place(self, cursor: str, job: JobRow, filters: BaseModel) -> Place | None:
        """Return the place of a `continue` of a job's list, or None for an empty one.

        Raises:
            Malformed: It is not one, or it is one of another sort order or other filters.
            Gone: It belongs to another job.
        """
        if not cursor:
            return None
        word = cursors.word(cursor, "views", uid=job.uid, job=job.name, parameter=_PARAMETER)
        key, number = decode(word, filters, (_kind(self.key) | None, _kind(self.number)))
        return key, number

    def rows(
        self, conn: Connection, query: sa.Select[Any], limit: int, place: Place | None
    ) -> tuple[list[Any], Place | None]:
        """Return the first rows of a query after a place, and the place of the last if there are more."""
        key, number = self.key, self.number
        query = query.add_columns(key.label("sort_key"), number.label("sort_number"))
        rows: list[Any] = []
        where: list[sa.ColumnElement[bool]]
        if place is None or place[0] is not None:
            where = [] if self.missing is None else [key.is_not(None)]
            if place is not None:
                both = sa.tuple_(key, number)
                where.append(both < place if self.falls else both > place)
            order = (key.desc(), number.desc()) if self.falls else (key, number)
            rows += conn.execute(query.where(*where).order_by(*order).limit(limit + 1))
        if self.missing is not None and len(rows) <= limit:
            where = [self.missing]
            if place is not None and place[0] is None:
                where.append(number > place[1])
            rows += conn.execute(query.where(*where).order_by(number).limit(limit + 1 - len(rows)))
        return rows[:limit], place_of(rows[limit - 1]) if len(rows) > limit else None


def _kind(column: sa.ColumnElement[Any]) -> Any:
    """Return the type of the values that may be compared with a column: PostgreSQL refuses all others."""
    kind = column.type.python_type
    if kind is int:
        bits = 63 if isinstance(column.type, sa.BigInteger) else 31
        return Annotated[int, msgspec.Meta(ge=0, le=(1 << bits) - 1)]
    return Annotated[str, msgspec.Meta(pattern=r"^[^\x00]*$")] if kind is str else kind


def place_of(row: Any) -> Place:
    """Return the place of a row that `Order.rows` has returned."""
    return row.sort_key, row.sort_number
