"""Facts about a diff in git's form: which files it names, and which of them are tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_HEADERS: Final = (("diff --git a/", " b/", ""), ('diff --git "a/', '" "b/', '"'))
"""What comes before, between and after the two names in the first line of a file's diff."""
_NO_TESTS: Final = (
    ".bmp",
    ".cfg",
    ".csv",
    ".gif",
    ".gz",
    ".html",
    ".ico",
    ".in",
    ".ini",
    ".jpeg",
    ".jpg",
    ".json",
    ".lock",
    ".md",
    ".pkl",
    ".png",
    ".rst",
    ".svg",
    ".toml",
    ".txt",
    ".xml",
    ".yaml",
    ".yml",
    ".zip",
)
"""Suffixes of files that are data of tests, and that no test command takes."""


def changed_files(patch: str) -> list[str]:
    """Return the paths that a diff names, before and after the change, each once and in their order."""
    return list(dict.fromkeys(path for names in _names(patch) for path in names))


def files_to_test(patch: str) -> list[str]:
    """Return the files of a diff that a test command can take, by their names after the change."""
    return [new for new in dict.fromkeys(new for _, new in _names(patch)) if not new.endswith(_NO_TESTS)]


def _names(patch: str) -> Iterator[tuple[str, str]]:
    """Yield the names of each file before and after the change."""
    for line in patch.split("\n"):
        for begin, between, end in _HEADERS:
            if line.startswith(begin) and line.endswith(end):
                old, _, new = line.removesuffix(end)[len(begin) :].partition(between)
                if old and new:
                    yield old, new
