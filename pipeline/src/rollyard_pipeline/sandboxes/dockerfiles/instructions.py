"""The instructions of a Dockerfile with their lines. This module is pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from rollyard_pipeline.sandboxes.errors import DockerfileRefused

MAX_BYTES: Final = 256 << 10
"""The largest size of a Dockerfile in bytes."""
_DIRECTIVE: Final = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.*?)\s*")
_FRONTENDS: Final = re.compile(r"(docker\.io/)?docker/dockerfile(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?")
_CONTINUED: Final = re.compile(r"\\[ \t]*$")
_HEREDOC: Final = re.compile(r"(?<!<)<<(?!<)")
_FLAG: Final = re.compile(r"--([a-z][a-z-]*)")


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
    """Check an instruction for what no instruction may have.

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
    """Return whether the words are a list of JSON. A `[` of the shell is none."""
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
