"""Write the states of a rollout and the failure policy into docs/architecture.md, as the code has them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rollyard_api.machine import events
from rollyard_api.machine.failure_policy import MAX_EVAL_EXPIRIES, MAX_EXPIRIES, MAX_OUTAGES, RULES, Counter
from rollyard_api.machine.states import ENDED, TRANSITIONS, UNFINISHED, RolloutState

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
BOUNDS: Final = {
    Counter.FAILURES: "failures of the stage: `maxAttempts` of the stage, less one",
    Counter.OUTAGES: f"outages: {MAX_OUTAGES}",
    Counter.EXPIRIES: f"lost leases: {MAX_EXPIRIES}",
    Counter.EVAL_EXPIRIES: f"lost Eval leases in one sandbox: {MAX_EVAL_EXPIRIES}",
}
"""How far each counter may rise, in words."""


def sections() -> dict[str, str]:
    """Return what stands after each marker of the page, up to the marker of the end."""
    return {
        "<!-- transitions -->\n": f"```mermaid\n{picture()}```\n",
        "<!-- failure policy -->\n": table(),
    }


def table() -> str:
    """Return the rules of the failure policy as a table in Markdown."""
    lines = [
        "| rule | what has happened | what follows | counts as an attempt | how often for one rollout |",
        "|---|---|---|---|---|",
    ]
    for rule in (rule for rules in RULES.values() for rule in rules):
        follows = f"{rule.action.value}, and the job with it" if rule.ends_job else rule.action.value
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
        *(f"        {_name(state)}: {state.status} {state.stage}" for state in UNFINISHED),
        f"        [*] --> {_name(RolloutState.QUEUED_INIT)}",
        *(f"        {edge}" for edge in inside),
        "    }",
        *(f"    {edge}" for edge in outside),
        *(f"    {_name(state)} --> [*]" for state in ENDED),
    ]
    return "\n".join(lines) + "\n"


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
