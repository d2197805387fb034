"""Keyset pages: a page continues after a sort key and a number, and never skips or repeats a row.

The `continue` of a page is bound to the sort order and the filters that made it, and to the job. A forged one
can name any place of the same list, which shows nothing that the list does not show.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import orjson

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
