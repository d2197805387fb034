"""Ids of tasks, made from the columns of rows. Different parts always give different ids."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

from rollyard_tasks.formats.interface import Row

_ESCAPED: Final = re.compile(r"[^A-Za-z0-9.-]")
_MAX: Final = 96
"""The number of characters of an id. The rest of TaskId's 128 is left for the number of an epoch."""


def task_id(*parts: Any) -> str:
    """Return an id of the parts, joined by slashes.

    Every character of a part that is not a letter, digit, full stop or hyphen becomes `_HEX_`, an escape that
    no other character has, so that no two lists of parts give the same id. An id that would be longer than 96
    characters, or that would not begin with a letter or digit, is the hash `sha256:HEX` instead, whose colon
    no other id contains.
    """
    joined = "/".join(_ESCAPED.sub(lambda match: f"_{ord(match[0]):x}_", str(part)) for part in parts)
    if len(joined) > _MAX or not joined[:1].isalnum():
        return f"sha256:{hashlib.sha256(joined.encode()).hexdigest()}"
    return joined


def row_id(row: Row, *columns: str) -> dict[str, str]:
    """Return the field `id` of a task from the first of these columns that a row fills, else no field.

    Raises:
        RowRefused: The column holds neither a text nor a whole number.
    """
    name = next((name for name in columns if name in row.values), None)
    if name is None:
        return {}
    value = row.values[name]
    if isinstance(value, float) and value.is_integer():  # pandas does so where one is missing.
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return {"id": task_id(value)}
    return {"id": task_id(*row.text(name).split("/"))}
