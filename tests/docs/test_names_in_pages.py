"""What pages name in backticks exists: files and folders of the repository, and modules of its packages."""

from __future__ import annotations

import importlib
import importlib.util
import re

import pytest
from rollyard_testing.checkout import ROOT, files

FILES = files()
# What the changelog names existed when the line was written.
PAGES = [
    name for name in FILES if name.endswith(".md") and name != "CHANGELOG.md" and (ROOT / name).is_file()
]
FOLDERS = {name.partition("/")[0] for name in FILES if "/" in name}
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"([\w.-]+)(/[\w.*-]+)*/?")
MODULE = re.compile(r"rollyard_\w+(\.\w+)+")


def code(text: str) -> list[str]:
    """Return what stands between single backticks, outside of fenced blocks."""
    return CODE.findall(FENCE.sub("", text))


def is_path(word: str) -> bool:
    """Return whether a word looks like a path from the repository's root: one of its folders and a slash."""
    return PATH.fullmatch(word) is not None and "/" in word and word.partition("/")[0] in FOLDERS


def is_there(path: str) -> bool:
    """Return whether a path or pattern names something below the root, or below tests as in attacks.md."""
    return any(True for folder in (ROOT, ROOT / "tests") for _ in folder.glob(path.rstrip("/")))


def is_defined(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    words = {word.partition("::")[0] for word in code((ROOT / page).read_text())}
    assert sorted(word for word in words if is_path(word) and not is_there(word)) == []


@pytest.mark.parametrize("page", PAGES)
def test_modules_exist(page: str) -> None:
    names = {word for word in code((ROOT / page).read_text()) if MODULE.fullmatch(word)}
    assert sorted(name for name in names if not is_defined(name)) == []
