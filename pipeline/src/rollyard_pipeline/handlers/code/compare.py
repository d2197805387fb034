"""Outputs and results are compared in the worker, as data.

Spaces count as LiveCodeBench counts them. A number may differ from the expected one only where one of the two
is written as a fraction, or is a float: whole numbers are counts and remainders, and the nearest other one is
as wrong as any.
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
"""The most characters of a float that a sandbox reports."""
_LONGEST_DECIMAL: Final = 1000
"""The most digits of an exact fraction that is compared with a number."""
_MOST_BITS: Final = 1024
"""The size of an integer in bits beyond which no float is near to it."""


def same_text(output: str, expected: str, tolerance: float | None) -> bool:
    """Return whether two outputs are the same but for spaces around lines and empty lines around the whole.

    Spaces between the numbers of a line do not count either.

    Args:
        output: What the program has printed.
        expected: What it should print.
        tolerance: The permitted distance of fractions, as a share of the expected number, or of 1 if that is
            0; or None if texts must be equal.
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
    return [line.strip() for line in text.strip().split("\n")]


def _difference(given: list[str], wanted: list[str], tolerance: float | None) -> int | None:
    for place, (one, other) in enumerate(zip(given, wanted, strict=False)):
        if one != other and not _same_line(one, other, tolerance):
            return place
    return None if len(given) == len(wanted) else min(len(given), len(wanted))


def _same_line(given: str, wanted: str, tolerance: float | None) -> bool:
    words, others = given.split(), wanted.split()
    if len(words) != len(others) or not all(map(_same_word, words, others, [tolerance] * len(words))):
        return False
    return all(map(_NUMBER.fullmatch, others)) or _SPACES.findall(given) == _SPACES.findall(wanted)


def _same_word(given: str, wanted: str, tolerance: float | None) -> bool:
    if given == wanted:
        return True
    if tolerance is None or not (_NUMBER.fullmatch(given) and _NUMBER.fullmatch(wanted)):
        return False
    whole = [_WHOLE.fullmatch(word) is not None for word in (given, wanted)]
    return _near(Decimal(given), Decimal(wanted), None if all(whole) else tolerance, whole=whole[1])


def _near(given: Decimal, wanted: Decimal, tolerance: float | None, *, whole: bool) -> bool:
    """Return whether a number is equal to another, or within a tolerance of it.

    Args:
        given: A finite number.
        wanted: The expected number, which is finite.
        tolerance: The permitted distance as a share of the expected number, or of 1 if that is 0, or None.
        whole: Whether the expected number is written as a whole one, so that its neighbours are wrong,
            whatever the tolerance is.
    """
    if given == wanted:
        return True
    if tolerance is None:
        return False
    distance = _ROUNDED.subtract(given, wanted).copy_abs()
    limit = _ROUNDED.multiply(Decimal(str(tolerance)), wanted.copy_abs() if wanted else Decimal(1))
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
    wanted = Decimal(repr(expected))
    if name == "Decimal" and isinstance(data, str) and len(data) <= _LONGEST_DECIMAL:
        given = Decimal(data, _ROUNDED)
        return given.is_finite() and (
            given == expected or _near(given, wanted, tolerance, whole=isinstance(expected, int))
        )
    if name != "Fraction" or any(len(part["i"]) > _LONGEST_DECIMAL for part in data["l"]):
        return False
    above, below = (int(part["i"], 16) for part in data["l"])
    other = wanted.as_integer_ratio()
    if below <= 0 or above * other[1] == other[0] * below:
        return below > 0
    if tolerance is None:
        return False
    given = _ROUNDED.divide(Decimal(above), Decimal(below))
    return _near(given, wanted, tolerance, whole=isinstance(expected, int))


def _same_number(given: int | float, expected: int | float, tolerance: float | None) -> bool:
    if given == expected or (given != given and expected != expected):  # Both are not a number.
        return True
    if tolerance is None or (isinstance(given, int) and isinstance(expected, int)):
        return False
    if not (_is_float(given) and _is_float(expected)):
        return False
    return _near(Decimal(repr(given)), Decimal(repr(expected)), tolerance, whole=isinstance(expected, int))


def _is_float(number: int | float) -> bool:
    """Return whether a number is finite, and no larger than floats are."""
    return number.bit_length() <= _MOST_BITS if isinstance(number, int) else math.isfinite(number)
