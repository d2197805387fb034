"""The comparison of outputs and results, as data, in the worker.

Spaces count as LiveCodeBench counts them. A number may differ from the expected one only where one of the two
is written as a fraction, or is a float: whole numbers are counts and remainders, so the nearest one is as
wrong as any other.
"""

from __future__ import annotations

import math
import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import Any, Final

_MISSING: Final = object()
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]{1,6}+)?")
_WHOLE: Final = re.compile(r"[+-]?[0-9]++")
_SPACES: Final = re.compile(r"\s++")
_ROUNDED: Final = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
"""How distances are calculated. Numbers themselves are compared exactly, in a time that is linear."""
_HALF: Final = Decimal("0.5")
_LONGEST_FLOAT: Final = 32
"""The largest number of characters of a float that a sandbox reports."""
_LONGEST_DECIMAL: Final = 1000
"""The largest number of digits of an exact fraction that is compared with a number."""
_MOST_BITS: Final = 1024
"""The size of an integer in bits beyond which no float is near to it."""


def difference(
    output: str, expected: str, tolerance: float | None
) -> tuple[int, str | None, str | None] | None:
    """Return the first line in which two outputs differ, as its number, from 1, and both; or None.

    Spaces around lines, empty lines around the whole and spaces between the numbers of a line do not count.

    Args:
        output: What the program has printed.
        expected: What it should print.
        tolerance: The permitted distance of fractions, as a share of the expected number, or of 1 if that is
            0; or None if texts must be equal.

    Returns:
        A line is None where its output has ended.
    """
    printed, correct = _lines(output), _lines(expected)
    index = None if printed == correct else _difference(printed, correct, tolerance)
    if index is None:
        return None
    ends = [lines[index] if index < len(lines) else None for lines in (printed, correct)]
    return index + 1, ends[0], ends[1]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _difference(printed: list[str], expected: list[str], tolerance: float | None) -> int | None:
    for index, (first, second) in enumerate(zip(printed, expected, strict=False)):
        if first != second and not _same_line(first, second, tolerance):
            return index
    return None if len(printed) == len(expected) else min(len(printed), len(expected))


def _same_line(printed: str, expected: str, tolerance: float | None) -> bool:
    words, others = printed.split(), expected.split()
    if len(words) != len(others) or not all(map(_same_word, words, others, [tolerance] * len(words))):
        return False
    return all(map(_NUMBER.fullmatch, others)) or _SPACES.findall(printed) == _SPACES.findall(expected)


def _same_word(printed: str, expected: str, tolerance: float | None) -> bool:
    if printed == expected:
        return True
    if tolerance is None or not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    whole = [_WHOLE.fullmatch(word) is not None for word in (printed, expected)]
    return _near(Decimal(printed), Decimal(expected), None if all(whole) else tolerance, whole=whole[1])


def _near(number: Decimal, expected: Decimal, tolerance: float | None, *, whole: bool) -> bool:
    """Return whether a number is equal to another, or within a tolerance of it.

    Args:
        number: A finite number.
        expected: The expected number, which is finite.
        tolerance: The permitted distance as a share of the expected number, or of 1 if that is 0, or None.
        whole: Whether the expected number is written as a whole one, so that its neighbours are wrong,
            whatever the tolerance is.
    """
    if number == expected:
        return True
    if tolerance is None:
        return False
    distance = _ROUNDED.subtract(number, expected).copy_abs()
    limit = _ROUNDED.multiply(Decimal(str(tolerance)), expected.copy_abs() if expected else Decimal(1))
    return distance <= (min(limit, _HALF) if whole else limit)


def same_result(encoded: Any, expected: Any, tolerance: float | None) -> bool:
    """Return whether a result, in the form of `sandboxed.encode`, is the expected JSON value.

    Tuples and lists are the same, since JSON has no tuples. No object is made of the result, so nothing in it
    decides how it compares.

    Raises:
        ValueError, TypeError, LookupError, RecursionError: The result is not in this form.
    """
    if not isinstance(encoded, dict):
        return type(encoded) is type(expected) and bool(encoded == expected)
    ((mark, content),) = encoded.items()
    if mark == "x" and isinstance(content, list) and len(content) == 2:
        return _same_library(content[0], content[1], expected, tolerance)
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
    if isinstance(expected, bool) or not isinstance(expected, int | float) or not isinstance(content, str):
        return False
    if mark == "i":
        return _same_number(int(content, 16), expected, tolerance)
    return (
        mark == "f" and len(content) <= _LONGEST_FLOAT and _same_number(float(content), expected, tolerance)
    )


def _same_library(name: Any, data: Any, expected: Any, tolerance: float | None) -> bool:
    """Return whether a value of a type of the standard library is the expected JSON value."""
    if name in ("OrderedDict", "Counter"):
        return same_result(data, expected, tolerance)
    if name == "defaultdict":
        return same_result(data["l"][1], expected, tolerance)
    if isinstance(expected, bool) or not isinstance(expected, int | float) or not _is_float(expected):
        return False
    exact = Decimal(repr(expected))
    if name == "Decimal" and isinstance(data, str) and len(data) <= _LONGEST_DECIMAL:
        number = Decimal(data, _ROUNDED)
        return number.is_finite() and (
            number == expected or _near(number, exact, tolerance, whole=isinstance(expected, int))
        )
    if name != "Fraction" or any(len(part["i"]) > _LONGEST_DECIMAL for part in data["l"]):
        return False
    above, below = (int(part["i"], 16) for part in data["l"])
    ratio = exact.as_integer_ratio()
    if below <= 0 or above * ratio[1] == ratio[0] * below:
        return below > 0
    if tolerance is None:
        return False
    number = _ROUNDED.divide(Decimal(above), Decimal(below))
    return _near(number, exact, tolerance, whole=isinstance(expected, int))


def _same_number(number: int | float, expected: int | float, tolerance: float | None) -> bool:
    if number == expected or (number != number and expected != expected):  # Both are not a number.
        return True
    if tolerance is None or (isinstance(number, int) and isinstance(expected, int)):
        return False
    if not (_is_float(number) and _is_float(expected)):
        return False
    return _near(Decimal(repr(number)), Decimal(repr(expected)), tolerance, whole=isinstance(expected, int))


def _is_float(number: int | float) -> bool:
    """Return whether a number is finite, and no larger than floats are."""
    return number.bit_length() <= _MOST_BITS if isinstance(number, int) else math.isfinite(number)
