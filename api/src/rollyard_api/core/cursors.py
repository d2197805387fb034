"""Cursors, which are opaque, safe in URLs, and bound to the job whose results they count.

The uid of a job is part of each of its cursors. A cursor of a deleted job is therefore never taken for one of
a job that was submitted later under the same name.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Final, Literal

from rollyard_api.core.problems import Conflict, Gone, Malformed

Kind = Literal["trajectories", "groups", "unscored", "rollouts", "events", "views"]
"""What a cursor counts. The first letter of the cursor says it."""
_VERSION: Final = "v1"
MAX_LENGTH: Final = 256
_MAX_DIGITS: Final = 18
"""The largest number of digits of a position; such a number fits a 64-bit integer."""


def text(kind: Kind, uid: str, position: int | str) -> str:
    """Return the cursor of a position in the results of the job with this uid."""
    packed = base64.urlsafe_b64encode(uuid.UUID(uid).bytes).rstrip(b"=").decode()
    return f"{_VERSION}.{kind[0]}.{packed}.{position}"


def listed(kind: Kind, uid: str, positions: Sequence[int]) -> str:
    """Return the cursors after each of some results as a header's value.

    It is their common beginning, and after a semicolon the first position and the differences of the others
    from their predecessors, separated by commas. A page of 1,000 results takes some kilobytes.
    """
    steps = [str(to - at) for at, to in pairwise((0, *positions))]
    return f"{text(kind, uid, '')};{','.join(steps)}"


def garbage(parameter: str, cursor: str, kind: str) -> Malformed:
    """Return the error for a parameter that is not a cursor of this kind."""
    return Malformed.of(
        f"{parameter}: {cursor[:80]!r} is not a cursor of {kind}; pass on what the last answer gave, "
        "or leave it out to begin with the first",
        reason="CursorInvalid",
    )


def kind_of(cursor: str, kinds: Collection[Kind], parameter: str) -> Kind:
    """Return which of these kinds a cursor has.

    Raises:
        Malformed: This is not a cursor of one of the kinds.
    """
    letter = cursor.split(".", 2)[1] if cursor.startswith(f"{_VERSION}.") else ""
    for kind in kinds:
        if kind[0] == letter:
            return kind
    raise garbage(parameter, cursor, " or ".join(sorted(kinds)))


def gone(job: str) -> Gone:
    """Return the error for a cursor of a deleted job whose name another job has now."""
    return Gone(
        f"the RolloutJob {job!r} that this cursor belongs to was deleted, and another one was submitted "
        "under its name; begin without a cursor to read that one",
        reason="CursorGone",
    )


def word(cursor: str, kind: Kind, *, uid: str, job: str, parameter: str) -> str:
    """Return the position in a cursor of the job `job`, as it is written there.

    Raises:
        Malformed: This is not a cursor of this kind.
        Gone: The cursor belongs to another job.
    """
    parts = cursor.split(".", 3)
    if len(cursor) > MAX_LENGTH or len(parts) != 4 or parts[:2] != [_VERSION, kind[0]]:
        raise garbage(parameter, cursor, kind)
    try:
        owner = uuid.UUID(bytes=base64.b64decode(parts[2] + "==", altchars=b"-_", validate=True))
    except ValueError as error:
        raise garbage(parameter, cursor, kind) from error
    if str(owner) != uid:
        raise gone(job)
    return parts[3]


def number(cursor: str, kind: Kind, *, uid: str, job: str, end: int, parameter: str = "cursor") -> int:
    """Return the number of results that precede the cursor, which is 0 for an empty cursor.

    Args:
        cursor: The cursor.
        uid: The uid of the job that has the name now.
        job: The name of the job.
        end: The number of results that the job has.
        parameter: The name of the cursor's parameter in the request, for messages.

    Raises:
        Malformed: This is not a cursor of this kind.
        Gone: The cursor belongs to another job.
        Conflict: The cursor lies past the end.
    """
    if not cursor:
        return 0
    position = word(cursor, kind, uid=uid, job=job, parameter=parameter)
    if not (0 < len(position) <= _MAX_DIGITS and position.isascii() and position.isdigit()):
        raise garbage(parameter, cursor, kind)
    if int(position) > end:
        raise beyond(parameter, int(position), end, job, kind)
    return int(position)


def beyond(parameter: str, position: int, end: int, job: str, kind: Kind) -> Conflict:
    """Return the error for a cursor that lies past the end of the job's results."""
    return Conflict(
        f"{parameter}: lies past the end: it has {position} {kind} behind it, and RolloutJob {job!r} has "
        f"{end}; begin without a cursor",
        reason="CursorBeyondEnd",
    )
