r"""How an answer is spelled: from what people and models write to the LaTeX that latex2sympy reads.

Nothing here knows the other answer, except for a unit of one letter, which only the other answer tells from a
variable. What can be read in two ways (`1,234` may be one number or two) has several readings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_SIGNS: Final = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "÷": "/",
        "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
        "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "±": r"\pm ", "≈": r"\approx ", "∶": ":", "⁄": "/",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}", "∖": r"\setminus ", "ℝ": r"\mathbb{R}",
        "（": "(", "）": ")", "，": ",", "、": ",", "；": ";", "：": ":", "％": "%", "＝": "=",
        "“": "", "”": "",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2007": " ", "\u2008": " ", "\u200a": " ",
        "\u200b": "", "\ufeff": "", "²": "^{2}", "³": "^{3}", "¹": "^{1}",
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    }
)  # fmt: skip
_RAISED: Final = re.compile("[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_RAISED_SIGNS: Final = str.maketrans("⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹", "-+0123456789")
_ROOT: Final = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\w+))")

_CURRENCY: Final = re.compile(r"\\?\$|\\(?:euro|pounds|yen)\b|[€£¥₹₽₩]|\b(?:USD|EUR|Rs\.?)(?![A-Za-z])")
_LAYOUT: Final = re.compile(
    r"\\(?:displaystyle|textstyle|limits|left|right|[bB]igg?[lr]?)(?![A-Za-z])|\\!|\\phantom\{[^{}]*\}"
)
_NO_COMMAND: Final = r"(?![A-Za-z])"
_SPACES: Final = re.compile(r"(?<!\\)\\(?:[,;:> ]|q?quad|enspace|thinspace|hspace\{[^{}]*\})|~")
_FRACTION: Final = re.compile(r"\\[dtc]?frac" + _NO_COMMAND)
_SHORT_FRACTION: Final = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)")
_DOUBLED: Final = re.compile(r"\\\\(?=[A-Za-z{}$()\[\]])")
_REPEATING: Final = re.compile(
    r"(?<!\d)(\d{0,40})\.(\d{0,40})(?:\\(?:overline|bar|dot)\s*\{(\d{1,40})\}|\\dot\s*(\d))"
)
_SCIENTIFIC: Final = re.compile(r"(?<![\w\\])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?!\w)")
_POWER: Final = re.compile(r"\^\s*(-?\d{2,}|-\d)")
_INDEX: Final = re.compile(r"_(\w)(?=\s)")
_FUNCTIONS: Final = "pi|sin|cos|tan|cot|sec|csc|ln|log|arcsin|arccos|arctan"
_WORD_SIGNS: Final = (
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<![A-Za-z\\])sqrt\s*\{"), r"\\sqrt{"),
    (re.compile(r"(?<![A-Za-z\\])(?:sqrt|Sqrt)\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(rf"(?<![A-Za-z\\])({_FUNCTIONS})(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![A-Za-z\\])(?:infinity|infty|inf|oo)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\\sqrt\s*(\d+)"), r"\\sqrt{\1}"),
    (re.compile(r"<=|=<|\\leqslant" + _NO_COMMAND), r"\\le "),
    (re.compile(r">=|\\geqslant" + _NO_COMMAND), r"\\ge "),
    (re.compile(r"!=|\\neq" + _NO_COMMAND), r"\\ne "),
    (re.compile(r"(?<=[\])])\s*U\s*(?=[\[(])"), r"\\cup "),
    (re.compile(r"\\varnothing" + _NO_COMMAND), r"\\emptyset "),
    (re.compile(r"\\operatorname\{(\w+)\}"), r"\\\1 "),
    (re.compile(r"\\(?:colon)" + _NO_COMMAND), ":"),
    (re.compile(r"\\l?[cd]dots" + _NO_COMMAND), r"\\ldots "),
    (re.compile(r"\\langle\s*(.*?)\s*\\rangle"), r"(\1)"),
)  # fmt: skip
_DEGREES_OF: Final = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc))\s*\(?\s*\{?(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?\s*\}?\)?"
)
_DEGREES: Final = re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree" + _NO_COMMAND)
_BUILDER: Final = re.compile(r"^\\\{\s*([A-Za-z])(?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\||\\mid|:)\s*(.*?)\\\}$")
_TEXT: Final = re.compile(
    r"\\(?:text(?:rm|bf|it|normal|sf|tt|up)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|bf|rm)\s*\{([^{}]*)\}"
)
_LABEL: Final = re.compile(r"^\s*\\text\{[^{}]*\}\s*(?:=|:|\\approx)\s*")
_ALTERNATIVES: Final = re.compile(
    r"\s*,?\s*(?:\\text\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
    r"|(?<=[\d)\]}])\s*(?:and|or)\s*(?=[A-Z\d(\\-]))\s*"
)
_PERCENT: Final = re.compile(
    r"\s*\\?%|\s*(?:\\text\{\s*)?\b(?:percent(?:age)?|pct)\b(?:\s*\})?|\s*per cent\b"
)

_GROUPED: Final = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:,\d{3})+)(?![\d,])")
_MARKED: Final = re.compile(r"(?<![\d.,])(\d{1,3})((?:\s*(?:\{\s*,\s*\}|,\\!|\\,)\s*\d{3})+)(?![\d,])")
_SPACED: Final = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?: \d{3})+)(?![\d,])")
_DECIMAL_COMMA: Final = re.compile(r"^([^\d,]*\d+),(\d{2,}|\d+(?=\s*\\?%))([^\d,]*)$")
_MIXED: Final = re.compile(
    r"(?<![\w.^_{}/)])(\d{1,40})"
    r"(?:\s*\\frac\s*\{(\d{1,40})\}\s*\{(\d{1,40})\}|\s+(\d{1,40})\s*/\s*(\d{1,40})(?![\d.]))"
)
_SIDE_BY_SIDE: Final = re.compile(r"\d\s+\.?\d")
_BRACKET: Final = re.compile(r"\\\{|\\\}|[()\[\]]")

_UNIT_TEXT: Final = re.compile(r"\s*\\text\{([^{}]*)\}(?:\s*\^\s*(?:\d|\{-?\d\}))?\s*$")
_UNIT_WORDS: Final = re.compile(
    r"(?<=[\d}%)])\s+((?:[A-Za-z]{3,}\.?[ -]?)+(?:\^\s*\{?\d\}?)?)(?:per\s+\w+)?\s*$"
)
_ABBREVIATIONS: Final = (
    "mm|cm|dm|km|nm|mg|kg|ml|mL|dl|cl|ms|hr|hrs|min|mins|sec|secs|ft|yd|mi|lb|lbs|oz|mph|kph|km/h|m/s|kmh|cc|"
    "cents?|deg|units?|sq|MB|GB|KB|Hz|kHz|MHz|kW|kJ|eV|Pa|kPa|am|pm|in"
)
_UNIT_SHORT: Final = re.compile(
    rf"(?<=[\d}}%)])\s*(?:sq\.?\s+|cu\.?\s+)?({_ABBREVIATIONS})\.?(?:\s*\^\s*\{{?\d\}}?)?\s*$"
)
_NO_UNITS: Final = frozenset({"and", "or", "sin", "cos", "tan", "log", "mod", "infinity", "percent", "sqrt"})
_ROUGHLY: Final = re.compile(r"^(?:[Aa](?:bout|pproximately)|[Rr]oughly|[Ee]xactly|\\approx|≈|\\sim)\s*")


@dataclass(frozen=True)
class Spelling:
    """One reading of an answer.

    Attributes:
        latex: What latex2sympy reads.
        unit: The unit that was left out, or "".
        how: How it was read, for people, or "" for the plain reading.
    """

    latex: str
    unit: str = ""
    how: str = ""


def spellings(text: str, *, letter_unit: str = "") -> list[Spelling]:
    """Return the readings of an answer, the plain one first; none if it has no reading.

    Args:
        text: The answer, as written.
        letter_unit: A unit of one letter that the other answer names, which is then no variable here.
    """
    plain = _signs(text)
    plain, unit = _without_unit(plain, letter_unit)
    found = [Spelling(_numbers(plain), unit)]
    apart = _numbers(plain, fused=False)
    if apart != found[0].latex:
        found.append(Spelling(apart, unit, "by taking numbers between commas apart"))
    comma = _DECIMAL_COMMA.match(plain)
    if comma is not None and not _GROUPED.search(plain):
        point = f"{comma[1]}.{comma[2]}{comma[3]}"
        found.append(Spelling(_numbers(point), unit, "by taking the comma for a decimal point"))
    return [each for each in found if each.latex and not _SIDE_BY_SIDE.search(each.latex)]


def _signs(text: str) -> str:
    """Return the answer with one spelling for each sign, command and kind of space."""
    text = _RAISED.sub(lambda match: "^{" + match[0].translate(_RAISED_SIGNS) + "}", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text).translate(_SIGNS)
    if "matrix" not in text and "array" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _FRACTION.sub(r"\\frac", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _TEXT.sub(r"\\text{\1}", text)
    whole = _TEXT.fullmatch(text.strip())
    if whole is not None and any(map(str.isdigit, whole[1])):
        text = whole[1]
    text = _MARKED.sub(_joined, text)
    text = _CURRENCY.sub("", _LAYOUT.sub(" ", text))
    text = _SPACES.sub(" ", text).replace("\n", " ").strip()
    text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    for pattern, sign in _WORD_SIGNS:
        text = pattern.sub(sign, text)
    text = _INDEX.sub(r"_{\1}", _POWER.sub(r"^{\1}", text))
    text = _PERCENT.sub(r"\\%", text)
    text = _DEGREES.sub("", _DEGREES_OF.sub(r"\1(\\frac{\2 \\pi}{180})", text))
    text = _BUILDER.sub(r"\2", text.strip())
    text = _LABEL.sub("", _ROUGHLY.sub("", text))
    return _ALTERNATIVES.sub(" , ", text).rstrip(" .,;:").lstrip(" ,;:")


def _without_unit(text: str, letter_unit: str) -> tuple[str, str]:
    """Return the answer without its unit, and the unit. A unit is words after a number or `\\text{…}`."""
    if letter_unit:
        bare = re.sub(rf"(?<=[\d}}])\s*{re.escape(letter_unit)}\s*$", "", text)
        if bare != text:
            return bare, letter_unit
    match = _UNIT_TEXT.search(text)
    # "5 \\text{ or 6}" is no number with a unit.
    if match is not None and text[: match.start()].strip() and not any(map(str.isdigit, match[1])):
        return text[: match.start()].strip(), match[1].strip()
    match = _UNIT_SHORT.search(text) or _UNIT_WORDS.search(text)
    if match is not None and not _NO_UNITS & set(match[1].split()):
        return text[: match.start()].strip(), match[1].strip()
    return text, ""


def _joined(match: re.Match[str]) -> str:
    return match[1] + re.sub(r"\D", "", match[2])


def _fraction_of_repeating(match: re.Match[str]) -> str:
    whole, fixed, repeated = match[1] or "0", match[2], match[3] or match[4]
    top = int(whole + fixed + repeated) - int(whole + fixed)
    bottom = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return rf"\frac{{{top}}}{{{bottom}}}"


def _numbers(text: str, *, fused: bool = True) -> str:
    """Return the answer with its thousands joined and its mixed numbers as fractions.

    Args:
        text: The answer.
        fused: Whether `1,234` outside of brackets is one number. In brackets it never is: (8,120) is a point.
    """
    if fused:
        text = "".join(_GROUPED.sub(_joined, part) if outside else part for part, outside in _levels(text))
    text = re.sub(r"(?<=\d),(?=[\d.-])", ", ", text)  # latex2sympy joins what is left.
    text = _SPACED.sub(_joined, text)
    text = _MIXED.sub(_fraction_of_mixed, text)
    return re.sub(r"(?<=\d)i(?![A-Za-z])", " i", text).strip()


def _levels(text: str) -> list[tuple[str, bool]]:
    """Return the parts of `text`, and whether each stands outside of all brackets."""
    parts: list[tuple[str, bool]] = []
    depth = start = 0
    for bracket in _BRACKET.finditer(text):
        opens = bracket[0][-1] in "([{"
        if depth == (0 if opens else 1):
            parts.append((text[start : bracket.start()], depth == 0))
            start = bracket.start()
        depth = depth + 1 if opens else max(depth - 1, 0)
    parts.append((text[start:], depth == 0))
    return parts


def _fraction_of_mixed(match: re.Match[str]) -> str:
    whole, top, bottom = match[1], match[2] or match[4], match[3] or match[5]
    if int(top) >= int(bottom):
        return rf"{whole} \cdot \frac{{{top}}}{{{bottom}}}" if match[2] else match[0]
    return rf"\frac{{{int(whole) * int(bottom) + int(top)}}}{{{bottom}}}"
