"""The language of docstrings and comments: whole sentences, and none of the words that hide who does what."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rollyard_testing.checkout import ROOT, files

PACKAGES = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/src/*/__init__.py"))
BESIDE = ("bench", "examples", "scripts", "tests")
"""The folders beside the packages whose texts are held to the same rules."""
OWN_WORDS = frozenset({"tests/docs/test_pages.py", "tests/house/test_language.py"})
"""The files that must name the refused words."""
FRAGMENT = re.compile(r"(Of|Whose|(With|To|By|In|For|From|On)(in)? which)\b")
"""A text that begins so has no subject: "Of the container." is "The container's resources."."""
NOUNS = frozenset(
    [
        "A",
        "All",
        "An",
        "Any",
        "As",
        "Both",
        "Each",
        "Every",
        "How",
        "Its",
        "Milliseconds",
        "None",
        "Nothing",
        "One",
        "Only",
        "Seconds",
        "Some",
        "The",
        "Those",
        "What",
        "When",
        "Where",
        "Whether",
        "Which",
        "Who",
    ]
)
"""The words that begin a noun phrase. The docstring of a function begins with a verb instead."""
NO_IMPERATIVE = re.compile(r"(?!This\b)[A-Z][a-z]*[^s]s\b|`|[A-Z]{2}")
"""A first word that is no verb in the imperative: "Returns", a name or an abbreviation. See PEP 257."""
ENTRY = re.compile(r"\s+\*{0,2}[\w.]+: (.+)")
WORDS = re.compile(r"\b(anew|goes on|went on|told|by then)\b", re.IGNORECASE)


def texts(source: str, nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Return line and text of each docstring (those of attributes, too) and of each comment."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str):
                yield node.lineno, " ".join(value.split())
                # An entry of Args or Raises is a text, too.
                for number, line in enumerate(value.splitlines()):
                    entry = ENTRY.match(line)
                    if entry is not None:
                        yield node.lineno + number, entry[1]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def noun_phrases(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings of functions that do not begin with a verb in the imperative.

    A property is named by a noun, and the docstring of a test may be a statement about the tested code. That
    of a group of commands describes the program for its help.
    """
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test_"):
            continue
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        if "property" in decorators or "click.group" in decorators:
            continue
        words = (ast.get_docstring(node) or "").split()
        if words and (words[0].strip(",.:;") in NOUNS or NO_IMPERATIVE.match(words[0])):
            yield node.lineno, " ".join(words)


def messages(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of string literals of several words that are not docstrings."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        words = node.value.split()
        if len(words) > 1:
            yield node.lineno, " ".join(words)


def shell_comments(source: str) -> Iterator[tuple[int, str]]:
    """Return line and text of the comments of a shell script that have a line of their own."""
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text.startswith("#"):
            yield number, text.lstrip("# ")


def findings(source: str, shell: bool = False, shown: bool = False) -> list[str]:
    """Return what is wrong with the texts of a module or a shell script, with line numbers.

    `shown` says that the strings of the module are messages to users.
    """
    found = []
    nodes = [] if shell else list(ast.walk(ast.parse(source)))
    for line, text in shell_comments(source) if shell else texts(source, nodes):
        fragment = FRAGMENT.match(text)
        if fragment is not None:
            found.append(f"{line}: begins with {fragment[0]!r}: {text[:70]}")
        found += [f"{line}: {word[0]!r} in: {text[:70]}" for word in WORDS.finditer(text)]
    if shown:
        found += [
            f"{line}: {word[0]!r} in the message: {text[:70]}"
            for line, text in messages(nodes)
            for word in WORDS.finditer(text)
        ]
    found += [f"{line}: does not begin with a command: {text[:70]}" for line, text in noun_phrases(nodes)]
    return found


def files_of(folder: str) -> Iterator[tuple[Path, bool]]:
    """Yield the Python files and scripts below a folder, and whether each is a shell script."""
    for path in (ROOT / name for name in files(folder)):
        if not path.is_file():
            continue
        if path.suffix == ".py":
            yield path, False
        elif not path.suffix:
            first = path.read_bytes().partition(b"\n")[0]
            if first.startswith(b"#!"):
                yield path, b"python" not in first


@pytest.mark.parametrize("folder", [*PACKAGES, *BESIDE])
def test_docstrings_and_comments_are_sentences(folder: str) -> None:
    sources = [
        (path, shell) for path, shell in files_of(folder) if str(path.relative_to(ROOT)) not in OWN_WORDS
    ]
    assert sources
    found = [
        f"{path.relative_to(ROOT)}:{finding}"
        for path, shell in sources
        for finding in findings(path.read_text(encoding="utf-8"), shell, shown=folder in PACKAGES)
    ]
    assert not found, "\n".join(found)
