"""When a rollout entered each of its states, as its row keeps it for pages that draw time.

The key `_` of the row's timings holds it, and records leave it out. The times are whole milliseconds after
the first of them, in one flat list: the first time in seconds since the epoch, then a state's number and a
time for each state that the rollout entered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rollyard_api.machine.events import RunCounts
from rollyard_api.machine.states import BY_NUMBER, RolloutState

KEY: Final = "_"
MAX_STATES: Final = 64
"""The number of states that are kept. Of a rollout that entered more, the second and later ones are lost."""
MAX_REASON: Final = 64


def note(
    document: dict[str, Any], before: RolloutState, since: float, after: RolloutState, now: float
) -> None:
    """Add to decoded timings that a rollout, which was in one state since a time, has entered another."""
    trace = document.setdefault(KEY, {})
    places = trace.setdefault("at", [round(since, 3), int(before), 0])
    places += (int(after), max(0, round((now - places[0]) * 1000)))
    if len(places) > 1 + 2 * MAX_STATES:
        del places[3:5]


def count(document: dict[str, Any], counts: RunCounts) -> None:
    """Add what a Run counted to decoded timings. An earlier Run's counts are replaced."""
    trace = document.setdefault(KEY, {})
    for name, value in (("turns", counts.turns), ("calls", counts.tool_calls), ("cut", counts.cut)):
        if value or name == "turns":
            trace[name] = value
        else:
            trace.pop(name, None)


def spans(timings: Mapping[str, Any], end: float) -> list[tuple[str, float, float]]:
    """Return the spans of decoded timings in their order; the last ends at `end`, in seconds of the epoch.

    Each has the name, the begin and the end of a state. The name is the stage, with `-queue` if the rollout
    waited for it. A rollout that has not left its first state has none yet.
    """
    entries = timings.get(KEY, {}).get("at")
    if not entries:
        return []
    first = float(entries[0])
    states = [BY_NUMBER[number] for number in entries[1::2]]
    names = [f"{state.stage}{'' if state.is_leased else '-queue'}" for state in states]
    starts = [first + milliseconds / 1000 for milliseconds in entries[2::2]]
    return list(zip(names, starts, [*starts[1:], max(end, starts[-1])], strict=True))
