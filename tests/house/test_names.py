"""The names of classes: each of them stands for one thing in all packages."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
API, CLIENT = "rollyard_api.core.problems", "rollyard_client.errors"
SHARED = {
    # The client raises what the control plane raised at the other end of the wire.
    name: {API, CLIENT}
    for name in ("Conflict", "Invalid", "NotFound", "StorageFull", "Unauthorized")
}
"""The names that may stand in several modules, with these modules."""


def modules() -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the source of each module of the packages."""
    for path in sorted(ROOT.glob("*/src/**/*.py")):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts[2:])
        yield dotted.removesuffix(".__init__"), path.read_text(encoding="utf-8")


def homes(sources: Iterable[tuple[str, str]]) -> Mapping[str, set[str]]:
    """Return, for each public class, the modules that define one of this name."""
    found: dict[str, set[str]] = {}
    for module, source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(module)
    return found


def ambiguous(found: Mapping[str, set[str]]) -> list[str]:
    """Return the names that several modules define without being listed for exactly these modules."""
    return [
        f"{name}: {', '.join(sorted(where))}"
        for name, where in sorted(found.items())
        if len(where) > 1 and where != SHARED.get(name)
    ]


def test_each_name_of_a_class_stands_for_one_thing() -> None:
    found = homes(modules())
    assert len(found) > 500
    assert not ambiguous(found), "\n".join(ambiguous(found))


def test_every_exception_is_needed() -> None:
    found = homes(modules())
    assert {name: found.get(name) for name in SHARED} == SHARED
