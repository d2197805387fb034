"""The language of docstrings and comments: whole sentences, and none of the words that hide who does what."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/src/*/__init__.py"))
PENDING: frozenset[str] = frozenset()
"""Packages whose texts are still being rewritten. A package leaves the list when it is clean."""
FRAGMENT = re.compile(r"(Of|Whose|(With|To|By|In|For|From|On)(in)? which)\b")
"""A text that begins so has no subject: "Of the container." is "The container's resources."."""
WORDS = re.compile(r"\b(anew|goes on|went on|told|by then)\b", re.IGNORECASE)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Return line and text of each docstring (those of attributes, too) and of each comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str):
                yield node.lineno, " ".join(value.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def findings(source: str) -> list[str]:
    """Return what is wrong with the texts of a module, with line numbers."""
    found = []
    for line, text in texts(source):
        fragment = FRAGMENT.match(text)
        if fragment is not None:
            found.append(f"{line}: begins with {fragment[0]!r}: {text[:70]}")
        found += [f"{line}: {word[0]!r} in: {text[:70]}" for word in WORDS.finditer(text)]
    return found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""Of the container."""', 1),
        ('class A:\n    b: int = 1\n    """Whose it is."""', 1),
        ("x = 1  # Within which it ends", 1),
        ("# the session goes\n# on\n", 0),
        ('"""A text that goes\n    on and is told anew."""', 3),
        ('x = "it goes on"', 0),
        ('"""The official way is often the best one."""', 0),
    ],
)
def test_fragments_and_words_are_found(source: str, count: int) -> None:
    assert len(findings(source)) == count


def test_pending_packages_exist() -> None:
    assert set(PACKAGES) > PENDING


@pytest.mark.parametrize("package", [package for package in PACKAGES if package not in PENDING])
def test_docstrings_and_comments_are_sentences(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules
    found = [
        f"{path.relative_to(ROOT)}:{finding}"
        for path in modules
        for finding in findings(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)
