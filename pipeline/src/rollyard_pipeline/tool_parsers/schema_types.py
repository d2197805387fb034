"""The types of arguments in formats that write values as plain text. The tool's JSON schema names them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rollyard_pipeline.tool_parsers.calls import NotAValue, json_value
from rollyard_pipeline.tool_parsers.literals import literal_at, skip_blank


def typed(value: str, rule: Mapping[str, Any]) -> Any:
    """Return `value` as a type that the JSON schema `rule` allows, or the text itself if none fits."""
    kinds = _kinds(rule)
    if not kinds or kinds == {"string"}:
        return value
    word = value.strip()
    if "null" in kinds and word.lower() in ("null", "none", ""):
        return None
    if "boolean" in kinds and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if kinds & {"integer", "number"} and (number := _number(word)) is not None:
        # 3.0 is an integer by the rules of JSON schema.
        if isinstance(number, int) or "number" in kinds:
            return number
        if number.is_integer():
            return int(number)
    if kinds & {"array", "object"}:
        structure = _structure(word)
        if (isinstance(structure, list) and "array" in kinds) or (
            isinstance(structure, dict) and "object" in kinds
        ):
            return structure
    return value


def _kinds(rule: Mapping[str, Any]) -> set[str]:
    kind = rule.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for union in ("anyOf", "oneOf"):
        for option in rule.get(union) or ():
            if isinstance(option, dict):
                kinds |= _kinds(option)
    return {kind for kind in kinds if isinstance(kind, str)}


def _number(word: str) -> int | float | None:
    try:
        value = json_value(word)
    except NotAValue:
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _structure(word: str) -> Any:
    """Return a list or an object that is written in JSON or in Python.

    Models write Python because they copy what templates print.
    """
    with suppress(NotAValue):
        return json_value(word)
    try:
        value, end = literal_at(word, 0)
    except NotAValue:
        return None
    return value if skip_blank(word, end) == len(word) else None
