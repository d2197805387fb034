"""Facts about a diff in git's form: which files it names, and which of them are tests."""

from __future__ import annotations

import re
from typing import Final

_HEADER: Final = re.compile(r'^diff --git (?:a/(.+?) b/(.+)|"a/(.+?)" "b/(.+)")$', re.MULTILINE)
_NO_TESTS: Final = (
    ".bmp", ".cfg", ".csv", ".gif", ".gz", ".html", ".ico", ".in", ".ini", ".jpeg", ".jpg", ".json", ".lock",
    ".md", ".pkl", ".png", ".rst", ".svg", ".toml", ".txt", ".xml", ".yaml", ".yml", ".zip",
)  # fmt: skip
"""Ends of names of files that are data of tests, and that no test command takes."""


def changed_files(patch: str) -> list[str]:
    """Return the paths that a diff names, before and after it, each once and in their order."""
    found: dict[str, None] = {}
    for match in _HEADER.finditer(patch):
        old, new, quoted_old, quoted_new = match.groups()
        for path in (old or quoted_old, new or quoted_new):
            if path:
                found[path] = None
    return list(found)


def files_to_test(patch: str) -> list[str]:
    """Return the files of a diff that a test command can take, as they are called after it."""
    news = (match.group(2) or match.group(4) for match in _HEADER.finditer(patch))
    return [path for path in dict.fromkeys(news) if path and not path.endswith(_NO_TESTS)]
