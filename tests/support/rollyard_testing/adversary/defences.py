"""What each test of an attack shows: the mark `attack`, and the page that is made from all of them.

    pytestmark = pytest.mark.attack(boundary="worker", surface="job token")

    @pytest.mark.attack("a token without a uid is made", stopped_by="it is no job token, whatever its HMAC")
    def test_a_token_without_a_uid_is_refused(): ...

The mark of a module holds what its tests have in common, and a mark of a test adds to it or replaces a part.
A test with several marks shows several defences, and several tests with the same mark show one. In a table of
attacks each has a mark of its own (`attacks.cases`), which adds to that of the test.

`make docs` writes them into docs/reference/attacks.md (`scripts/attacks_page.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import pytest

BOUNDARIES: Final = {
    "evaluation": "Run and Eval: rewards, hidden tests, handlers",
    "sandbox": "Sandbox and host: kernel, files, processes, limits, other sandboxes",
    "network": "Sandbox and network",
    "exec server": "Commands and exec server: tools, observations",
    "node": "Users and programs of a node",
    "worker": "Worker and control plane: tokens, leases, ready workers",
    "control plane": "Control plane and its input: bodies, URLs, uploads, task files, logs",
    "viewers": "Viewers and control plane: read-only calls, the page, sign-in",
    "trainers": "Trainers and control plane: cursors, steps, weights",
    "prorl": "ProRL calls",
    "tenants": "Tenant and tenant: queues, stores, connections",
    "kubernetes": "Kubernetes",
    "slurm": "Slurm",
    "frame": "The frame of these attacks",
}
"""The boundaries of SECURITY.md, and the headings of the page."""


HEADER: Final = ("| surface | attack | what stops it | tests |", "|---|---|---|---|")


class MarkInvalid(ValueError):
    """A test has no mark `attack`, or one that lacks a part or names an unknown boundary."""


@dataclass(frozen=True, slots=True)
class Defence:
    """An attack on a surface, and what stops it."""

    boundary: str
    surface: str
    attack: str
    stopped_by: str


def defences(item: pytest.Item) -> list[Defence]:
    """Return what a test shows, by its marks and those of its module.

    Raises:
        MarkInvalid: A mark lacks a part, or there is none.
    """
    common: dict[str, Any] = {}
    own, of_parameters = [], []
    callspec = getattr(item, "callspec", None)
    for node, mark in item.iter_markers_with_node("attack"):
        if node is not item:
            common = {**_parts(mark), **common}
        elif callspec is not None and mark in callspec.marks:
            of_parameters.append(_parts(mark))
        else:
            own.append(_parts(mark))
    if of_parameters:
        for parts in own:
            common |= parts
        own = of_parameters
    return [_defence(item.nodeid, common | parts) for parts in own or [{}]]


def _parts(mark: pytest.Mark) -> dict[str, Any]:
    return {**dict(zip(("attack",), mark.args, strict=False)), **mark.kwargs}


def _defence(name: str, parts: dict[str, Any]) -> Defence:
    wanted = Defence.__dataclass_fields__.keys()
    if parts.keys() != wanted or not all(parts.values()):
        raise MarkInvalid(f"{name}: pytest.mark.attack needs {', '.join(wanted)}; it has {', '.join(parts)}")
    if parts["boundary"] not in BOUNDARIES:
        raise MarkInvalid(f"{name}: {parts['boundary']!r} is none of {', '.join(BOUNDARIES)}")
    return Defence(**parts)


def page(items: Iterable[pytest.Item]) -> str:
    """Return the defences that these tests show as a page in Markdown, by boundary and surface."""
    tests: dict[Defence, list[str]] = {}
    for item in items:
        for defence in defences(item):
            name = _name(item)
            names = tests.setdefault(defence, [])
            if name not in names:
                names.append(name)
    lines = [
        "# Attacks and what stops them",
        "",
        "What was tried at each boundary of [SECURITY.md](../../SECURITY.md), what stops it, and which",
        "tests below `tests/` show it. `make docs` writes this page from the marks of these tests.",
    ]
    for boundary, heading in BOUNDARIES.items():
        lines += ["", f"## {heading}", "", *HEADER]
        surfaces = dict.fromkeys(one.surface for one in tests if one.boundary == boundary)
        lines += [
            f"| {surface} | {one.attack} | {one.stopped_by} | {_by_file(tests[one])} |"
            for surface in surfaces
            for one in tests
            if (one.boundary, one.surface) == (boundary, surface)
        ]
    return "\n".join(lines) + "\n"


def _by_file(names: list[str]) -> str:
    """Return the names of tests, each file once with its tests."""
    files: dict[str, list[str]] = {}
    for name in names:
        path, _, test = name.partition("::")
        files.setdefault(path, []).append(f"`{test}`")
    return "; ".join(f"`{path}`: {', '.join(tests)}" for path, tests in files.items())


def _name(item: pytest.Item) -> str:
    """Return a test's file below tests and its name, with its attack where the test has a table of them."""
    path, _, name = item.nodeid.removeprefix("tests/").partition("::")
    name, _, parameters = name.partition("[")
    callspec = getattr(item, "callspec", None)
    if callspec is None or not any(mark.name == "attack" for mark in callspec.marks):
        return f"{path}::{name}"
    # A fixture's parameter, the kind of sandbox, stands before that of the test.
    attack = re.sub(r"^(bubblewrap|apptainer|podman)-", "", parameters.removesuffix("]"))
    return f"{path}::{name}[{attack}]"
