"""Packages whose names are imported when they are first used.

It takes a third of a second to build all models, and a program that imports a package needs few of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package (PEP 562).

    A name that was looked up becomes an attribute of the package, so that this happens only once.

    Args:
        package: The name of the package.
        modules: For each module of the package, the names that it defines, separated by spaces.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
