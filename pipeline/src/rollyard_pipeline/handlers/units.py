"""Units of measurement: the factor and the dimension of a unit that is written as people write it."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

_BASE: Final[dict[str, tuple[float, dict[str, int]]]] = {
    "m": (1.0, {"m": 1}), "s": (1.0, {"s": 1}), "g": (1e-3, {"kg": 1}), "A": (1.0, {"A": 1}),
    "K": (1.0, {"K": 1}), "mol": (1.0, {"mol": 1}), "cd": (1.0, {"cd": 1}), "rad": (1.0, {}),
    "N": (1.0, {"kg": 1, "m": 1, "s": -2}), "Pa": (1.0, {"kg": 1, "m": -1, "s": -2}),
    "J": (1.0, {"kg": 1, "m": 2, "s": -2}), "W": (1.0, {"kg": 1, "m": 2, "s": -3}),
    "C": (1.0, {"A": 1, "s": 1}), "V": (1.0, {"kg": 1, "m": 2, "s": -3, "A": -1}),
    "F": (1.0, {"kg": -1, "m": -2, "s": 4, "A": 2}), "Ω": (1.0, {"kg": 1, "m": 2, "s": -3, "A": -2}),
    "T": (1.0, {"kg": 1, "s": -2, "A": -1}), "Wb": (1.0, {"kg": 1, "m": 2, "s": -2, "A": -1}),
    "H": (1.0, {"kg": 1, "m": 2, "s": -2, "A": -2}), "Hz": (1.0, {"s": -1}), "Bq": (1.0, {"s": -1}),
    "L": (1e-3, {"m": 3}), "l": (1e-3, {"m": 3}), "M": (1e3, {"mol": 1, "m": -3}),
    "eV": (1.602176634e-19, {"kg": 1, "m": 2, "s": -2}), "cal": (4.184, {"kg": 1, "m": 2, "s": -2}),
    "bar": (1e5, {"kg": 1, "m": -1, "s": -2}),
}  # fmt: skip
"""The units that take prefixes, each with its size in SI units and its dimension."""
_PLAIN: Final[dict[str, tuple[float, dict[str, int]]]] = {
    "min": (60.0, {"s": 1}), "h": (3600.0, {"s": 1}), "hr": (3600.0, {"s": 1}), "day": (86400.0, {"s": 1}),
    "atm": (101325.0, {"kg": 1, "m": -1, "s": -2}), "Å": (1e-10, {"m": 1}),
    "u": (1.66053906892e-27, {"kg": 1}),
    "ohm": (1.0, {"kg": 1, "m": 2, "s": -3, "A": -2}), "%": (0.01, {}), "°": (math.pi / 180, {}),
    "deg": (math.pi / 180, {}), "mmHg": (133.322387415, {"kg": 1, "m": -1, "s": -2}),
}  # fmt: skip
_PREFIXES: Final = {
    "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "d": 1e-1, "c": 1e-2, "m": 1e-3, "μ": 1e-6, "µ": 1e-6,
    "u": 1e-6, "n": 1e-9, "p": 1e-12, "f": 1e-15,
}  # fmt: skip
_FACTOR: Final = re.compile(r"([A-Za-zΩμµÅ%°]+)(?:\^?\{?([+-]?\d{1,2})\}?)?")
_MAX_LENGTH: Final = 64


@dataclass(frozen=True, slots=True)
class Unit:
    """The size of a unit in SI units, and the powers of its base units."""

    factor: float
    dimension: frozenset[tuple[str, int]]


def unit(text: str) -> Unit | None:
    """Return the unit that a text such as `km/h`, `kg*m/s^2` or `J mol^-1` names, or None if it names none.

    An empty text is the unit of numbers that have none.
    """
    text = re.sub(
        r"\\(?:text|mathrm|,|;|!|cdot|times|\s)|[{}$]", lambda m: " " if m[0][0] == "\\" else "", text
    )
    text = text.strip()
    if len(text) > _MAX_LENGTH:
        return None
    factor, powers = 1.0, Counter[str]()
    over = False
    for sign, term in re.findall(r"(/?)\s*([^\s/*·]+)", text):
        over = over or sign == "/"
        match = _FACTOR.fullmatch(term)
        found = None if match is None else _named(match[1])
        if match is None or found is None:
            return None
        power = int(match[2] or 1) * (-1 if over else 1)
        factor *= found[0] ** power
        for base, exponent in found[1].items():
            powers[base] += exponent * power
    return Unit(factor, frozenset((base, power) for base, power in powers.items() if power))


def _named(name: str) -> tuple[float, dict[str, int]] | None:
    found = _PLAIN.get(name) or _BASE.get(name)
    if found is not None:
        return found
    prefix, base = _PREFIXES.get(name[:1]), _BASE.get(name[1:])
    return None if prefix is None or base is None else (prefix * base[0], base[1])
