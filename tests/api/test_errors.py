"""The exceptions of the control plane are one tree, and each has a stable reason."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import rollyard_api
from rollyard_api.core.errors import ControlPlaneError


def exceptions() -> set[type[BaseException]]:
    """Return every exception class that a module of the package defines."""
    names = [m.name for m in pkgutil.walk_packages(rollyard_api.__path__, "rollyard_api.")]
    modules = [importlib.import_module(n) for n in names if "migrations" not in n and "__main__" not in n]
    return {
        found
        for module in modules
        for _, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, BaseException) and found.__module__ == module.__name__
    }


def test_every_exception_has_a_reason() -> None:
    """A reason is one CamelCase word, because it becomes a problem's type and a condition's reason."""
    for one in exceptions():
        assert issubclass(one, ControlPlaneError)
        assert one.reason.isalnum(), one
        assert one.reason[0].isupper(), one
