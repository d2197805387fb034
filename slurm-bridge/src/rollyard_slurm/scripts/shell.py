"""Lines of bash that are made from data. This module is pure.

It is the only place where text from other sources becomes part of a script. Names of pools, jobs and nodes,
model folders, arguments, variables and paths come from job authors, from site profiles and from Slurm.
`render` quotes each of them, and refuses text that no quoting makes harmless. Bash therefore takes each of
them as a single word, whatever it contains. Code has its own type, by which it differs from data.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from rollyard_slurm.errors import SlurmError

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_PLAIN_DIRECTIVE: Final = re.compile(r"[A-Za-z0-9_./:,=@%+\[\]{}*-]+\Z")
_OPTION: Final = re.compile(r"[a-z][a-z0-9-]*\Z")

HOST: Final = "@HOST@"
"""The word of a backend's command line that `rollyard_slurm.node` replaces on the node by its address there.

It is the address from which the node reaches the control plane.
"""
PORT: Final = "@PORT@"
"""The word that the node replaces by one of its ports, which is free when the backend starts."""


class Code(str):
    """Bash code from the source of this program, or from the shell lines of the site's profile."""

    __slots__ = ()


Part: TypeAlias = str | Code
"""Either data, which is quoted, or code, which is not changed."""


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment for people. Line ends and control characters in its text become blanks."""

    text: str


@dataclass(frozen=True, slots=True)
class Export:
    """An environment variable of the programs that the script starts."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Assign:
    """A variable of the script itself. Its value consists of the parts, joined without separators."""

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the script itself. Each string becomes one element, and code may become several."""

    name: str
    words: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Directive:
    """A `#SBATCH` line with a long option. The name has no dashes, and the value is None if it takes none."""

    name: str
    value: str | None


Line: TypeAlias = Code | Comment | Export | Assign | Array | Directive


def render(lines: Iterable[Line]) -> list[str]:
    """Return the text of the lines, as bash and sbatch read it.

    Raises:
        SlurmError: The name of a variable is not an identifier, a value contains a null character or is
            not Unicode text, or the value of an option contains a line end or another control character.
    """
    return [_line(line) for line in lines]


def _line(line: Line) -> str:
    """Return the text of one line."""
    match line:
        case Code():
            return str(line)
        case Comment(text):
            return "# " + "".join(character if character.isprintable() else " " for character in text)
        case Export(name, value):
            return f"export {_name(name)}={_word(value, name)}"
        case Assign(name, parts):
            return f"{_name(name)}=" + "".join(_part(part, name) for part in parts)
        case Array(name, words):
            return f"{_name(name)}=(" + " ".join(_part(word, name) for word in words) + ")"
        case Directive(name, value):
            return _directive(name, value)


def _name(name: str) -> str:
    """Return the name of a variable after checking it."""
    if not _NAME.match(name):
        raise SlurmError(
            f"environment variable {name!r}: a batch script takes names of letters, digits and underscores "
            "that do not begin with a digit",
            reason="ScriptInvalid",
        )
    return name


def _part(part: Part, where: str) -> str:
    """Return code as it is, and data as a quoted word. `where` names the variable in messages."""
    return str(part) if isinstance(part, Code) else _word(part, where)


def _word(value: str, where: str) -> str:
    """Return data as a quoted word. `where` names the variable in messages."""
    if "\0" in value:
        raise SlurmError(f"{where}: a value must not hold a null character", reason="ScriptInvalid")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SlurmError(
            f"{where}: a value is not Unicode text ({error.reason})", reason="ScriptInvalid"
        ) from error
    return shlex.quote(value)


def _directive(name: str, value: str | None) -> str:
    """Return the text of a `#SBATCH` line, with quotes around the value if it needs them."""
    if not _OPTION.match(name):
        raise SlurmError(
            f"option {name!r}: Slurm's long options have small letters, digits and dashes only",
            reason="ScriptInvalid",
        )
    if value is None:
        return f"#SBATCH --{name}"
    if not value.isprintable():
        raise SlurmError(
            f"--{name}={value!r}: must not hold a line end or another control character",
            reason="ScriptInvalid",
        )
    if not _PLAIN_DIRECTIVE.match(value):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        value = f'"{escaped}"'
    return f"#SBATCH --{name}={value}"
