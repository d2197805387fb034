"""Words and variables of a Dockerfile, as Docker reads them. This module is pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollyard_pipeline.errors import WorkerError

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACED: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?[-+])([^{}$\"'\\]*))?\}")


class WordProblem(WorkerError, ValueError):
    """Words that cannot be read, or not be translated faithfully."""

    reason = "WordsRefused"


@dataclass(frozen=True, slots=True)
class ImageVariable:
    """A variable whose value is known only inside the image."""

    name: str


Value = tuple[str | ImageVariable, ...]
"""A text in parts. A reference stands for the value that the variable has in the image."""
Lookup = Callable[[str], Value | None]
"""Returns the value of a variable, or None if it has none."""


def split_words(text: str) -> list[str]:
    """Split at white space outside of quotes. The quotes stay.

    Raises:
        WordProblem: A quote is not closed.
    """
    words: list[str] = []
    word, quote, at = "", "", 0
    while at < len(text):
        letter = text[at]
        if letter == "\\" and quote != "'" and at + 1 < len(text):
            word += text[at : at + 2]
            at += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in " \t":
            if word:
                words.append(word)
            word, at = "", at + 1
            continue
        word += letter
        at += 1
    if quote:
        raise WordProblem(f"a quote {quote} is not closed")
    return [*words, word] if word else words


def expand(text: str, lookup: Lookup) -> Value:
    """Return the text without its quotes and escapes, and with the values of its variables.

    Raises:
        WordProblem: A substitution is of a kind that is not translated, or a quote is not closed.
    """
    parts: list[str | ImageVariable] = []
    quote, at = "", 0
    while at < len(text):
        letter = text[at]
        if quote == "'":
            quote = "" if letter == "'" else quote
            if letter != "'":
                parts.append(letter)
        elif letter == "\\" and at + 1 < len(text):
            at += 1
            # Within double quotes a backslash escapes only these.
            parts.append(text[at] if not quote or text[at] in '"$\\' else f"\\{text[at]}")
        elif letter == '"':
            quote = "" if quote else '"'
        elif letter == "'" and not quote:
            quote = "'"
        elif letter == "$":
            value, at = _variable(text, at + 1, lookup)
            parts += value
            continue
        else:
            parts.append(letter)
        at += 1
    if quote:
        raise WordProblem(f"a quote {quote} is not closed")
    return _joined(parts)


def _variable(text: str, at: int, lookup: Lookup) -> tuple[Value, int]:
    """Return the value of the variable whose name begins at `at`, and where the text continues."""
    if braced := _BRACED.match(text, at):
        name, modifier, word = braced[1], braced[2], braced[3]
        value = lookup(name)
        if modifier and any(isinstance(part, ImageVariable) for part in value or ()):
            raise WordProblem(f"${{{name}{modifier}…}} depends on a value that only the image knows")
        # With a colon an empty value counts as none.
        is_set = value is not None and (value != () or ":" not in (modifier or ""))
        if modifier and modifier.endswith("-"):
            value = value if is_set else (word,)
        elif modifier:
            value = (word,) if is_set else ()
        return value or (), braced.end()
    if text.startswith("{", at):
        raise WordProblem(f"the substitution ${text[at : at + 40]} is not translated")
    if plain := _NAME.match(text, at):
        return lookup(plain[0]) or (), plain.end()
    return ("$",), at


def _joined(parts: list[str | ImageVariable]) -> Value:
    joined: list[str | ImageVariable] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return tuple(joined)


def literal(value: Value) -> str:
    """Return the text of a value without references.

    Raises:
        WordProblem: It refers to a variable that only the image knows.
    """
    for part in value:
        if isinstance(part, ImageVariable):
            raise WordProblem(f"${part.name} has no value in the Dockerfile; only the image knows it")
    return "".join(str(part) for part in value)


def quoted(value: Value) -> str:
    """Return the value in double quotes, as a shell reads it.

    Raises:
        WordProblem: It holds a double quote, at which spython would cut it.
    """
    text = '"'
    for part in value:
        if isinstance(part, ImageVariable):
            text += f"${{{part.name}}}"
            continue
        if '"' in part:
            raise WordProblem("a value with a double quote is not translated; spython would cut it there")
        text += re.sub(r"([\\$`])", r"\\\1", part)
    return text + '"'
