"""Cursors: opaque, safe in URLs, and bound to the job whose results they count.

A job's uid is part of each cursor, so that a cursor of a deleted job is never taken for one of the
job that was submitted under its name later. Whole numbers, which older clients still hold, count
the results of the job that has the name now.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from typing import Final, Literal

from rollyard_api.core.problems import BadRequest, Conflict, Gone

Kind = Literal["trajectories", "groups", "rollouts", "events"]

_LETTERS: Final[dict[Kind, str]] = {"trajectories": "t", "groups": "g", "rollouts": "r", "events": "e"}
_VERSION = "v1"
MAX_LENGTH = 256
_MAX_DIGITS = 18
"""The largest number of digits of a position; it fits a 64-bit integer."""


def text(kind: Kind, uid: str, position: int | str) -> str:
    """The cursor of a place in the results of the job with this uid."""
    packed = base64.urlsafe_b64encode(uuid.UUID(uid).bytes).rstrip(b"=").decode()
    return f"{_VERSION}.{_LETTERS[kind]}.{packed}.{position}"


def garbage(parameter: str, given: str, kind: Kind) -> BadRequest:
    """What was given as a cursor is none."""
    detail = (
        f"{parameter}: {given[:80]!r} is no cursor of {kind}; pass on what the last answer gave, "
        "or leave it out to begin with the first"
    )
    return BadRequest(detail, reason="CursorInvalid", errors=[detail])


def _split(given: str, parameter: str, kind: Kind) -> tuple[str, str]:
    """The uid and the position of a cursor.

    Raises:
        BadRequest: it is none, or one of another kind.
    """
    parts = given.split(".", 3)
    if len(given) > MAX_LENGTH or len(parts) != 4 or parts[:2] != [_VERSION, _LETTERS[kind]]:
        raise garbage(parameter, given, kind)
    try:
        packed = base64.b64decode(parts[2] + "==", altchars=b"-_", validate=True)
        uid = str(uuid.UUID(bytes=packed))
    except (binascii.Error, ValueError) as error:
        raise garbage(parameter, given, kind) from error
    return uid, parts[3]


def gone(job: str) -> Gone:
    """The job that a cursor belongs to was deleted, and another one has its name."""
    return Gone(
        f"the RolloutJob {job!r} that this cursor belongs to was deleted, and another one was submitted "
        "under its name; begin without a cursor to read that one",
        reason="CursorGone",
    )


def word(given: str, kind: Kind, *, uid: str, job: str, parameter: str) -> str:
    """The position in a cursor of the job `job`, as it stands there.

    Raises:
        BadRequest: it is no cursor of this kind.
        Gone: it is one of another job.
    """
    found, position = _split(given, parameter, kind)
    if found != uid:
        raise gone(job)
    return position


def number(given: str, kind: Kind, *, uid: str, job: str, end: int, parameter: str = "cursor") -> int:
    """How many results of the job the cursor has behind it; none for an empty one.

    Args:
        given: the cursor, or a whole number as older clients hold it.
        uid: of the job that has the name now.
        job: its name.
        end: how many results it has.
        parameter: where the cursor stands in the request, for messages.

    Raises:
        BadRequest: it is no cursor of this kind.
        Gone: it is one of another job.
        Conflict: it lies past the end.
    """
    if not given:
        return 0
    plain = _is_number(given)
    position = given if plain else word(given, kind, uid=uid, job=job, parameter=parameter)
    if not _is_number(position):
        raise garbage(parameter, given, kind)
    if int(position) > end:
        raise beyond(parameter, int(position), end, job, kind)
    return int(position)


def beyond(parameter: str, position: int, end: int, job: str, kind: Kind) -> Conflict:
    """A cursor lies past the end of what the job has."""
    return Conflict(
        f"{parameter}: lies past the end: it has {position} {kind} behind it, and RolloutJob {job!r} has "
        f"{end}; begin without a cursor",
        reason="CursorBeyondEnd",
    )


def _is_number(given: str) -> bool:
    return 0 < len(given) <= _MAX_DIGITS and given.isascii() and given.isdigit()
