"""The fields of RolloutJob, BackendPool and tasks in words: type, default, bounds and description.

The reference pages and `rollyard explain` show them. Everything comes from the schema of the models.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rollyard_crds.errors import CrdsError

if TYPE_CHECKING:
    from pydantic import BaseModel

KINDS: Final = ("RolloutJob", "BackendPool", "Task")
"""What is described: two kinds of objects, and the lines of a task list."""
_RULES: Final = "x-kubernetes-validations"
_UNCHANGED: Final = "self == oldSelf"
"""The rule of a field that cannot change after creation."""
_DEFAULT: Final = re.compile(r"(?:(?<=[.;])|^)\s*[Dd]efault: (.+?)(?:\.(?=\s|$)|$)")
"""A sentence of a description that says what holds where a field is missing."""


class FieldUnknown(CrdsError, LookupError):
    """No field has this path. The message names the nearest ones."""

    reason = "FieldUnknown"


@dataclass(frozen=True, slots=True)
class DescribedField:
    """A field as a reader needs it. The root of a kind is one, too, whose path is empty.

    Words in backticks are code, as in Markdown.
    """

    path: str
    """The path from the root, such as `spec.stages.run`; `[]` stands for each item of a list, and `{}` for
    each value of a map."""
    type: str
    """The type in words, such as `list of strings`."""
    description: str
    """What it means, without its default."""
    default: str = ""
    """What holds where it is missing: JSON in backticks, or words. Empty for a field without a default."""
    required: bool = False
    """Whether the object that holds it must give it."""
    choices: tuple[str, ...] = ()
    """The permitted values, if these are a few."""
    bounds: tuple[str, ...] = ()
    """What a value must fulfil, in words."""
    immutable: bool = False
    """Whether it cannot change after creation, by itself or as a part of such an object."""
    rules: tuple[str, ...] = ()
    """The conditions that its parts fulfil together."""
    children: tuple[DescribedField, ...] = ()
    """The fields of an object, of each item of a list of objects, or of each value of a map of objects."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def walk(self) -> Iterator[DescribedField]:
        """Yield this field and all below it, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()

    def find(self, path: str) -> DescribedField:
        """Return the field with a path below this one; brackets of lists and maps may be left out.

        Raises:
            FieldUnknown: There is none.
        """
        fields = {_plain(field.path): field for field in self.walk()}
        wanted = _plain(path)
        if wanted in fields:
            return fields[wanted]
        last = wanted.rpartition(".")[2]
        near = [one for one in fields if one.rpartition(".")[2].lower() == last.lower()]
        near = near or difflib.get_close_matches(wanted, fields, 3)
        hint = f"; did you mean {' or '.join(near[:3])}?" if near else ""
        raise FieldUnknown(f"there is no field {path[:256]!r}{hint}")


def described(kind: str) -> DescribedField:
    """Return the root of one of `KINDS`, with all fields below it."""
    # The schema needs all models, which take a third of a second to build.
    from rollyard_crds.schema import of_model

    schema = of_model(_model(kind))
    return _field("", schema, required=True, immutable=False)


def _model(kind: str) -> type[BaseModel]:
    import rollyard_crds

    model: type[BaseModel] = getattr(rollyard_crds, kind)
    return model


def _plain(path: str) -> str:
    return path.replace("[]", "").replace("{}", "").strip(".")


def _field(path: str, node: Mapping[str, Any], *, required: bool, immutable: bool) -> DescribedField:
    rules = node.get(_RULES, [])
    immutable = immutable or any(rule["rule"] == _UNCHANGED for rule in rules)
    inner, suffix = _inner(node)
    needed = inner.get("required", [])
    children = tuple(
        _field(f"{path}{suffix}.{name}".lstrip("."), child, required=name in needed, immutable=immutable)
        for name, child in inner.get("properties", {}).items()
    )
    description, default = _split(node.get("description", ""))
    if not default and "default" in node and not children:
        default = f"`{json.dumps(node['default'], ensure_ascii=False)}`"
    return DescribedField(
        path=path,
        type=type_in_words(node),
        description=description,
        default=default if not path.startswith("status") else "",
        required=required,
        choices=tuple(str(choice) for choice in inner.get("enum", ())),
        bounds=tuple(bounds_in_words(node)),
        immutable=immutable,
        rules=tuple(
            rule["message"] for rule in rules + inner.get(_RULES, []) * bool(suffix) if _is_shown(rule)
        ),
        children=children,
    )


def _is_shown(rule: Mapping[str, str]) -> bool:
    # That a field cannot change, or cannot come or go, is said beside the field.
    return "oldSelf" not in rule["rule"]


def _inner(node: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the schema of a list's items or a map's values with its brackets, or else the node itself."""
    if "items" in node:
        return node["items"], "[]"
    if "additionalProperties" in node:
        return node["additionalProperties"], "{}"
    return node, ""


def _split(text: str) -> tuple[str, str]:
    """Return a description without the sentence that states the default, and what this sentence states."""
    found = _DEFAULT.search(text)
    if found is None:
        return text, ""
    before, after = text[: found.start()].rstrip(" ;"), text[found.end() :].strip()
    if before and not before.endswith("."):
        before += "."
    return f"{before} {after}".strip(), found[1]


def type_in_words(node: Mapping[str, Any], *, plural: bool = False) -> str:
    """Return the type that a schema without references or choices describes."""
    if "items" in node:
        words = f"list of {type_in_words(node['items'], plural=True)}"
        return f"lists ({words})" if plural else words
    if "additionalProperties" in node:
        words = f"map of strings to {type_in_words(node['additionalProperties'], plural=True)}"
        return f"maps ({words})" if plural else words
    word = "time" if node.get("format") == "date-time" else str(node["type"])
    return f"{word}s" if plural else word


def bounds_in_words(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a value, and each item of a list or value of a map, must fulfil by a schema."""
    yield from _range("", node.get("minimum"), node.get("maximum"), node)
    yield from _range(" characters", node.get("minLength"), node.get("maxLength"))
    yield from _range(" items", node.get("minItems"), node.get("maxItems"))
    yield from _range(" entries", node.get("minProperties"), node.get("maxProperties"))
    if "pattern" in node:
        yield f"matches `{node['pattern']}`"
    if "items" in node and "properties" not in node["items"]:
        yield from (f"each: {bound}" for bound in bounds_in_words(node["items"]))
    if "additionalProperties" in node and "properties" not in node["additionalProperties"]:
        yield from (f"each value: {bound}" for bound in bounds_in_words(node["additionalProperties"]))


def _range(
    unit: str, least: float | None, most: float | None, node: Mapping[str, Any] | None = None
) -> Iterator[str]:
    node = node or {}
    lower = "more than" if node.get("exclusiveMinimum") else "at least"
    upper = "less than" if node.get("exclusiveMaximum") else "at most"
    if least is not None and most is not None and (lower, upper) == ("at least", "at most"):
        yield f"{_number(least)} to {_number(most)}{unit}"
        return
    if least is not None:
        yield f"{lower} {_number(least)}{unit}"
    if most is not None:
        yield f"{upper} {_number(most)}{unit}"


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"
