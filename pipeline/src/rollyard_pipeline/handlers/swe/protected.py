"""The files of a repository that the policy cannot change for Eval: tests, and what decides how they run."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Final

from rollyard_crds.fields.swe_tests import SweTests
from rollyard_crds.task_formats.swebench.diffs import changed_files

_FOLDERS: Final = (
    ".git", ".hg", ".eggs", ".nox", ".pytest_cache", ".tox", ".venv", "__pycache__", "node_modules",
    "*.dist-info", "*.egg-info", "site-packages",
)  # fmt: skip
"""Folders at any depth: histories, whose settings start programs; caches, from which compiled code is loaded
without a look at its source; environments; and metadata, which name plugins of pytest."""
_FILES: Final = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg",
    "pyproject.toml", "noxfile.py", ".coveragerc", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc",
    "*.pyo", "package.json", "jest.config.*", "vitest.config.*", "vite.config.*", "babel.config.*",
    ".babelrc*", ".mocharc.*", ".gitattributes", ".gitmodules",
)  # fmt: skip
"""Files at any depth that say how tests are run, or that an interpreter runs at its start."""


def protection(tests: SweTests) -> Callable[[bytes], bool]:
    """Return whether changes of a path by the policy are dropped.

    They are, for the hidden tests themselves, for what the task protects or hides, and for files that decide
    how tests are run. Each of these stays in the fresh sandbox as Init made it.
    """
    named = [*tests.files, *tests.protected, *_inside(tests)]
    if tests.patch is not None:
        named += changed_files(tests.patch)
    paths = {posixpath.normpath(path).encode("utf-8", "surrogateescape") for path in named}

    def protected(path: bytes) -> bool:
        parts = path.decode("utf-8", "surrogateescape").split("/")
        if any(_matches(part, _FOLDERS) for part in parts) or _matches(parts[-1], _FILES):
            return True
        return any(path == one or path.startswith(one + b"/") for one in paths)

    return protected


def _inside(tests: SweTests) -> Iterable[str]:
    """Return the hidden paths of the repository's folder, relative to it."""
    folder = tests.repository.path.rstrip("/") + "/"
    for path in tests.repository.hidden:
        if path.startswith(folder):
            yield path[len(folder) :]
        elif not path.startswith("/"):
            yield path


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
