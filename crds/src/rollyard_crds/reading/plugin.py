"""Plugins: Python files with handlers, tools and the like. They are parsed here, and never run.

The parser of Python can be made to use up the memory or the stack of its process by a text of less than a
mebibyte, so it works in a process of its own, whose standard input is the text. That process writes what the
file offers, or what is wrong with it, as JSON.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from rollyard_crds.errors import CrdsError
from rollyard_crds.names import EXTENSION_NAME

MAX_BYTES: Final = 1 << 20
"""The largest size of a plugin, in bytes."""
MAX_FILES: Final = 64
"""The largest number of files of a folder of plugins."""
MAX_OFFERS: Final = 256
"""The largest number of names that one plugin offers."""
PARSE_SECONDS: Final = 20.0
"""How long the parser may take, in seconds."""
_PARSE_MEMORY: Final = 2 << 30  # bytes of address space
_PROBLEM: Final = 500  # characters
_MAX_NAME: Final = 63
_MAX_CLASS: Final = 200  # characters
_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}\.py")
_NAME: Final = re.compile(EXTENSION_NAME)
_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_PACKAGES: Final = ("rollyard_pipeline", "rollyard")
"""The packages whose classes make a class of a plugin an extension."""
_DECORATOR: Final = "reward_function"

Offers = Mapping[str, Mapping[str, str]]
"""The names that a plugin offers: by kind, such as `handlers`, and name, the class or function."""


class _Kind(NamedTuple):
    base: str
    """How the names of the base classes of this kind end."""
    suffixes: tuple[str, ...]
    """The ends of a class's name that are no part of the name that it is offered under."""


KINDS: Final[Mapping[str, _Kind]] = {
    "handlers": _Kind("Handler", ("Handler",)),
    "agents": _Kind("Agent", ("Agent",)),
    "harnesses": _Kind("Harness", ("Harness",)),
    "tools": _Kind("Tool", ("Tool",)),
    "tool_parsers": _Kind("Parser", ("ToolCallParser", "ToolParser", "Parser")),
    "reward_functions": _Kind("RewardFunction", ("RewardFunction", "Reward")),
}
"""The kinds of extensions that a plugin may offer. With the prefix `rollyard.`, they are groups of entry
points."""
NOTHING: Final = (
    "offers nothing: an extension is a class that derives from Handler, Agent, Harness, Tool, ToolCallParser "
    "or RewardFunction, imported from rollyard_pipeline, or a function with @reward_function"
)


def noun(kind: str) -> str:
    """Return what one extension of a kind is called, such as `tool parser`."""
    return kind.removesuffix("es" if kind.endswith("sses") else "s").replace("_", " ")


class PluginError(CrdsError, ValueError):
    """A plugin cannot be used; the message begins with the name of the file, and says where the fault is."""

    reason = "PluginInvalid"

    def __init__(self, message: str, *, sha256: str = "") -> None:
        super().__init__(message)
        self.sha256 = sha256
        """The SHA-256 of the text that is at fault, or "" if the fault may be gone the next time."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin as it was when it was read."""

    file: str
    """The name of the file, without its folder."""
    text: bytes
    sha256: str
    """The SHA-256 of the text."""
    offers: Offers


def plugin_files(path: Path) -> list[Path]:
    """Return the plugins that an option names: the file itself, or each `*.py` of a folder, by name.

    Raises:
        PluginError: The folder cannot be read, or has no plugin or too many.
    """
    if not path.is_dir():
        return [path]
    try:
        names = sorted(name for name in os.listdir(path) if name.endswith(".py"))
    except OSError as error:
        raise PluginError(f"{path}: cannot be read: {error.strerror}") from error
    if not 1 <= len(names) <= MAX_FILES:
        raise PluginError(
            f"{path}: has {len(names)} files that end in .py; a folder of plugins has 1 to {MAX_FILES}"
        )
    return [path / name for name in names]


def read_plugin(path: Path, known: Mapping[str, Plugin | PluginError] | None = None) -> Plugin:
    """Return the plugin in a file.

    Args:
        path: The file. A link is followed, because the files of a mounted ConfigMap are links.
        known: Plugins, and faults of plugins, by the SHA-256 of texts that need not be parsed again.

    Raises:
        PluginError: It is no file, too large, no Python that can be parsed, or offers nothing.
    """
    text = _read(path)
    digest = hashlib.sha256(text).hexdigest()
    found = (known or {}).get(digest)
    if isinstance(found, Plugin) and found.file == path.name:
        return found
    if isinstance(found, PluginError) and str(found).startswith(f"{path.name}: "):
        raise PluginError(str(found), sha256=digest)
    return Plugin(path.name, text, digest, _parsed(path.name, text, digest))


def _read(path: Path) -> bytes:
    if not _FILE.fullmatch(path.name):
        raise PluginError(
            f"{path}: a plugin is a file NAME.py, with letters, digits, '_', '-' and '.' in its name"
        )
    try:
        # With O_NONBLOCK, a pipe is refused below instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise PluginError(f"{path}: is not a file")
            with open(descriptor, "rb", closefd=False) as file:
                text = file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PluginError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise PluginError(f"{path}: has more than {MAX_BYTES >> 20} MiB; put data into files of their own")
    return text


def _parsed(file: str, text: bytes, digest: str) -> Offers:
    """Return what a plugin offers, as a process of its own finds out.

    Raises:
        PluginError: The text is no Python that can be parsed, or offers nothing.
    """
    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(
            command,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # It may warn about each line.
            timeout=PARSE_SECONDS,
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"{file}: Python cannot parse it: it is nested too deeply, or too large") from error
    if "problem" in answer:
        raise PluginError(f"{file}: {answer['problem']}", sha256=digest)
    offers: Offers = answer["offers"]
    return offers


def doubled(plugins: Sequence[Plugin], taken: Mapping[str, frozenset[str]]) -> list[str]:
    """Return a line for each name that two plugins offer, or that a plugin and a package offer.

    Args:
        plugins: The plugins.
        taken: The names that Rollyard and the installed packages offer, by kind.
    """
    problems: list[str] = []
    owners: dict[tuple[str, str], str] = {}
    for plugin in plugins:
        for kind, names in plugin.offers.items():
            for name, target in names.items():
                other = owners.get((kind, name))
                owners[kind, name] = plugin.file
                word = noun(kind)
                if name in taken.get(kind, ()):
                    problems.append(
                        f"{plugin.file}: {target} has the name {name!r}, and Rollyard or an installed "
                        f"package has a {word} of this name; choose another"
                    )
                elif other is not None:
                    problems.append(f"{plugin.file}: {other} offers a {word} {name!r} as well; choose one")
    return problems


def offers_of(text: bytes) -> dict[str, dict[str, str]]:
    """Return what the text of a plugin offers, by kind and name.

    Raises:
        PluginError: It cannot be parsed, offers nothing, or a name cannot be used.
        MemoryError, RecursionError: It is too large or nested too deeply.
    """
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        where = "" if error.lineno is None else f"line {error.lineno}, column {error.offset or 0}: "
        raise PluginError(f"{where}{error.msg}") from error
    except ValueError as error:
        raise PluginError(f"is not Python: {error}") from error
    origins: dict[str, str] = {}
    kinds: dict[str, str] = {}
    offers: dict[str, dict[str, str]] = {}
    for node in module.body:
        origins |= _imported(node)
        if isinstance(node, ast.ClassDef):
            kind = next((kind for base in node.bases if (kind := _kind_of(base, origins, kinds))), "")
            if not kind:
                continue
            kinds[node.name] = kind
            name = _stated_name(node) or _usual_name(node.name, KINDS[kind].suffixes)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_reward(node, origins):
            if isinstance(node, ast.AsyncFunctionDef):
                raise PluginError(f"line {node.lineno}: a reward function is called without await: use def")
            kind, name = "reward_functions", node.name
        else:
            continue
        if node.name.startswith("_"):
            continue
        _add(offers.setdefault(kind, {}), name, node)
    if not offers:
        raise PluginError(NOTHING)
    if sum(map(len, offers.values())) > MAX_OFFERS:
        raise PluginError(f"offers more than {MAX_OFFERS} extensions")
    return offers


def _add(names: dict[str, str], name: str, node: ast.ClassDef | ast.FunctionDef) -> None:
    if len(name) > _MAX_NAME or len(node.name) > _MAX_CLASS or not _NAME.fullmatch(name):
        raise PluginError(
            f"line {node.lineno}: {name[:_MAX_CLASS]!r} cannot be the name of an extension: a small letter, "
            "then small letters, digits, '_', '.' and '-', at most 63"
        )
    if names.setdefault(name, node.name) != node.name:
        raise PluginError(f"line {node.lineno}: {names[name]} and {node.name} have the same name {name!r}")


def _imported(node: ast.stmt) -> dict[str, str]:
    """Return the full names of what an import statement brings, by the names that the file uses."""
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    origins: dict[str, str] = {}
    for alias in node.names if isinstance(node, ast.Import) else ():
        # `import a.b` brings the name `a`, by which the file writes `a.b.C`.
        first = alias.name.split(".")[0]
        origins[alias.asname or first] = alias.name if alias.asname else first
    return origins


def _full_name(node: ast.expr, origins: Mapping[str, str]) -> str:
    """Return the full name of what an expression such as `handlers.Handler` names, or ""."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in origins:
        return ""
    return ".".join((origins[node.id], *parts))


def _is_ours(full_name: str) -> bool:
    return full_name.split(".")[0] in _PACKAGES


def _kind_of(base: ast.expr, origins: Mapping[str, str], kinds: Mapping[str, str]) -> str:
    """Return the kind of extension that a base class makes of a class, or ""."""
    if isinstance(base, ast.Name) and base.id in kinds:
        return kinds[base.id]
    full_name = _full_name(base, origins)
    if not _is_ours(full_name):
        return ""
    return next((kind for kind, each in KINDS.items() if full_name.endswith(each.base)), "")


def _is_reward(node: ast.FunctionDef | ast.AsyncFunctionDef, origins: Mapping[str, str]) -> bool:
    names = [_full_name(decorator, origins) for decorator in node.decorator_list]
    return any(_is_ours(name) and name.split(".")[-1] == _DECORATOR for name in names)


def _assigned(node: ast.ClassDef) -> Iterator[ast.expr]:
    """Yield the values that the body of a class gives to its attribute `name`."""
    for part in node.body:
        if isinstance(part, ast.Assign):
            targets, value = part.targets, part.value
        elif isinstance(part, ast.AnnAssign) and part.value is not None:
            targets, value = [part.target], part.value
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == "name" for target in targets):
            yield value


def _stated_name(node: ast.ClassDef) -> str:
    """Return the text that a class has as its attribute `name`, or "" if it has none."""
    name = ""
    for value in _assigned(node):
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            raise PluginError(
                f"line {value.lineno}: {node.name}.name must be a text in quotes, because the file is not "
                "run to find it"
            )
        name = value.value
    return name


def _usual_name(class_name: str, suffixes: tuple[str, ...]) -> str:
    """Return the name of a class in snake case without its suffix, `closeness` for `ClosenessHandler`."""
    stem = next((class_name.removesuffix(end) for end in suffixes if class_name.endswith(end)), class_name)
    return _WORDS.sub("_", stem or class_name).lower()


def main() -> None:
    """Write what the plugin on standard input offers, or what is wrong with it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_PARSE_MEMORY, _PARSE_MEMORY))
    seconds = int(PARSE_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        answer: dict[str, Any] = {"offers": offers_of(sys.stdin.buffer.read(MAX_BYTES + 1))}
    except PluginError as error:
        answer = {"problem": str(error)[:_PROBLEM]}
    except (MemoryError, RecursionError):
        answer = {"problem": "Python cannot parse it: it is nested too deeply, or too large"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
