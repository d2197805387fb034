"""The instructions of a Dockerfile with their lines, and their words as Docker reads them. This is pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollyard_pipeline.errors import WorkerError
from rollyard_pipeline.sandboxes.errors import DockerfileRefused

MAX_BYTES: Final = 256 << 10
"""The largest size of a Dockerfile in bytes."""
_DIRECTIVE: Final = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.*?)\s*")
_FRONTENDS: Final = re.compile(r"(docker\.io/)?docker/dockerfile(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?")
_CONTINUED: Final = re.compile(r"\\[ \t]*$")
_HEREDOC: Final = re.compile(r"(?<!<)<<(?!<)")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACED: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?[-+])([^{}$\"'\\]*))?\}")
_FLAG: Final = re.compile(r"--([a-z][a-z-]*)")


class DockerfileProblem(WorkerError, ValueError):
    """Something in a Dockerfile, or in what it copies, cannot be used. The caller names the line.

    The reason is `WordsRefused` (words that cannot be read, or not be translated faithfully) or
    `CopyImpossible` (a file that cannot be copied, which the message names).
    """

    def __init__(self, message: str, reason: str = "WordsRefused") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction, whose continued lines have been joined."""

    line: int
    """The number of its first line, from 1."""
    keyword: str
    """In capital letters."""
    text: str
    """What follows the keyword."""

    def refused(self, problem: str) -> DockerfileRefused:
        """Return the error that names this line."""
        return DockerfileRefused(f"Dockerfile line {self.line}: {self.keyword}: {problem}", self.line)


def read_dockerfile(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile in their order.

    Raises:
        DockerfileRefused: The text is too long, or has a directive that changes how it is read.
    """
    if len(text) > MAX_BYTES:
        raise DockerfileRefused(f"Dockerfile: is longer than {MAX_BYTES} bytes", 1)
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    _check_directives(lines)
    instructions: list[Instruction] = []
    joined, began = "", 0
    for number, line in enumerate(lines, 1):
        # Comments and empty lines may stand between continued lines.
        if line.strip() == "" or line.lstrip().startswith("#"):
            continue
        began = began or number
        if _CONTINUED.search(line):
            joined += _CONTINUED.sub("", line)
            continue
        if (joined + line).strip():
            instructions.append(_instruction(began, joined + line))
        joined, began = "", 0
    if joined.strip():
        instructions.append(_instruction(began, joined))
    return instructions


def _instruction(number: int, line: str) -> Instruction:
    keyword, *rest = line.split(maxsplit=1)
    text = rest[0].strip() if rest else ""
    return Instruction(number, keyword.upper()[:40], text)


def check_instruction(each: Instruction) -> None:
    """Check an instruction for what is not allowed in any.

    Raises:
        DockerfileRefused: It has an option, a heredoc, the JSON form where that is not translated, or
            characters that a definition file cannot have.
    """
    if not each.text.replace("\t", " ").isprintable():
        raise each.refused("holds a character that cannot be printed")
    if each.keyword in ("RUN", "COPY", "ADD"):
        if _HEREDOC.search(each.text):
            raise each.refused("a heredoc (<<) is not translated; spython would leave out its lines")
        if flag := _FLAG.match(each.text):
            raise each.refused(f"the option --{flag[1]} is not translated; spython would misread it")
        if _is_json(each.text):
            raise each.refused("the JSON form is not translated; write the words without brackets")
    if "{{" in each.text:
        raise each.refused("'{{' cannot be written in a definition file: it begins a build argument")


def _is_json(text: str) -> bool:
    """Return whether the words are a list of JSON. A `[` of the shell is not one."""
    try:
        return isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False


def _check_directives(lines: list[str]) -> None:
    """Check the directives, which are comments before everything else."""
    for number, line in enumerate(lines, 1):
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None:
            return
        name, value = match[1].lower(), match[2]
        if name == "escape" and value != "\\":
            raise DockerfileRefused(
                f"Dockerfile line {number}: the directive escape is not translated; spython would ignore it",
                number,
            )
        if name == "syntax" and not _FRONTENDS.fullmatch(value):
            raise DockerfileRefused(
                f"Dockerfile line {number}: syntax={value[:80]} is another language, and not translated",
                number,
            )


# The functions below read words.


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
        DockerfileProblem: A quote is not closed.
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
        raise DockerfileProblem(f"a quote {quote} is not closed")
    return [*words, word] if word else words


def expand(text: str, lookup: Lookup) -> Value:
    """Return the text without its quotes and escapes, and with the values of its variables.

    Raises:
        DockerfileProblem: A substitution is of a kind that is not translated, or a quote is not closed.
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
        raise DockerfileProblem(f"a quote {quote} is not closed")
    return _joined(parts)


def _variable(text: str, at: int, lookup: Lookup) -> tuple[Value, int]:
    """Return the value of the variable whose name begins at `at`, and where the text continues."""
    if braced := _BRACED.match(text, at):
        name, modifier, word = braced[1], braced[2], braced[3]
        value = lookup(name)
        if modifier and any(isinstance(part, ImageVariable) for part in value or ()):
            raise DockerfileProblem(f"${{{name}{modifier}…}} depends on a value that only the image knows")
        # With a colon an empty value counts as none.
        is_set = value is not None and (value != () or ":" not in (modifier or ""))
        if modifier and modifier.endswith("-"):
            value = value if is_set else (word,)
        elif modifier:
            value = (word,) if is_set else ()
        return value or (), braced.end()
    if text.startswith("{", at):
        raise DockerfileProblem(f"the substitution ${text[at : at + 40]} is not translated")
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
        DockerfileProblem: It refers to a variable that only the image knows.
    """
    for part in value:
        if isinstance(part, ImageVariable):
            raise DockerfileProblem(f"${part.name} has no value in the Dockerfile; only the image knows it")
    return "".join(str(part) for part in value)


def quoted(value: Value) -> str:
    """Return the value in double quotes, as a shell reads it.

    Raises:
        DockerfileProblem: It holds a double quote, at which spython would cut it.
    """
    text = '"'
    for part in value:
        if isinstance(part, ImageVariable):
            text += f"${{{part.name}}}"
            continue
        if '"' in part:
            words = "a value with a double quote is not translated; spython would cut it there"
            raise DockerfileProblem(words)
        text += re.sub(r"([\\$`])", r"\\\1", part)
    return text + '"'
