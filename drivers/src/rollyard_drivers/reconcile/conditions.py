"""Conditions, and how they are updated: the transition time moves only when the status flips."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from rollyard_crds import Condition

MESSAGE_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class ConditionUpdate:
    """One condition, before it is compared with what was said before."""

    type: str
    status: bool
    reason: str
    message: str = ""


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """The condition of this type, if it was ever set."""
    return next((condition for condition in conditions if condition.type == kind), None)


def holds(conditions: Iterable[Condition], kind: str) -> bool:
    """Whether the condition of this type is True."""
    condition = find(conditions, kind)
    return condition is not None and condition.status == "True"


def since(conditions: Iterable[Condition], kind: str) -> datetime | None:
    """When the condition of this type became True, if it holds."""
    condition = find(conditions, kind)
    return condition.last_transition_time if condition is not None and condition.status == "True" else None


def updated(
    before: list[Condition], updates: Iterable[ConditionUpdate], generation: int | None, now: datetime
) -> list[Condition]:
    """Returns `updates` as conditions, in their order; those of other types stay as they were."""
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
                message=update.message[:MESSAGE_LIMIT],
                observed_generation=generation,
                last_transition_time=now if flipped or old is None else old.last_transition_time,
            )
        )
    return out + [condition for condition in before if condition.type not in named]
