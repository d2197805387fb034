"""Every reason that Rollyard gives: what has happened, whose fault it is, and what to do.

The texts are in `reasons.toml` beside this module, in the order of the alphabet. The reference page, the
`type` of problem documents and `rollyard explain` lead to them. A test compares them with the code.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from rollyard_crds.errors import CrdsError

DOCUMENTATION: Final = "https://rollyard.dev/docs/"
"""Where the documentation is published. `project.urls` of pyproject.toml has the same address."""
_TEXTS: Final = Path(__file__).with_name("reasons.toml")
PLACES: Final = {
    "problem": "a problem document, the control plane's answer to a refused request",
    "rollout": "a rollout that has failed or was cancelled, or one of its attempts",
    "reward": "`reward_reason` of a trajectory",
    "truncation": "`truncated_reason` of a trajectory",
    "condition": "a condition of a job or a pool",
    "event": "an event of Kubernetes or of an event stream",
    "advice": "`status.advice` of a job",
    "view": "the page and its calls: why a job waits, or why a group was dropped",
    "command": "an error of a command, or of a program that does not start",
    "trainer": "an exception of the client or of an adapter for trainers",
    "extension": "an exception that handlers, agents and tools get from a sandbox",
    "message": "the message beside another reason, such as `SandboxStartFailed` or `BackendsFailing`",
    "log": "the log of a program",
}
"""Where a reason stands."""
FAULTS: Final = {
    "policy": "the policy: its reward says so, and nothing needs to be repaired",
    "author": "the author of the task or the job",
    "extension": "the author of a handler, an agent, a tool or a reward function",
    "trainer": "the trainer, or who else made the request",
    "installer": "whoever installed or operates Rollyard",
    "infrastructure": "the infrastructure: a machine, a network or a server",
    "user": "whoever ran the command",
    "rollyard": "Rollyard: this is a bug",
    "nobody": "nobody: this is how it should be",
}
"""Those at fault."""


class ReasonUnknown(CrdsError, LookupError):
    """No part of Rollyard gives this reason. The message names the nearest ones."""

    reason = "ReasonUnknown"


@dataclass(frozen=True, slots=True)
class ReasonMeaning:
    """One meaning of a reason. Words in backticks are code, as in Markdown."""

    places: tuple[str, ...]
    """Where it stands: keys of `PLACES`."""
    what: str
    """What has happened."""
    faults: tuple[str, ...]
    """Those at fault: keys of `FAULTS`, the likeliest one first."""
    remedy: str
    """What to do."""
    statuses: tuple[int, ...] = ()
    """The HTTP statuses of the problems."""


@cache
def all_reasons() -> dict[str, tuple[ReasonMeaning, ...]]:
    """Return each reason with its meanings. Most have one."""
    document = tomllib.loads(_TEXTS.read_text(encoding="utf-8"))
    return {name: tuple(_meaning(table) for table in tables) for name, tables in document.items()}


def meanings(reason: str) -> tuple[ReasonMeaning, ...]:
    """Return the meanings of a reason, whose letters may be of either case.

    Raises:
        ReasonUnknown: Rollyard gives no such reason.
    """
    known = all_reasons()
    names = {name.lower(): name for name in known}
    name = names.get(reason.lower())
    if name is not None:
        return known[name]
    near = [names[one] for one in difflib.get_close_matches(reason.lower(), names, 3)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ReasonUnknown(f"Rollyard gives no reason {reason[:128]!r}{hint}")


def link(reason: str) -> str:
    """Return the address of a reason in the documentation."""
    return f"{DOCUMENTATION}reference/reasons.html#{reason.lower()}"


def _meaning(table: dict[str, Any]) -> ReasonMeaning:
    def words(key: str) -> tuple[str, ...]:
        return tuple(table[key].split(", "))

    return ReasonMeaning(
        places=words("where"),
        what=" ".join(table["what"].split()),
        faults=words("fault"),
        remedy=" ".join(table["do"].split()),
        statuses=tuple(table.get("status", ())),
    )
