"""Write the states of a rollout and the failure policy into docs/architecture.md, as the code has them."""

from __future__ import annotations

from inspect import getdoc
from pathlib import Path
from typing import Final, get_args

from rollyard_api.machine import events
from rollyard_api.machine.failure_policy import (
    MAX_EVAL_EXPIRIES,
    MAX_EXPIRIES,
    MAX_OUTAGES,
    RULES,
    Action,
    Counter,
)
from rollyard_api.machine.states import ENDED, TRANSITIONS, UNFINISHED, RolloutState

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
BOUNDS: Final = {
    Counter.FAILURES: "failures of the stage: `maxAttempts` of the stage, less one",
    Counter.OUTAGES: f"outages: {MAX_OUTAGES}",
    Counter.EXPIRIES: f"lost leases: {MAX_EXPIRIES}",
    Counter.EVAL_EXPIRIES: f"lost Eval leases in one sandbox: {MAX_EVAL_EXPIRIES}",
}
"""How far each counter may rise, in words."""

SOURCES: Final = {
    events.Leased: ("leasing",),
    events.InitDone: ("reports",),
    events.RunDone: ("reports",),
    events.Scored: ("reports",),
    events.Failed: ("reports",),
    events.LeaseLost: ("sweeps",),
    events.NodeLost: ("heartbeats",),
    events.NewWeights: ("staleness",),
    events.BackendAwaited: ("sweeps", "jobs"),
    events.Rewarded: ("unscored",),
    events.RewardAwaited: ("sweeps",),
    events.Cancelled: ("jobs", "transitions"),
    events.Moved: ("leasing",),
    events.Blamed: ("leasing",),
}
"""The modules that make each event."""


def sections() -> dict[str, str]:
    """Return what stands after each marker of the page, up to the marker of the end."""
    return {
        "<!-- transitions -->\n": f"```mermaid\n{picture()}```\n",
        "<!-- events -->\n": events_table(),
        "<!-- failure policy -->\n": table(),
    }


def events_table() -> str:
    """Return the events, what each of them means and where it is made, as a table in Markdown."""
    lines = ["| event | what has happened | made in |", "|---|---|---|"]
    for event in get_args(events.Event):
        meaning = " ".join(str(getdoc(event)).split("\n\n")[0].split())
        modules = " and ".join(f"`{name}.py`" for name in SOURCES[event])
        lines.append(f"| {event.__name__} | {meaning} | {modules} |")
    return "\n".join(lines) + "\n"


def table() -> str:
    """Return the rules of the failure policy as a table in Markdown."""
    lines = [
        "| rule | what has happened | what follows | counts as an attempt | how often for one rollout |",
        "|---|---|---|---|---|",
    ]
    for event, rule in ((event, rule) for event, rules in RULES.items() for rule in rules):
        follows = f"{rule.action.value}, and the job with it" if rule.ends_job else rule.action.value
        if event is events.Failed and rule.action is Action.RETRY:
            follows = f"{follows}, or start from the earlier one that the report names"
        often = "; ".join(BOUNDS[counter] for counter in rule.raises) or "-"
        counted = "yes" if rule.counted else "no"
        lines.append(f"| {rule.name} | {rule.meaning} | {follows} | {counted} | {often} |")
    return "\n".join(lines) + "\n"


def picture() -> str:
    """Return the transitions as a state diagram in Mermaid's language."""
    edges: dict[tuple[RolloutState, RolloutState], list[str]] = {}
    for event, allowed in TRANSITIONS.items():
        if event is not events.Cancelled:
            for before, afters in allowed.items():
                for after in afters:
                    edges.setdefault((before, after), []).append(event.__name__)
    # A rollout may be cancelled in every unfinished state, which one edge of all of them together shows.
    inside: list[str] = []
    outside = [f"unfinished --> {_name(RolloutState.CANCELLED)}: {events.Cancelled.__name__}"]
    for (before, after), names in sorted(edges.items()):
        side = outside if after.has_ended else inside
        side.append(f"{_name(before)} --> {_name(after)}: {', '.join(names)}")
    lines = [
        "stateDiagram-v2",
        "    state unfinished {",
        *(f"        {_name(state)}: {_described(state)}" for state in UNFINISHED),
        f"        [*] --> {_name(RolloutState.QUEUED_INIT)}",
        *(f"        {edge}" for edge in inside),
        "    }",
        *(f"    {edge}" for edge in outside),
        *(f"    {_name(state)} --> [*]" for state in ENDED),
    ]
    return "\n".join(lines) + "\n"


def _described(state: RolloutState) -> str:
    return "awaits a reward" if state == RolloutState.UNSCORED else f"{state.status} {state.stage}"


def _name(state: RolloutState) -> str:
    return state.name.lower()


def current(page: str) -> str:
    """Return the page with its sections as the code has them."""
    for marker, text in sections().items():
        before, rest = page.split(marker)
        page = f"{before}{marker}{text}{rest[rest.index('<!-- end -->') :]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
