"""Units of measurement: the size and the dimension of a unit that is written as people write it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from rollyard_pipeline.handlers.tables import definitions, pairs, words

_BASES: Final = ("m", "kg", "s", "A", "K", "mol", "cd", "sr", "rad", "cycle", "bit", "dB")
"""The dimensions. Decibels have one of their own, because what they are relative to is not said."""
_ANGLES: Final = frozenset({"rad", "cycle"})
"""The dimensions that people leave out: 1/s for rad/s, and for Hz."""
_PREFIXED: Final[dict[str, tuple[float, str]]] = {
    **definitions(
        "g=1e-3 kg, N=1 kg m s^-2, Pa=1 N m^-2, J=1 N m, W=1 J s^-1, C=1 A s, V=1 W A^-1, F=1 C V^-1",
        "Ω=1 V A^-1, S=1 A V^-1, Wb=1 V s, T=1 Wb m^-2, H=1 Wb A^-1, lm=1 cd sr, lx=1 lm m^-2",
        "Hz=1 cycle s^-1, Bq=1 s^-1, Gy=1 J kg^-1, Sv=1 J kg^-1, kat=1 mol s^-1, L=1e-3 m^3, l=1e-3 m^3",
        "M=1 mol L^-1, t=1e3 kg, eV=1.602176634e-19 J, cal=4.184 J, erg=1e-7 J, Ry=2.1798723611030e-18 J",
        "bar=1e5 Pa, psi=6894.757293168361 Pa, dyn=1e-5 N, P=0.1 Pa s, St=1e-4 m^2 s^-1, G=1e-4 T",
        "Ci=3.7e10 Bq, rem=1e-2 Sv, sec=1 s, barn=1e-28 m^2, Jy=1e-26 W m^-2 s",
        "D=3.3356409519815204e-30 C m, pc=3.0856775814913673e16 m, yr=31557600 s, Da=1.66053906892e-27 kg",
        "byte=8 bit",
    ),
    "Torr": (101325 / 760, "Pa"),
    "torr": (101325 / 760, "Pa"),
    "Oe": (1000 / (4 * math.pi), "A m^-1"),
}
"""The further units that take prefixes, each as a multiple of units that come before it."""
_PLAIN: Final[dict[str, tuple[float, str]]] = {
    **definitions(
        "y=1 yr, min=60 s, h=3600 s, d=86400 s, week=604800 s, ka=1e3 yr, Ma=1e6 yr, Ga=1e9 yr, Å=1e-10 m",
        "AU=149597870700 m, au=149597870700 m, ly=9460730472580800 m, a_0=5.29177210544e-11 m, in=0.0254 m",
        "ft=0.3048 m, yd=0.9144 m, mi=1609.344 m, nmi=1852 m, ha=1e4 m^2, acre=4046.8564224 m^2",
        "cc=1e-6 m^3, gal=3.785411784 L, lb=0.45359237 kg, oz=0.028349523125 kg",
        "slug=14.593902937206364 kg, u=1 Da, M_odot=1.988409870698051e30 kg, lbf=4.4482216152605 N",
        "kgf=9.80665 N, atm=101325 Pa, mmHg=133.322387415 Pa, E_h=4.3597447222060e-18 J",
        "Btu=1055.05585262 J, hp=745.6998715822702 W, mph=1 mi h^-1, kn=1 nmi h^-1, c=299792458 m s^-1",
        "rpm=1 cycle min^-1, molal=1 mol kg^-1, %=1e-2, ‰=1e-3, ppm=1e-6, ppb=1e-9, °C=1 K",
    ),
    "month": (1 / 12, "yr"),
    "kph": (1 / 3.6, "m s^-1"),
    "°": (math.pi / 180, "rad"),
    "arcmin": (math.pi / 10800, "rad"),
    "arcsec": (math.pi / 648000, "rad"),
    "mas": (1e-3, "arcsec"),
    "°F": (5 / 9, "K"),
}
_ZEROS: Final = {"°C": 273.15, "°F": 459.67 * 5 / 9}
"""The zero of a scale of temperatures, in kelvin."""
_PREFIXES: Final = {
    symbol: float(size)
    for symbol, size in pairs(
        "Q=1e30 R=1e27 Y=1e24 Z=1e21 E=1e18 P=1e15 T=1e12 G=1e9 M=1e6 k=1e3 K=1e3 h=1e2 da=1e1 d=1e-1",
        "c=1e-2 m=1e-3 μ=1e-6 u=1e-6 n=1e-9 p=1e-12 f=1e-15 a=1e-18 z=1e-21 y=1e-24 r=1e-27 q=1e-30",
    ).items()
}
_NAMED_PREFIXES: Final = pairs(
    "quetta=Q ronna=R yotta=Y zetta=Z exa=E peta=P tera=T giga=G mega=M kilo=k hecto=h deca=da deka=da",
    "deci=d centi=c milli=m micro=μ nano=n pico=p femto=f atto=a zepto=z yocto=y ronto=r quecto=q",
)
_NAMES: Final = {
    **pairs(
        "meter=m metre=m gram=g gramme=g second=s sec=sec ampere=A amp=A kelvin=K mole=mol candela=cd",
        "radian=rad steradian=sr hertz=Hz newton=N pascal=Pa joule=J watt=W coulomb=C volt=V farad=F ohm=Ω",
        "siemens=S weber=Wb tesla=T henry=H henrie=H lumen=lm lux=lx becquerel=Bq gray=Gy sievert=Sv",
        "katal=kat liter=L litre=L molar=M tonne=t ev=eV electronvolt=eV calorie=cal rydberg=Ry dyne=dyn",
        "poise=P stokes=St gauss=G oersted=Oe curie=Ci jansky=Jy debye=D parsec=pc year=yr dalton=Da amu=u",
        "minute=min hour=h hr=h day=d wk=week angstrom=Å ångström=Å lightyear=ly bohr=a_0 inch=in inche=in",
        "foot=ft feet=ft yard=yd mile=mi hectare=ha gallon=gal pound=lb ounce=oz hartree=E_h eh=E_h",
        "btu=Btu horsepower=hp knot=kn degree=° deg=° arcminute=arcmin arcsecond=arcsec revolution=cycle",
        "rev=cycle turn=cycle cp=cP percent=% celsius=°C centigrade=°C fahrenheit=°F degc=°C degf=°F",
        "decibel=dB atmosphere=atm hz=Hz micron=μm",
    ),
    **{
        name: name
        for name in words(
            "min mol yr lb gal yd bit byte bar barn rem torr erg acre slug week month cycle arcmin arcsec"
        )
    },
}
"""The names that are also written in capitals, in the plural and with a prefix in words."""
_PHRASES: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), symbol)
    for pattern, symbol in (
        (r"(?:°|\bdeg(?:rees?)?) ?(?:celsius|centigrade|C)\b", "°C"),
        (r"(?:°|\bdeg(?:rees?)?) ?(?:fahrenheit|F)\b", "°F"),
        (r"(?:°|\bdeg(?:rees?)?) ?(?:kelvin|K)\b", "K"),
        (r"\blight[- ]years?\b", "ly"),
        (r"\bastronomical units?\b", "AU"),
        (r"\bnautical miles?\b", "nmi"),
        (r"\b(?:unified )?atomic mass units?\b", "u"),
        (r"\belectron[- ]volts?\b", "eV"),
        (r"\bsolar mass(?:es)?\b", "M_odot"),
        (r"\bparts per million\b", "ppm"),
        (r"\bper ?cent\b", "%"),
        (r"\bparts per billion\b", "ppb"),
        (r"\bminutes? of arc\b", "arcmin"),
        (r"\bseconds? of arc\b", "arcsec"),
        (r"\bpounds? (?:per square inch)\b", "psi"),
        (r"\bmillimet(?:er|re)s? of mercury\b", "mmHg"),
        (r"\bmm ?Hg\b", "mmHg"),
        (r"\b(?:ft|foot)[-*. ](?:lbf?s?|pounds?)\b", "ft lbf"),
        (r"√\(([A-Za-zΩμ]{1,4})\)", r" \1^(1/2)"),
    )
)
"""The units whose names are several words."""
_TOKEN: Final = re.compile(
    r"\s*+(?:(?P<operator>[/*]|[.-](?=[A-Za-zΩμÅ°])|per\b)\s*+)?"
    r"(?:(?P<power>(?:sq(?:uare)?|cu(?:bic)?)\b)\.?\s*+)?"
    r"(?:(?P<group>\()|(?P<one>1(?=\s*/))|(?P<name>°(?:[CF]\b)?|[A-Za-zΩμÅåö]++(?:_[A-Za-z0-9]++)?|[%‰]))"
)
_TOGETHER: Final = re.compile(r"(?<![A-Za-zμΩ_\\])[A-Za-zμΩ]{2,6}(?![A-Za-zμΩ_])")
_LAST: Final = ("mol", "K", "m", "s", "h")
"""The symbols that people write right after another one, as in kJmol, Nm and kWh."""
_EXPONENT: Final = re.compile(
    r"\s?\^\s*+(?:\(\s*+([+-]?\d{1,2}(?:/[1-9]|\.\d)?)\s*+\)|([+-]?\d{1,2})(?!\d|\.\d))"
    r"|([+-]?\d)(?!\d|\.\d)|\s*+(squared|cubed)\b"
)
_CLOSING: Final = re.compile(r"\s*+\)")
_SQUARES: Final = {"sq": 2, "cu": 3}
_MAX_LENGTH: Final = 64  # Characters.
_MAX_POWER: Final = 12
_MAX_DEPTH: Final = 3
_WORDS: Final = frozenset({"in", "as", "at", "am", "d", "u", "c"})
"""The symbols that are read after another one only after a sign, because sentences have them too."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The size of a unit in SI units, and the powers of its base units."""

    factor: float
    dimension: frozenset[tuple[str, Fraction]]
    offset: float = 0.0
    """The temperature of zero, in kelvin."""

    def convert(self, value: float, target_unit: Unit) -> float | None:
        """Return a value in this unit as one in another unit, or None if that is a unit of another kind.

        Temperatures alone are absolute: 0 °C is 273.15 K, and C stands for °C. Radians and cycles may be left
        out of one of the units, as in 1/s for Hz; where both have them, 1 Hz is 2π rad/s.
        """
        if self in _SHORT_SCALES and target_unit.dimension == _UNITS["K"].dimension:
            return _SHORT_SCALES[self].convert(value, target_unit)
        if self._kind() != target_unit._kind():
            return None
        own, target = self._angles(), target_unit._angles()
        turns = Fraction(0)
        if own and target:
            if sum(own.values()) != sum(target.values()):
                return None
            turns = own.get("cycle", Fraction(0)) - target.get("cycle", Fraction(0))
        size = value * self.factor * math.pow(2 * math.pi, turns) + self.offset - target_unit.offset
        return size / target_unit.factor

    def _kind(self) -> frozenset[tuple[str, Fraction]]:
        return frozenset(item for item in self.dimension if item[0] not in _ANGLES)

    def _angles(self) -> dict[str, Fraction]:
        return {base: power for base, power in self.dimension if base in _ANGLES}


def _units() -> dict[str, Unit]:
    units = {base: Unit(1.0, frozenset({(base, Fraction(1))})) for base in _BASES}
    for symbol, (size, definition) in {**_PREFIXED, **_PLAIN}.items():
        factors = []
        for part in definition.split():
            name, _, power = part.partition("^")
            factors.append((units[name], Fraction(power or 1)))
        units[symbol] = replace(_multiplied(factors), offset=_ZEROS.get(symbol, 0.0))
        units[symbol] = replace(units[symbol], factor=units[symbol].factor * size)
    return units


def _multiplied(factors: Sequence[tuple[Unit, Fraction]]) -> Unit:
    """Return a product of powers, whose offset is that of the only factor.

    Raises:
        OverflowError: The size is not a finite number.
    """
    size, powers = 1.0, dict[str, Fraction]()
    for factor, power in factors:
        size *= factor.factor ** float(power)
        for base, exponent in factor.dimension:
            powers[base] = powers.get(base, Fraction(0)) + exponent * power
    if not (math.isfinite(size) and size > 0.0):
        raise OverflowError
    offset = factors[0][0].offset if len(factors) == 1 and factors[0][1] == 1 else 0.0
    return Unit(size, frozenset((base, power) for base, power in powers.items() if power), offset)


_UNITS: Final = _units()
_SHORT_SCALES: Final = {_UNITS["C"]: _UNITS["°C"], _UNITS["F"]: _UNITS["°F"]}
_WITH_PREFIXES: Final = frozenset(_PREFIXED) | {"m", "s", "A", "K", "mol", "cd", "sr", "rad", "bit"}


def unit(text: str) -> Unit | None:
    """Return the unit that a text such as `km/h`, `J/(mol K)` or `meters per second` names, or None.

    An empty text is the unit of numbers that have none. Everything after a slash is below it, so `J/mol K` is
    `J/(mol K)`. The text has no mark-up (see `unmarked`).
    """
    leading = leading_unit(symbols(text))
    if leading is None:
        return None if text.strip() else Unit(1.0, frozenset())
    return None if leading[1].strip() else leading[0]


def symbols(text: str) -> str:
    """Return a text in which units have one symbol each: `ly` for light years, and `kJ mol` for `kJmol`."""
    for pattern, symbol in _PHRASES:
        text = pattern.sub(symbol, text)
    return _TOGETHER.sub(_apart, text)


def _apart(match: re.Match[str]) -> str:
    name = match[0]
    if not name.islower() and not _named(name):
        for last in _LAST:
            first = name.removesuffix(last)
            if first != name and _by_symbol(first):
                return f"{first} {last}"
    return name


def leading_unit(text: str) -> tuple[Unit, str] | None:
    """Return the longest unit with which a text of `symbols` begins, and the rest, or None if it has none."""
    factors, end = _factors(text[:_MAX_LENGTH], 0, 0)
    try:
        return (_multiplied(factors), text[end:]) if factors else None
    except OverflowError:
        return None


def _factors(text: str, start: int, depth: int) -> tuple[list[tuple[Unit, Fraction]], int]:
    """Return the factors that stand at `start`, each with its power, and where the last of them ends."""
    factors: list[tuple[Unit, Fraction]] = []
    end, over = start, False
    while (token := _TOKEN.match(text, end)) is not None:
        operator, at = token["operator"], token.end()
        inner: list[tuple[Unit, Fraction]]
        if token["group"]:
            inner, at = _factors(text, at, depth + 1) if depth < _MAX_DEPTH else ([], at)
            closing = _CLOSING.match(text, at)
            if not inner or closing is None:
                break
            at = closing.end()
        elif token["one"]:
            inner = []
            if factors or operator:
                break
        else:
            named = _named(token["name"])
            if named is None or (factors and operator is None and token["name"] in _WORDS):
                break
            inner = [(named, Fraction(1))]
        power, at = _power(text, at)
        power *= _SQUARES.get((token["power"] or "")[:2].lower(), 1)
        if abs(power) > _MAX_POWER:
            break
        over = over or operator in ("/", "per")
        factors += [(named, exponent * (-power if over else power)) for named, exponent in inner]
        end = at
    return factors, end


def _power(text: str, at: int) -> tuple[Fraction, int]:
    match = _EXPONENT.match(text, at)
    if match is None:
        return Fraction(1), at
    if match[4]:
        return Fraction(2 if match[4] == "squared" else 3), match.end()
    return Fraction(match[1] or match[2] or match[3]), match.end()


def _named(name: str) -> Unit | None:
    base = _by_symbol(name)
    if base is not None:
        return base
    lower = name.lower()
    for word in (lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if word in _NAMES:
            return _by_symbol(_NAMES[word])
        for prefix, symbol in _NAMED_PREFIXES.items():
            rest = word.removeprefix(prefix)
            if rest != word and rest in _NAMES:
                return _prefixed(symbol + _NAMES[rest])
    return None


def _by_symbol(name: str) -> Unit | None:
    return _UNITS.get(name) or _prefixed(name)


def _prefixed(name: str) -> Unit | None:
    for length in (1, 2):
        prefix, symbol = name[:length], name[length:]
        if prefix in _PREFIXES and symbol in _WITH_PREFIXES:
            base = _UNITS[symbol]
            return replace(base, factor=base.factor * _PREFIXES[prefix])
    return None
