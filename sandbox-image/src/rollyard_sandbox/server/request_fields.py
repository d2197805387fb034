"""Functions that read fields of requests. All of them raise BadRequest, with the field's name."""

from __future__ import annotations

from rollyard_sandbox.errors import BadRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_SECONDS = 7 * 24 * 3600.0
"""The longest time that a request may name."""


def body_list(body: bytes) -> list[Any]:
    """Return the list that a body holds as JSON."""
    from json import loads

    try:
        found = loads(body)
    except ValueError as error:
        raise BadRequest(f"body: not JSON: {error}") from None
    if not isinstance(found, list):
        raise BadRequest("body: a list is needed")
    return found


def text_field(header: dict[str, Any], field: str) -> str:
    """Return a field that must be a string."""
    value = header.get(field)
    if not isinstance(value, str):
        raise BadRequest(f"{field}: a string is needed")
    return value


def whole_field(header: dict[str, Any], field: str, least: int, most: int) -> int:
    """Return a field that must be a whole number from `least` to `most`."""
    value = header.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"{field}: a whole number from {least} to {most} is needed")
    return value


def seconds_field(header: dict[str, Any], field: str) -> float:
    """Return a field that must be a number of seconds above 0 and up to MAX_SECONDS."""
    value = header.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_SECONDS:
        raise BadRequest(f"{field}: seconds above 0 and up to {MAX_SECONDS:.0f} are needed")
    return float(value)
