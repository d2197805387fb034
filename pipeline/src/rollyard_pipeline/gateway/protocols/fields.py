"""Checks of fields of requests. What is wrong is a `CallError` that names the field."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeGuard

from rollyard_pipeline.gateway.calls import MAX_CALL_TOOLS
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.tool_parsers.calls import NAME_LIMIT

MAX_FIELD_TEXT: Final = 10_485_760
"""The largest number of characters of one text of a call, as with OpenAI."""
MAX_SCHEMA_DEPTH: Final = 64
"""The deepest nesting of a tool's schema. Chat templates and parsers walk it by recursion."""
MAX_LABEL: Final = 256
"""The largest number of characters of ids and of the names of models."""


def invalid(message: str, param: str | None = None) -> CallError:
    """Return the error of a call that is wrong itself."""
    return CallError("invalid", message, param=param)


def wrong_type(value: object, param: str, expected: str) -> CallError:
    """Return the error of a value of the wrong type."""
    if value is None:
        return invalid(f"Missing required parameter: '{param}', which is {expected}.", param)
    names = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array"}
    actual = names.get(type(value), "an object")
    return invalid(f"Invalid type for '{param}': expected {expected}, but got {actual} instead.", param)


def cannot(param: str, why: str) -> CallError:
    """Return the error of a feature that cannot be had here."""
    return invalid(f"Unsupported value: '{param}' {why}", param)


def text_of(value: object, param: str, longest: int = MAX_FIELD_TEXT) -> str:
    """Return a text.

    Raises:
        CallError: It is none, or too long.
    """
    if not isinstance(value, str):
        raise wrong_type(value, param, "a string")
    if len(value) > longest:
        message = f"Invalid '{param}': it has {len(value)} characters, and at most {longest} are allowed."
        raise invalid(message, param)
    return value


def flag_of(value: object, param: str) -> bool:
    """Return a boolean, which is false if it is null.

    Raises:
        CallError: It is anything else.
    """
    if value is not None and not isinstance(value, bool):
        raise wrong_type(value, param, "a boolean")
    return bool(value)


def number_of(value: object, param: str, least: float, most: float, whole: bool = False) -> int | float:
    """Return a number within bounds.

    Raises:
        CallError: It is none, or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise wrong_type(value, param, "an integer" if whole else "a number")
    if not least <= value <= most:
        bounds = f"at least {least}" if math.isinf(most) else f"between {least} and {most}"
        raise invalid(f"Invalid '{param}': it is {value}, and must be {bounds}.", param)
    return value


def object_of(value: object, param: str, known: Collection[str] = ()) -> Mapping[str, Any]:
    """Return a JSON object. `known` are the names of its fields, or nothing if it may have any.

    Raises:
        CallError: It is none, or has other fields.
    """
    if not isinstance(value, dict):
        raise wrong_type(value, param, "an object")
    if known:
        only(value, param, known)
    return value


def only(value: Mapping[str, Any], param: str, known: Collection[str]) -> None:
    """Refuse fields that a service doesn't know. Those that are null set nothing, and are ignored.

    Clients repeat what an SDK has parsed with the SDK's own names, such as `async_`, and with null for what
    was not there.

    Raises:
        CallError: There is one.
    """
    for name in value:
        if name not in known and value[name] is not None:
            path = f"{param}.{name}"[:MAX_LABEL]
            raise invalid(f"Unknown parameter: '{path}'.", path)


def list_of(value: object, param: str, most: int) -> list[Any]:
    """Return a JSON array.

    Raises:
        CallError: It is none, or too long.
    """
    if not isinstance(value, list):
        raise wrong_type(value, param, "an array")
    if len(value) > most:
        message = f"Invalid '{param}': it has {len(value)} entries, and at most {most} are allowed."
        raise invalid(message, param)
    return value


class OfferedTools:
    """The tools of one call in the form of chat templates, checked as they are added.

    Args:
        signs: The characters that names of tools may have beside letters and digits.
    """

    def __init__(self, signs: str = "_-") -> None:
        self.schemas: list[Mapping[str, Any]] = []
        self._names: set[str] = set()
        self._signs = signs
        self._pattern = re.compile(f"[a-zA-Z0-9{re.escape(signs)}]+")

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def add(self, name: object, description: object, parameters: object, param: str) -> str:
        """Add a tool, and return its name.

        Args:
            description: The tool's description, or None.
            parameters: The JSON schema of its arguments. None means that it needs none.
            param: The path of the tool in the request.

        Raises:
            CallError: There are too many tools, two of one name, or one is wrong.
        """
        if len(self.schemas) >= MAX_CALL_TOOLS:
            raise invalid(f"Invalid 'tools': at most {MAX_CALL_TOOLS} tools are allowed.", "tools")
        name = text_of(name, f"{param}.name")
        if not (len(name) <= NAME_LIMIT and self._pattern.fullmatch(name)):
            signs = " and ".join(f"'{sign}'" for sign in self._signs)
            message = f"Invalid '{param}.name': expected 1 to {NAME_LIMIT} letters, digits, {signs}."
            raise invalid(message, f"{param}.name")
        if name in self._names:
            raise invalid(f"Invalid '{param}.name': there are two tools named '{name}'.", f"{param}.name")
        function: dict[str, Any] = {"name": name}
        if description is not None:
            function["description"] = text_of(description, f"{param}.description")
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        function["parameters"] = object_of(parameters, f"{param}.parameters")
        if too_deep(function["parameters"]):
            message = f"Invalid '{param}.parameters': more than {MAX_SCHEMA_DEPTH} levels are nested."
            raise invalid(message, f"{param}.parameters")
        self._names.add(name)
        self.schemas.append({"type": "function", "function": function})
        return name


def too_deep(value: Mapping[str, Any]) -> bool:
    """Return whether objects and arrays are nested more than `MAX_SCHEMA_DEPTH` levels deep."""
    level: list[Any] = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is a text of an allowed length. `text_of` says what is wrong otherwise."""
    return type(value) is str and len(value) <= MAX_FIELD_TEXT
