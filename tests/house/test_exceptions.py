"""The exceptions of each package are one tree, whose root gives every one of them a `reason`."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/src/*/__init__.py"))
EXEMPT = {
    # This module is sent into sandboxes, where the package is not installed. The class derives from
    # BaseException, so that a handler for Exception in the author's test does not catch it.
    "rollyard_pipeline.handlers.code.sandboxed.Unanswered"
}
"""The exceptions outside of the trees. A private one is in its tree like any other."""


@dataclass(slots=True)
class Module:
    """The names of one module: what it imports, and the bases of the classes that stand anywhere in it."""

    imports: dict[str, str] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)
    with_reason: set[str] = field(default_factory=set)


class Exceptions:
    """The exceptions among the classes of some modules.

    Args:
        sources: The dotted name and the source of each module.
    """

    def __init__(self, sources: Iterable[tuple[str, str]]) -> None:
        self._modules = {name: _module(source) for name, source in sources}
        self._packages = {name.partition(".")[0] for name in self._modules}

    def __iter__(self) -> Iterator[str]:
        """Yield the full name of each exception."""
        for name, module in self._modules.items():
            yield from (f"{name}.{cls}" for cls in module.bases if self._is_exception(f"{name}.{cls}"))

    def roots(self) -> Mapping[str, list[str]]:
        """Return the exceptions of each package whose bases hold no exception of the same package."""
        found: dict[str, list[str]] = {}
        for name in self:
            package = name.partition(".")[0]
            if not any(base.partition(".")[0] == package for base in self._exceptions_above(name)):
                found.setdefault(package, []).append(name)
        return found

    def has_reason(self, name: str) -> bool:
        """Return whether a class, or an exception of the packages above it, has the attribute `reason`."""
        module, _, cls = name.rpartition(".")
        if module not in self._modules:
            return False
        above = self._exceptions_above(name)
        return cls in self._modules[module].with_reason or any(self.has_reason(base) for base in above)

    def _exceptions_above(self, name: str) -> list[str]:
        module, _, cls = name.rpartition(".")
        bases = [self._resolved(module, base) for base in self._modules[module].bases[cls]]
        return [base for base in bases if self._is_exception(base)]

    def _resolved(self, module: str, name: str) -> str:
        first, _, rest = name.partition(".")
        names = self._modules[module]
        if name in names.bases:
            return f"{module}.{name}"
        if first not in names.imports:
            return f"builtins.{name}"
        full = names.imports[first] + (f".{rest}" if rest else "")
        home, _, cls = full.rpartition(".")
        if home in self._modules and cls not in self._modules[home].bases:
            return self._resolved(home, cls)  # The module has imported the class itself.
        return full

    def _is_exception(self, name: str) -> bool:
        module, _, cls = name.rpartition(".")
        if module in self._modules:
            return bool(self._exceptions_above(name))
        assert module.partition(".")[0] not in self._packages, f"the definition of {name} is not found"
        found = getattr(builtins if module == "builtins" else import_module(module), cls, None)
        return isinstance(found, type) and issubclass(found, BaseException)


def _module(source: str) -> Module:
    found = Module()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(home)):
                found.imports |= {name.asname or name.name: f"{home}.{name.name}" for name in node.names}
            case ast.Import():
                for name in node.names:
                    first = name.name.partition(".")[0]
                    found.imports[name.asname or first] = name.name if name.asname else first
            case ast.ClassDef():
                plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                found.bases[node.name] = [ast.unparse(base) for base in plain]
                if "reason" in _assigned(node):
                    found.with_reason.add(node.name)
    return found


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.Assign):
            yield from (ast.unparse(target) for target in part.targets)
        elif isinstance(part, ast.AnnAssign):
            yield ast.unparse(part.target)


def modules() -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the source of each module of the packages."""
    for path in sorted(ROOT.glob("*/src/**/*.py")):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts[2:])
        yield dotted.removesuffix(".__init__"), path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def exceptions() -> Exceptions:
    return Exceptions(modules())


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_has_one_tree_of_exceptions(exceptions: Exceptions, package: str) -> None:
    found = [name for name in exceptions.roots()[package] if name not in EXEMPT]
    assert len(found) == 1, f"these derive from no exception of {package}: {', '.join(found)}"
    assert exceptions.has_reason(found[0])


def test_all_exceptions_are_looked_at(exceptions: Exceptions) -> None:
    assert len(list(exceptions)) > 90
    assert set(exceptions.roots()) == set(PACKAGES)


def test_each_exemption_is_needed(exceptions: Exceptions) -> None:
    outside = {name for names in exceptions.roots().values() for name in names}
    assert outside >= EXEMPT
