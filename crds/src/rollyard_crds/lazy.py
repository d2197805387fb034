"""Packages whose names are imported when first asked for: to build all models takes a third of a second."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, names: Collection[str], modules: Sequence[str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562).

    Args:
        names: those that the package offers.
        modules: of the package, where they stand; looked through in this order.
    """

    def find(name: str) -> Any:
        if name in names:
            for module in modules:
                found = getattr(import_module(f"{package}.{module}"), name, None)
                if found is not None:
                    return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
