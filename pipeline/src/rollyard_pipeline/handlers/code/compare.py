"""Outputs and results are compared in the worker, as data."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any, Final

_MISSING: Final = object()


def same_text(output: str, expected: str, tolerance: float | None) -> bool:
    """Return whether two outputs are the same but for spaces at the ends of lines and empty lines at the end.

    Args:
        output: What the program has printed.
        expected: What it should print.
        tolerance: The permitted distance of numbers, or None if texts must be equal.
    """
    given, wanted = _lines(output), _lines(expected)
    return given == wanted or _difference(given, wanted, tolerance) is None


def difference(output: str, expected: str, tolerance: float | None) -> tuple[int, str | None, str | None]:
    """Return the first line in which two outputs differ that are not the same: its number, from 1, and both.

    A line is None where its output has ended.

    Raises:
        ValueError: The outputs are the same.
    """
    given, wanted = _lines(output), _lines(expected)
    place = _difference(given, wanted, tolerance)
    if place is None:
        raise ValueError("the outputs are the same")
    ends = [lines[place] if place < len(lines) else None for lines in (given, wanted)]
    return place + 1, ends[0], ends[1]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _difference(given: list[str], wanted: list[str], tolerance: float | None) -> int | None:
    for place, (one, other) in enumerate(zip(given, wanted, strict=False)):
        if one != other and (tolerance is None or not _same_line(one, other, tolerance)):
            return place
    return None if len(given) == len(wanted) else min(len(given), len(wanted))


def _same_line(given: str, wanted: str, tolerance: float) -> bool:
    pairs = zip_longest(given.split(), wanted.split(), fillvalue="")
    return all(one == other or _near(_number(one), _number(other), tolerance) for one, other in pairs)


def _number(word: str) -> float | None:
    try:
        return float(word) if len(word) <= 400 else None
    except ValueError:
        return None


def _near(given: float | None, wanted: float | None, tolerance: float) -> bool:
    if given is None or wanted is None or not math.isfinite(given):
        return False
    return math.isclose(given, wanted, rel_tol=tolerance, abs_tol=tolerance)


def same_result(encoded: Any, expected: Any, tolerance: float | None) -> bool:
    """Return whether a result, in the form of `sandboxed.encode`, is the expected JSON value.

    Tuples and lists are the same, since JSON has no tuples. No object is made of the result, so nothing in it
    decides how it compares.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: The result is not in this form.
    """
    if not isinstance(encoded, dict):
        return type(encoded) is type(expected) and bool(encoded == expected)
    ((mark, content),) = encoded.items()
    if mark in ("l", "t"):
        return (
            isinstance(expected, list)
            and len(content) == len(expected)
            and all(same_result(one, two, tolerance) for one, two in zip(content, expected, strict=True))
        )
    if mark == "d":
        if not isinstance(expected, dict) or len(content) != len(expected):
            return False
        return all(
            isinstance(key, str) and same_result(value, expected.get(key, _MISSING), tolerance)
            for key, value in content
        ) and len({key for key, _ in content if isinstance(key, str)}) == len(expected)
    if isinstance(expected, bool) or not isinstance(expected, int | float):
        return False
    if mark == "i":
        value: int | float = int(str(content), 16)
    elif mark == "f":
        value = float(content)
    else:
        return False
    if value == expected:
        return True
    return tolerance is not None and _near(float(value), float(expected), tolerance)
