"""Quantities: the numbers of a text, each with the unit that follows it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from rollyard_pipeline.errors import WorkerError
from rollyard_pipeline.handlers.markup import unmarked
from rollyard_pipeline.handlers.tables import pairs
from rollyard_pipeline.handlers.units import Unit, leading_unit, symbols

_NUMERAL: Final = re.compile(
    r"(?P<european>\d{1,3}(?:\.\d{3})++,\d++)"  # 1.234,5
    r"|(?P<english>[1-9]\d{0,2}(?:(?:,\d{3})++|(?:\x20\d{3})++)(?:\.\d*+)?)(?![\d,])"  # 1,234.5 or 1 234.5
    r"|(?P<decimal>\d++,\d++)(?![\d,])"  # 12,5
    r"|(?P<plain>\d++\.?+\d*+|\.\d++)",
    re.ASCII,
)
_LAST_DIGITS: Final = re.compile(r"\(\d{1,3}\)", re.ASCII)
"""An uncertainty as in 6.67430(15)."""
_POWER_OF_TEN: Final = re.compile(r"[eE]([+-]?\d{1,4})(?!\d)", re.ASCII)
_MIXED: Final = re.compile(
    r"(\d{1,9})(?:\s?\((\d{1,9})\)/\((\d{1,9})\)| (\d{1,9})/(\d{1,9}))(?!\d|\.\d)", re.ASCII
)
_POWER: Final = re.compile(
    r"\s?\^\s*+(?:\(\s*+([+-]?\d{1,4}(?:\.\d{1,6})?)\s*+\)|([+-]?\d{1,4})(?!\d|\.\d))", re.ASCII
)
_LOST: Final = re.compile(r"10 ?-(\d{1,2})(?!\d|\.\d)", re.ASCII)
"""A power of ten whose superscript was lost, as in 4.5×10-3. It is read only after a multiplication sign."""
_OPERATOR: Final = re.compile(r"\s*+(?:([*/])|[xX](?=\s*+10\b))\s*+(?=\(*+[+-]?[\d.√π])", re.ASCII)
_IMPLIED: Final = re.compile(r"\s*+(?=[√π])")
_SIGN: Final = re.compile(r"([+-])\s?")
_PLUS_MINUS: Final = re.compile(r"\s*+(?:±|\+/-|\+-)\s*+(?=[\d.(√π])", re.ASCII)
_PERCENT: Final = re.compile(r"\s?%")
_CLOSING: Final = re.compile(r"\)*+")
"""Parentheses that do not hide the unit after them."""
_SCALES: Final = {
    word: float(size)
    for word, size in pairs(
        "dozen=12 hundred=1e2 thousand=1e3 million=1e6 billion=1e9 trillion=1e12 quadrillion=1e15",
        "quintillion=1e18 lakh=1e5 crore=1e7",
    ).items()
}
_SCALE: Final = re.compile(rf"\s?({'|'.join(_SCALES)})s?\b", re.IGNORECASE)
_START: Final = re.compile(r"(?:[+-]\s?)?\(*+[+-]?(?:\.?\d|[√π])", re.ASCII)
_CHINESE_IS: Final = "为為是约約得"
_LOGARITHM: Final = re.compile(r"\\?ln\s?(?:\((\d+\.?\d*)\)|(\d+\.?\d*))")
_ORDINAL: Final = re.compile(r"\d++(?:st|nd|rd|th)\b", re.ASCII)
_REST_OF_NAME: Final = re.compile(r"[^\s=≈,;]*+")
_BOUNDS: Final = re.compile(
    r"[<>≤≥≠∞]|\b(?:not|never|cannot|(?:less|fewer|more|greater|larger|smaller) than|at (?:least|most)|up to"
    r"|or (?:more|less|above|below|under|over)|and (?:an?|one|two|three)|wrong|incorrect|false|impossible"
    r"|below zero)\b|\?\s?no\b|n['’]t\b"
    r"|[不非负負半]|至[少多]|[大小高低多少][于於]|超[过過]|以[上下内內]|ない|않|아니",
    re.IGNORECASE,
)
"""What says, anywhere in a text, that its number is not a value, or not all of one."""
_DIGIT: Final = re.compile(r"[0-9π]")
_SEVERAL: Final = re.compile(r"[,;|](?!\d)|\b(?:or|and|to)\b", re.IGNORECASE)
_NO_INCHES: Final = re.compile(r"\s*+in (?:total|all|the|this|each|our|magnitude)\b", re.IGNORECASE)
_IN: Final = re.compile(r"\s*+in (?=\S)")
_NO_UNIT: Final = re.compile(
    r"\s*+(?:$|[.,;:?)|=≈。，；：？）」]|-(?=[\d.])|\((?:approx|rounded|exact|about|correct|since|because|which|i\.e))"
    r"|\s++(?:(?:as|at)\s++[A-Za-z]|(?:when|which|for|because|since|if|after|before|on|of|with|so|from|the|by|and"
    r"|or|is|are|was|to|that|under)\b)"
)
"""What says, right after a number, that it has no unit."""
_FURTHER: Final = re.compile(r"\s*+(?:[/*^+]|-\s?\S|per\b)")
"""What says that a unit has a factor which is not known, or that something is added."""
_APPLIED: Final = re.compile(
    r"(?:[*/^+±]|\\[A-Za-z]+|\b(?:arc)?(?:ln|log|lg|exp|sqrt|sin|cos|tan|cot|sinh|cosh|tanh)(?:_\w+)?"
    r"|\b(?:(?:root|square|cube|inverse|reciprocal|half|third|quarter|logarithm|factorial|opposite|instead"
    r"|multiples?) of|(?:divided|multiplied) by|(?:far|different) from|to the power|than|but|no longer|hardly"
    r"|without|except|excluding|unlike|twice|double|triple|half|root|squared|cubed|times|plus|over|under|above|below"
    r"|beyond|exceeds?|exceeding|modulo|mod|(?:dozen|hundred|thousand|[mb]illion)(?: and)?))\s?\(*+$",
    re.IGNORECASE,
)
"""What says, right before a number, that it is part of a term which is not read."""
_APPLIED_LENGTH: Final = 24  # Characters.
_NEGATIVE: Final = re.compile(r"\b(?:minus|negative)\s(?=[\d.])", re.IGNORECASE)
_PRECISION: Final = re.compile(
    r",?\s?\(?(?:rounded |correct |accurate )?(?:to )?(?:[1-9]|one|two|three|four) ?"
    r"(?:significant (?:figure|digit)|sig\.? ?fig|decimal(?: place)?|s\.? ?f\b|d\.? ?p\b)s?\.?\)?",
    re.IGNORECASE,
)
"""How far a value was rounded."""
_QUOTED: Final = re.compile(r"\A[\"'“‘](.*)[\"'”’]\Z", re.DOTALL)
_ROUND: Final = str.maketrans("[]", "()")
_PI: Final = re.compile(r"(?<![A-Za-z])pi(?![A-Za-z])")
_NOUN: Final = re.compile(
    r"\s++\(?(?!(?:squared?|cubed?|factorial|hal(?:f|ves)|quarters?|(?:third|fourth|fif|six|seven|eigh|nin|ten"
    r"|hundred|thousand|million|billion)(?:th)?s?|times|plus|minus|over|divided|multiplied|raised|modulo|choose"
    r"|negative|positive|binary|octal|hex(?:adecimal)?|more|less|fewer|short|score|gross|myriads?|ero)\b)([A-Za-z]{4,})",
    re.IGNORECASE,
)
"""A word after a number that may name what is counted, and does not change the number."""
_THE_SAME: Final = re.compile(r"\(|\bor\b|\bi\.e\.|\b(?:which|that) is\b|\bequals?\b")
_ENDED: Final = re.compile(r"[—✓✔✅]|[.!?](?!\w)|\(\d|\\(?:tag|qed|[Bb]ox|(?:black)?square|checkmark)\b")
"""What ends a line, and is not part of a value."""
_WORD: Final = re.compile(r"(?!per\b)[A-Za-z]{2}")
_SAYS_MORE: Final = re.compile(r"[^\W_]|[%‰°/*^]")
_ROUNDING: Final = 0.1
"""The share of a value by which rounding may change it within a chain of equations."""
_MAX_NUMBERS: Final = 8
_MAX_DEPTH: Final = 4
_PLAIN: Final = Unit(1.0, frozenset())


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its unit."""

    value: float
    unit: Unit | None
    """The unit, or None if none follows the number."""
    noun: str = ""
    """The word after the number that is not a unit."""
    written: str = ""
    """The number and its unit as the text has them, without mark-up."""

    def value_in(self, target: Unit) -> float | None:
        """Return the number in the wanted unit, or None if its unit is not known or of another kind.

        A number without a unit counts as in the wanted one. Where no unit is wanted, it may count things.
        """
        if self.unit is None:
            return self.value if target == _PLAIN or not self.noun else None
        value = self.unit.convert(self.value, target)
        return value if value is not None and math.isfinite(value) else None


def quantities(text: str) -> list[Quantity]:
    """Return the quantities that a text states, or none if its numbers are not all values.

    In a chain of equations this is the last side, if nothing before it states another answer. A bound is not
    a value, and the uncertainty of a value is left out. 1 h 30 min is one quantity.
    """
    text = _QUOTED.sub(r"\1", unmarked(text)).translate(_ROUND).replace("sqrt(", "√(")
    text = symbols(_PI.sub("π", _NEGATIVE.sub("-", _PRECISION.sub("", text))))
    if _BOUNDS.search(text):
        return []
    sign = max(text.rfind("="), text.rfind("≈"))
    number = _DIGIT.search(text)
    if number is None:
        return []
    if _DIGIT.search(text, sign + 1) and not _SEVERAL.search(text, number.end(), max(sign, 0)):
        *sides, text = re.split("[=≈]", text)
        values = _read(text.strip())
        states_another = any(_differ(side, values[0]) for side in sides[-_MAX_NUMBERS:]) if values else False
        return [] if states_another else values
    return _read(text)


def _read(text: str) -> list[Quantity]:
    try:
        logarithm = _LOGARITHM.fullmatch(text)
        if logarithm is not None:
            return [Quantity(math.log(float(logarithm[1] or logarithm[2])), None, written=text)]
        return _joined(list(_Reader(text).quantities()), text)
    except (_Unreadable, ArithmeticError, ValueError):
        return []


def _differ(side: str, last: Quantity) -> bool:
    """Return whether a side of a chain is a value that rounding does not change into the last one.

    Sides without a unit may be in another one than the last.
    """
    values = _read(side.strip())
    if (
        len(values) != 1
        or values[0].written != side.strip()
        or (values[0].unit is None) != (last.unit is None)
    ):
        return False
    value = values[0].value if last.unit is None else values[0].value_in(last.unit)
    return value is not None and abs(value - last.value) > _ROUNDING * max(abs(value), abs(last.value))


def with_unit_behind(quantity: Quantity, rest: str) -> Quantity | None:
    """Return a quantity with the unit that follows the box around it.

    Args:
        quantity: The quantity in the box.
        rest: What follows the box in its line.

    Returns:
        The quantity, or None if the rest is a part of its term that is not read.
    """
    rest = _ENDED.split(symbols(unmarked(rest)), maxsplit=1)[0].translate(_ROUND)
    if not _SAYS_MORE.search(rest):
        return quantity
    behind = None if rest.lstrip().startswith("^") else _read_first(f"(1) {rest.lstrip()}")
    if behind is None:
        # "(to the left)" is not a unit, nor is a short word after one.
        lone = rest.lstrip().startswith("(") or (quantity.unit is not None and _WORD.match(rest))
        return quantity if lone else None
    if quantity.unit is not None or quantity.noun:
        return quantity if behind.unit is None and behind.value == 1.0 else None
    written = f"{quantity.written}{behind.written.removeprefix('(1)')}"
    return replace(behind, value=quantity.value * behind.value, written=written)


def _read_first(text: str) -> Quantity | None:
    try:
        return next(_Reader(text).quantities(), (None,))[0]
    except (_Unreadable, ArithmeticError, ValueError):
        return None


class _Unreadable(WorkerError):
    """The text has digits that are not a value."""


_Found = tuple[Quantity, int, int]
"""A quantity, with the places where it begins and ends."""


class _Reader:
    """Reads the numbers and units of a text from left to right.

    Raises:
        _Unreadable: A number cannot be read, or there are too many.
        ArithmeticError, ValueError: A number is too large, or is not real.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def quantities(self) -> Iterator[_Found]:
        """Yield each quantity. Digits in names, such as those of T_2 and H2O, are not numbers."""
        count, end = 0, -1
        while (start := _START.search(self._text, self._place)) is not None:
            self._place = start.start()
            before = self._text[max(0, self._place - 1) : self._place]
            letter = before.isalpha() and before not in _CHINESE_IS
            named = self._place != end and (letter or before in ("_", "^"))
            if named or self._take(_ORDINAL):
                self._place = max(self._place, start.end())
                self._take(_REST_OF_NAME)
                continue
            count += 1
            spaced = before and self._text.startswith(("- ", "+ "), self._place)
            applied = _APPLIED.search(self._text[max(0, self._place - _APPLIED_LENGTH) : self._place])
            if count > _MAX_NUMBERS or spaced or applied:
                raise _Unreadable
            yield self._quantity()
            end = self._place

    def _pass_spaces(self) -> None:
        while self._text[self._place : self._place + 1].isspace():
            self._place += 1

    def _quantity(self) -> _Found:
        while True:
            start = self._place
            try:
                value = self._value(0)
                break
            except _Unreadable:
                # In "(177 °C)" there is more than a value between the parentheses.
                self._place = start
                if not self._skip("("):
                    raise
                self._pass_spaces()
        self._uncertainty(value)
        self._take(_CLOSING)
        scale = self._take(_SCALE)
        if scale is not None:
            value *= _SCALES[scale[1].lower()]
        if not math.isfinite(value):
            raise _Unreadable
        unit, noun = self._unit()
        self._uncertainty(value, unit)
        written = self._text[start : self._place].strip()
        return Quantity(value, unit, noun, written), start, self._place

    def _uncertainty(self, value: float, its_unit: Unit | None = None) -> None:
        """Pass the uncertainty of a value, which must be no larger than the value itself."""
        if self._take(_PLUS_MINUS) is None:
            return
        size = self._value(0)
        if self._take(_PERCENT):
            size *= abs(value) / 100
        elif its_unit is not None:
            unit, _ = self._unit()
            size *= 1.0 if unit is None else unit.factor / its_unit.factor
        if not size <= abs(value):
            raise _Unreadable

    def _unit(self) -> tuple[Unit | None, str]:
        """Return the unit or else the noun that follows a number. Both may be missing."""
        if self._take(_NO_INCHES) or _NO_UNIT.match(self._text, self._place):
            return None, ""
        rest = self._text[self._place :]
        within = _IN.match(rest)
        read = (within and leading_unit(rest[within.end() :])) or leading_unit(rest)
        if read is not None:
            self._place = len(self._text) - len(read[1])
            if _FURTHER.match(read[1]):
                raise _Unreadable
            return read[0], ""
        noun = self._take(_NOUN)
        if noun is None:
            raise _Unreadable
        return None, noun[1]

    def _value(self, depth: int) -> float:
        sign = self._take(_SIGN)
        mixed = self._take(_MIXED)
        if mixed is not None:
            whole, above, below = (int(part) for part in mixed.groups() if part)
            if above >= below:
                raise _Unreadable
            value = whole + above / below
        else:
            value = self._factor(depth)
        while True:
            operator = self._take(_OPERATOR)
            if operator is None and self._take(_IMPLIED) is None:
                break
            lost = None if operator is None or operator[1] == "/" else self._take(_LOST)
            factor = self._factor(depth) if lost is None else math.pow(10.0, -int(lost[1]))
            value = value / factor if operator is not None and operator[1] == "/" else value * factor
        return -value if sign is not None and sign[1] == "-" else value

    def _factor(self, depth: int) -> float:
        """Return a number, a root, π or a value in parentheses, to the power that follows it."""
        root = self._skip("√")
        if self._skip("π"):
            value = math.pi
        elif self._skip("("):
            if depth == _MAX_DEPTH:
                raise _Unreadable
            value = self._value(depth + 1)
            self._uncertainty(value)
            self._pass_spaces()
            if not self._skip(")"):
                raise _Unreadable
        else:
            value = self._numeral()
        if root:
            value = math.sqrt(value)
        power = self._take(_POWER)
        return value if power is None else math.pow(value, float(power[1] or power[2]))

    def _numeral(self) -> float:
        match = self._take(_NUMERAL)
        # A leading zero is what is left of something else: 0,125 without its comma.
        if match is None or re.match(r"0\d", match[0]):
            raise _Unreadable
        kind, digits = match.lastgroup, match[0]
        if kind == "english":
            digits = digits.replace(",", "").replace(" ", "")
        elif kind != "plain":
            digits = digits.replace(".", "").replace(",", ".")
        if "." in digits:
            self._take(_LAST_DIGITS)
        power = self._take(_POWER_OF_TEN)
        return float(digits) if power is None else float(f"{digits}e{power[1]}")

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._place)
        if match is not None:
            self._place = match.end()
        return match

    def _skip(self, character: str) -> bool:
        is_next = self._text.startswith(character, self._place)
        self._place += is_next
        return is_next


def _joined(matches: list[_Found], text: str) -> list[Quantity]:
    """Return the quantities. Those in ever smaller units are one, as in 1 h 30 min.

    Several of them must be said to be the same, as in 450 K (177 °C). A range or a list states no value.
    """
    joined: list[Quantity] = []
    for number, (quantity, start, _) in enumerate(matches):
        between = text[matches[number - 1][2] : start].strip() if number else ""
        larger = joined[-1] if joined else None
        if larger is not None and between in ("", "and") and (rest := _rest(quantity, larger)) is not None:
            value = larger.value + math.copysign(rest, larger.value)
            joined[-1] = replace(larger, value=value, written=f"{larger.written} {quantity.written}")
        elif larger is None or _THE_SAME.search(between):
            joined.append(quantity)
        else:
            return []
    return joined


def _rest(quantity: Quantity, larger: Quantity) -> float | None:
    """Return what a quantity in a smaller unit adds to a whole number of larger units, or None."""
    if quantity.unit is None or larger.unit is None or quantity.unit.offset or larger.unit.offset:
        return None
    added = quantity.unit.convert(quantity.value, larger.unit)
    smaller = (
        quantity.unit.dimension and quantity.unit.factor < larger.unit.factor and larger.value.is_integer()
    )
    return added if smaller and added is not None and 0.0 <= added < 1.0 else None
