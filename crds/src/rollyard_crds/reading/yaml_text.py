"""YAML from outside: without aliases, and bounded in depth and size before anything is built from it.

An alias repeats a value, so that a few lines can stand for billions of values; a manifest needs none.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from rollyard_crds.errors import CrdsError

MAX_DEPTH: Final = 64
MAX_VALUES: Final = 500_000
"""The most values and keys of a text. Each takes some hundred bytes while it is read."""
MAX_NUMBER: Final = 64
"""The most characters of a number; a longer one that YAML reads in base 60 would take minutes."""

_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NUMBER: Final = re.compile(r"[-+]?(0x[0-9a-fA-F_]*|[0-9_.:]*([eE][-+0-9]*)?)")
_TOO_DEEP: Final = f"lists and mappings are nested more than {MAX_DEPTH} deep"
_NUMBER_TAGS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class YamlError(CrdsError, ValueError):
    """The text is not YAML, or not of the plain kind that is accepted; the message says where."""

    reason = "InvalidYaml"


def load_all(text: str | bytes) -> list[Any]:
    """Return every document of a YAML text.

    Raises:
        YamlError: it is not YAML, has an alias, or is too deep or too large.
    """
    try:
        _check(text)
        return list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        # The scanner of newer versions of libyaml reads ahead of the events, and ends at a depth of 1,000.
        problem = _TOO_DEEP if "nesting depth" in str(error.problem) else error.problem
        raise YamlError(f"{position}{problem}") from error
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from error
    except YamlError:
        raise
    except (ValueError, OverflowError) as error:
        # Such as an impossible date; the loader reports it in this way.
        raise YamlError(f"a value cannot be read: {error}") from error


def load_one(text: str | bytes) -> Any:
    """Return the only document of a YAML text, or None where it is empty.

    Raises:
        YamlError: as for `load_all`, or there are several documents.
    """
    documents = load_all(text)
    if len(documents) > 1:
        raise YamlError(f"one document is taken here, and there are {len(documents)}")
    return documents[0] if documents else None


def _check(text: str | bytes) -> None:
    """Go through the text without building anything from it."""
    depth = values = 0
    for event in yaml.parse(text, Loader=_Loader):
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            problem = f"the alias *{event.anchor} is not taken: write the value out"
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            problem = _TOO_DEEP if depth > MAX_DEPTH else ""
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_NUMBER and _is_number(event):
            problem = f"a number has more than {MAX_NUMBER} characters; quote it if it is a text"
        values += isinstance(event, yaml.NodeEvent)
        if values > MAX_VALUES:
            problem = f"there are more than {MAX_VALUES} values; send JSON, or tasks apart from the manifest"
        if problem:
            mark = event.start_mark
            position = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
            raise YamlError(f"{position}{problem}")


def _is_number(event: yaml.ScalarEvent) -> bool:
    return event.tag in _NUMBER_TAGS or (event.implicit[0] and _NUMBER.fullmatch(event.value) is not None)
