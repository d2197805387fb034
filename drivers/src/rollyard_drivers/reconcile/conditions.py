"""Conditions and their updates. The transition time of a condition changes only when its status flips."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rollyard_crds import Condition

MESSAGE_LIMIT: Final = 1024
"""The length of the message of a condition or of a job."""


@dataclass(frozen=True, slots=True)
class ConditionUpdate:
    """A new value of one condition, before it is compared with the previous value."""

    type: str
    status: bool
    reason: str
    message: str = ""


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """Return the condition of this type, or None if it was never set."""
    return next((condition for condition in conditions if condition.type == kind), None)


def holds(conditions: Iterable[Condition], kind: str) -> bool:
    """Return whether the condition of this type is True."""
    condition = find(conditions, kind)
    return condition is not None and condition.status == "True"


def since(conditions: Iterable[Condition], kind: str) -> datetime | None:
    """Return the time at which the condition of this type became True, or None if it is not True."""
    condition = find(conditions, kind)
    return condition.last_transition_time if condition is not None and condition.status == "True" else None


def shortened(message: str) -> str:
    """Return a message that fits into a status. If it is too long, it ends with a whole word and `…`."""
    if len(message) <= MESSAGE_LIMIT:
        return message
    # A text without spaces is cut anywhere.
    start = message[: MESSAGE_LIMIT - len(" …")]
    return f"{start.rpartition(' ')[0] or start} …"


def updated(
    before: list[Condition], updates: Iterable[ConditionUpdate], generation: int | None, now: datetime
) -> list[Condition]:
    """Return `updates` as conditions, in their order.

    The conditions of other types are not changed and follow them.
    """
    out = []
    named = set()
    for update in updates:
        named.add(update.type)
        old = find(before, update.type)
        status = "True" if update.status else "False"
        flipped = old is None or old.status != status
        out.append(
            Condition(
                type=update.type,
                status="True" if update.status else "False",
                reason=update.reason,
                message=shortened(update.message),
                observed_generation=generation,
                last_transition_time=now if flipped or old is None else old.last_transition_time,
            )
        )
    return out + [condition for condition in before if condition.type not in named]
