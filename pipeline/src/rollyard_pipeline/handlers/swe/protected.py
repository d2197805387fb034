"""The files of a repository that the policy cannot change for Eval: tests, and what decides how they run."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Final

from rollyard_crds.fields.swe_tests import SweTests
from rollyard_tasks.formats.swebench.diffs import changed_files

from rollyard_pipeline.handlers.swe.results import in_a_function
from rollyard_pipeline.handlers.tables import words

_FOLDERS: Final = words(
    ".git .hg .eggs .nox .pytest_cache .tox .venv __pycache__ node_modules *.dist-info *.egg-info",
    "site-packages conftest encodings sitecustomize usercustomize",
)
"""Folders at any depth: histories, whose settings start programs; caches, from which compiled code is loaded
without a look at its source; environments; metadata, which name plugins of pytest; and packages that hide a
file of the next list."""
_FILES: Final = words(
    "conftest.* pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini setup.cfg pyproject.toml setup.py",
    "versioneer.py makefile gnumakefile noxfile.py .coveragerc sitecustomize.* usercustomize.* *.pth *.pyc",
    "*.pyo package.json jest.config.* vitest.config.* vite.config.* babel.config.* .babelrc* .mocharc.*",
    ".gitattributes .gitmodules",
)
"""Files at any depth that say how tests are run, or that an interpreter runs at its start."""
_TESTS: Final = re.compile(r"tests?|\w+[_-]tests?|tests?[_-]\w+", re.IGNORECASE)
"""The names of folders that hold tests, and what tests share. A `testing` further down may be the product."""


def protection(tests: SweTests) -> Callable[[bytes], bool]:
    """Return whether changes of a path by the policy are dropped.

    They are, for the tests that decide and the folders of tests that they lie in, for what the task protects
    or hides, and for files that decide how tests are run. Each of these stays in the fresh sandbox as Init
    made it.
    """
    named = test_paths(tests)
    named += test_folders(named)
    paths = {path.encode("utf-8", "surrogateescape") for path in named}

    def protected(path: bytes) -> bool:
        parts = path.decode("utf-8", "surrogateescape").split("/")
        # Programs that read them may ignore the case of letters.
        small = [part.lower() for part in parts]
        if any(_matches(part, _FOLDERS) for part in small) or _matches(small[-1], _FILES):
            return True
        return any(path == folder or path.startswith(folder + b"/") for folder in paths)

    return protected


def test_paths(tests: SweTests) -> list[str]:
    """Return the files and folders of the tests that decide, relative to the repository's folder."""
    named = [*tests.files, *tests.protected, *_inside(tests)]
    if tests.patch is not None:
        named += changed_files(tests.patch)
    deciding = [*tests.fail_to_pass, *tests.pass_to_pass, *(tests.expected or ())]
    named += [name.partition("::")[0] for name in deciding if "::" in name and in_a_function(name)]
    return sorted({posixpath.normpath(path) for path in named})


def test_folders(paths: Iterable[str]) -> list[str]:
    """Return the folders of tests in which these files lie, because what tests share lies there, too."""
    folders = set()
    for path in paths:
        parts = path.split("/")[:-1]
        for depth, part in enumerate(parts):
            if _TESTS.fullmatch(part) or (part == "testing" and depth == 0):
                folders.add("/".join(parts[: depth + 1]))
                break
    return sorted(folders)


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
