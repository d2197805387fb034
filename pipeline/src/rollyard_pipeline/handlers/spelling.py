r"""How an answer is spelled: from what people and models write to the LaTeX that latex2sympy reads.

Nothing here knows the other answer, except for a unit of one letter, which only the other answer
distinguishes from a variable. What can be read in two ways (`1,234` may be one number or two) has several
readings.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Final

from rollyard_pipeline.handlers.tables import pairs, words

_SIGNS: Final = str.maketrans(
    {
        **{
            sign: f"\\{command} "
            for sign, command in pairs(
                "×=times ·=cdot ⋅=cdot ∙=cdot π=pi ∞=infty ≤=le ≥=ge ≠=ne ∪=cup ∩=cap ∈=in ∅=emptyset ±=pm",
                "≈=approx …=ldots ∖=setminus",
            ).items()
        },
        **{
            sign: rf"\frac{{{fraction[0]}}}{{{fraction[2]}}}"
            for sign, fraction in pairs("½=1/2 ⅓=1/3 ⅔=2/3 ¼=1/4 ¾=3/4 ⅕=1/5 ⅛=1/8").items()
        },
        **pairs(
            "−=- –=- —=- ÷=/ ∶=: ⁄=/ （=( ）=) ，=, 、=, ；=; ：=: ％=% ＝== ²=^{2} ³=^{3} ¹=^{1}",
            r"ℝ=\mathbb{R} ¢=\text{cents}",
        ),
        **dict.fromkeys("✓✔✅“”\u200b\ufeff", ""),
        **dict.fromkeys("\u00a0\u2007\u2008\u2009\u200a\u202f", " "),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        "°": r"^\circ ",
        "或": " or ",
        "且": " and ",
    }
)
_RAISED: Final = re.compile("[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_RAISED_SIGNS: Final = str.maketrans("⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹", "-+0123456789")
_ROOT: Final = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\w+))")

_MONEY: Final = re.compile(r"(?:\\?\$|\\(euro|yen)\b|([€¥₹₽₩]))\s*[\d.]")
_CURRENCY: Final = re.compile(r"\\?\$|\\(?:euro|pounds|yen)\b|[€£¥₹₽₩]|\b(?:USD|EUR|Rs\.?)(?![A-Za-z])")
_LAYOUT: Final = re.compile(
    r"\\(?:displaystyle|textstyle|limits|left|right|[bB]igg?[lr]?|bf|rm|[lL]arge|LARGE|[hH]uge|checkmark)"
    r"(?![A-Za-z])|\\!|\\phantom\{[^{}]*\}"
)
_NO_COMMAND: Final = r"(?![A-Za-z])"
_SPACES: Final = re.compile(r"(?<!\\)\\(?:[,;:> ]|q?quad|enspace|thinspace|hspace\{[^{}]*\})|~")
_FRACTION: Final = re.compile(r"\\[dtc]?frac" + _NO_COMMAND)
_SHORT_FRACTION: Final = re.compile(r"\\frac\s*(\d|\\pi)\s*(\d)(?!\d)")
_DOUBLED: Final = re.compile(r"\\\\(?=[A-Za-z{}$()\[\]])")
_REPEATING: Final = re.compile(
    r"(?<!\d)(\d{0,40})\.(\d{0,40})(?:\\(?:overline|bar|dot)\s*\{(\d{1,40})\}|\\dot\s*(\d))"
)
_SCIENTIFIC: Final = re.compile(r"(?<![\w\\])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?!\w)")
_POWER: Final = re.compile(r"\^\s*(-?\d{2,}|-\d)")
_INDEX: Final = re.compile(r"_(\w)(?=\s)")
_FUNCTIONS: Final = r"pi|sin|cos|tan|cot|sec(?!\.?\s*$)|csc|ln|log|arcsin|arccos|arctan"


def _of_two(match: re.Match[str]) -> str:
    """Return the greatest common divisor of variables as a variable: latex2sympy takes it for 1."""
    two = sorted((match[2], match[3]))
    return match[0] if "".join(two).isdigit() else f"{match[1][0]}_{{{two[0]}x{two[1]}}}"


_WORD_SIGNS: Final = (
    (re.compile(r"\.{3,}|\\(?:l|c|d)?dots[bc]?" + _NO_COMMAND), r"\\ldots "),
    (re.compile(rf"([,+*<-]|\\(?:cdot|times|le)(?![A-Za-z]))\s*\\ldots{_NO_COMMAND}"), r"\1 \\Upsilon "),
    (re.compile(r"\\operatorname\*?\{(\w+)\}"), r"\\\1 "),
    (re.compile(r"\\(gcd|lcm)\s*\((\w+)\s*,\s*(\w+)\)"), _of_two),
    (re.compile(r"\\lg" + _NO_COMMAND), r"\\log_{10} "),
    (re.compile(r"\\(mathbb|vec|overrightarrow)\s+([A-Za-z])"), r"\\\1{\2}"),
    (re.compile(r"\\(max|min)\s*\\\{([^{}]*)\\\}"), r"\\\1(\2)"),
    (re.compile(r"\\sqrt\s*\[(\d*[13579])\]\s*\{\s*-([^{}+-]*)\}"), r"-\\sqrt[\1]{\2}"),
    (re.compile(r"\^\s*(?:\\prime\b|\{\s*((?:\\prime\s*)+)\})"), lambda m: "'" * max(m[0].count("prime"), 1)),
    (re.compile(r"(?<=[A-Za-z])(?<!\\)('+)"), lambda m: "_{" + "p" * len(m[1]) + "}"),
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
    (re.compile(r"\\(?:colon)" + _NO_COMMAND), ":"),
    (re.compile(r"\\langle\s*(.*?)\s*\\rangle"), r"(\1)"),
)
_DEGREES_OF: Final = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc))\s*\(?\s*\{?(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?\s*\}?\)?"
)
_DEGREES: Final = re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree" + _NO_COMMAND)
_BUILDER: Final = re.compile(r"^\\\{\s*([A-Za-z])(?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\||\\mid|:)\s*(.*?)\\\}$")
_TEXT: Final = re.compile(
    r"\\(?:text(?:rm|bf|it|normal|sf|tt|up)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|bf|rm)\s*\{([^{}]*)\}"
)
_STYLED: Final = re.compile(
    r"\\(?:text(?:rm|bf|it)?|math(?:rm|bf|it)|boldsymbol|bm|bf|underline)\s*\{(.*)\}", re.DOTALL
)
_TEXTS_OVER: Final = re.compile(
    r"\\frac\{\\text\{([^{}]*)\}\}\{\\text\{([^{}]*)\}\}|\\text\{([^{}]*)\}\s*/\s*\\text\{([^{}]*)\}"
)
_LABEL: Final = re.compile(
    r"^\s*\\text\{(?:[^{}]*\}\s*(?:=|:|\\approx)|\s*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s*\}\s*:?)\s*",
    re.IGNORECASE,
)
_ALIGNED: Final = re.compile(
    r"\\begin\{(aligned|align\*?|split|gathered|gather\*?)\}(.*?)\\end\{\1\}|\\begin\{(cases)\}([^&]*?)\\end\{cases\}",
    re.DOTALL,
)
_SCALE: Final = re.compile(
    r"(?<=\d)\s*(?:(\\text\{)\s*)?(hundred|thousand|[mb]illion|trillion)s?\b(?:\s*(\}))?(?!\s*ths?\b)",
    re.IGNORECASE,
)
_ZEROS: Final = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_TEMPERATURE: Final = re.compile(r"\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{\s*)?([CF])\s*\}?\s*$")
_RELATION: Final = re.compile(r"[=<>]|\\[lg]eq?(?![A-Za-z])|\\ne(?![A-Za-z])")
INEQUALITY: Final = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])|\\ne(?![A-Za-z])")
_FOR_ALL: Final = re.compile(
    r"\s*\(\s*[A-Za-z]\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?\s*\)\s*$"
    r"|\s*,?\s*\\text\{,?\s*for (?:all|any|every|each)(?: real| integers?| positive| numbers?)*\s*\}"
    r"\s*[A-Za-z](?:\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?)?\s*$"
)
_LOGICAL: Final = re.compile(r"\\(lor|vee|land|wedge)(?![A-Za-z])")
_OR: Final = re.compile(r"\\text\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])")
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
_DECIMAL_COMMA: Final = re.compile(r"^([^\d,()\[\]{}]*\d+),(\d{2,}|\d+(?=\s*\\?%))([^\d,()\[\]{}]*)$")
_MIXED: Final = re.compile(
    r"(?<![\w.^_{}/)])(\d{1,40})"
    r"(?:\s*\\frac\s*\{(\d{1,40})\}\s*\{(\d{1,40})\}|\s+(\d{1,40})\s*/\s*(\d{1,40})(?![\d.]))"
)
_SIDE_BY_SIDE: Final = re.compile(r"(?<![\^_\d.])(?<![\^_]-)\d[\d.]*\s+\.?\d")
_NO_READING: Final = re.compile(
    r"\d\s+(?!mod\b)[A-Za-z]{2,}\s+[-+]?\d|[\d)}]'|\\(?:gcd|lcm)\b[^)]*[a-z]|^\s*!|\\prime|[)\]}]\s*'"
)
"""What latex2sympy misreads: "0 to 24" as a product, and derivatives as the functions that they are of."""
_UNLIKE: Final = re.compile(r"^(?:[A-Za-z]\s*=)?\s*(\d+)\s*(?:\\approx|=)\s*(\d+)\s*$")
"""Two whole numbers of which one cannot stand for the other."""
_BRACKET: Final = re.compile(r"\\\{|\\\}|[()\[\]]")

_UNIT_TEXT: Final = re.compile(r"\s*\\text\{([^{}]*)\}((?:\s*\^\s*(?:\d|\{-?\d\}))?)\s*$")
_UNIT_CHINESE: Final = re.compile(r"(?<=[\d}%)])\s*([\u4e00-\u9fff]{1,4})()\s*$")
_UNIT_WORDS: Final = re.compile(
    r"(?<=[\d}%)])\s+((?:[A-Za-z]{3,}\.?[ -]?)+((?:\^\s*\{?\d\}?)?)(?:per\s+\w+)?)\s*$"
)
_ABBREVIATIONS: Final = (
    "mm|cm|dm|km|nm|mg|kg|ml|mL|dl|cl|ms|hr|hrs|min|mins|sec|secs|ft|yd|mi|lb|lbs|oz|mph|kph|km/h|m/s|kmh|cc|"
    "cents?|deg|units?|sq|MB|GB|KB|Hz|kHz|MHz|kW|kJ|eV|Pa|kPa|am|pm|in"
)
_UNIT_SHORT: Final = re.compile(
    rf"(?<=[\d}}%)])\s*((?:sq\.?\s+|cu\.?\s+)?(?:{_ABBREVIATIONS}))\.?((?:\s*\^\s*\{{?\d\}}?)?)\s*$"
)
_NO_UNITS: Final = words(
    "and or sin cos tan log mod infinity percent sqrt is are was be isn't not no never wrong incorrect than",
    "too if unless when where else but except maybe perhaps possibly plus minus factorial dozen dozens",
    "score hundred hundreds thousand thousands million millions billion trillion hundredths halves half",
    "thirds third fourths quarters fifths sixths sevenths eighths ninths tenths",
)
"""Words that make a number another one."""
_CHINESE_NUMBERS: Final = frozenset("零一二两三四五六七八九十百千万亿半倍分之多不非没无或和且至到")
_OTHERWISE: Final = _NO_UNITS - words("sin cos tan log mod half") | words("all any every except")
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


def spellings(text: str, *, letter_unit: str = "", is_key: bool = False) -> list[Spelling]:
    """Return the readings of an answer, the plain one first; none if it has no reading.

    Args:
        text: The answer, as written.
        letter_unit: A unit of one letter that the other answer names, which is then no variable here.
        is_key: Whether it is the expected answer, in which a comma is not a decimal point.
    """
    plain = _signs(text)
    plain, unit = _without_unit(plain, letter_unit)
    unit = unit or _currency(text)
    results = [Spelling(_numbers(plain), unit)]
    apart = _numbers(plain, fused=False)
    if apart != results[0].latex:
        results.append(Spelling(apart, unit, "by taking numbers between commas apart"))
    comma = None if is_key else _DECIMAL_COMMA.match(plain)
    if comma is not None and not _GROUPED.search(plain):
        point = f"{comma[1]}.{comma[2]}{comma[3]}"
        results.append(Spelling(_numbers(point), unit, "by taking the comma for a decimal point"))
    return [each for each in results if each.latex and _is_readable(each.latex)]


def _is_readable(latex: str) -> bool:
    unlike = _UNLIKE.search(latex)
    words = {word for text in re.findall(r"\\text\{([^{}]*)\}", latex) for word in text.lower().split()}
    return (
        not words & _OTHERWISE
        and not _SIDE_BY_SIDE.search(latex)
        and not _NO_READING.search(latex)
        and (unlike is None or int(unlike[1][-40:]) == int(unlike[2][-40:]))
    )


def _currency(text: str) -> str:
    sign = _MONEY.search(text)
    return (sign[1] or sign[2] or "$") if sign is not None else ""


def _signs(text: str) -> str:
    """Return the answer with one spelling for each sign, command and kind of space."""
    text = _RAISED.sub(lambda match: "^{" + match[0].translate(_RAISED_SIGNS) + "}", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text).translate(_SIGNS)
    text = _ALIGNED.sub(_row, text)
    if "matrix" not in text and "array" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _FRACTION.sub(r"\\frac", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _without_style(_TEXT.sub(r"\\text{\1}", text))
    text = _TEXTS_OVER.sub(lambda match: rf"\text{{{match[1] or match[3]}/{match[2] or match[4]}}}", text)
    text = _SCALE.sub(_power_of_ten, _MARKED.sub(_joined, text))
    text = _CURRENCY.sub("", _LAYOUT.sub(" ", text))
    text = _SPACES.sub(" ", text).replace("\n", " ").strip()
    text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    for pattern, sign in _WORD_SIGNS:
        text = pattern.sub(sign, text)
    text = _INDEX.sub(r"_{\1}", _POWER.sub(r"^{\1}", text))
    text = _PERCENT.sub(r"\\%", text)
    text = _TEMPERATURE.sub(r"\\text{°\1}", _DEGREES_OF.sub(r"\1(\\frac{\2 \\pi}{180})", text))
    text = _BUILDER.sub(r"\2", _DEGREES.sub("", text).strip())
    text = _LABEL.sub("", _ROUGHLY.sub("", _FOR_ALL.sub("", text)))
    return _listed(text).rstrip(" .,;:").lstrip(" ,;:")


def _listed(text: str) -> str:
    """Return the answer with a comma for each "and" and "or"; "or" between inequalities is a semicolon."""
    if _LOGICAL.search(text) and all(map(_RELATION.search, _LOGICAL.split(text)[::2])):
        text = _LOGICAL.sub(lambda match: " or " if match[1] in ("lor", "vee") else " and ", text)
    if INEQUALITY.search(text):
        text = _OR.sub(" ; ", text)
    return _ALTERNATIVES.sub(" , ", text)


def _row(match: re.Match[str]) -> str:
    """Return the lines of an environment as one: a calculation, or a list."""
    lines = [line.strip() for line in (match[2] or match[4]).replace("&", "").split("\\\\")]
    return re.sub(r"\s*,?\s*,\s*=", " =", " , ".join(line.rstrip(",. ") for line in lines if line))


def _without_style(text: str) -> str:
    """Return a formula without the commands around all of it. Words keep theirs."""
    while (whole := _STYLED.fullmatch(text.strip())) is not None and re.search(r"\d|\\", whole[1]):
        depths = itertools.accumulate((sign == "{") - (sign == "}") for sign in whole[1])
        if min(depths) < 0:
            break
        text = whole[1]
    return text


def _power_of_ten(match: re.Match[str]) -> str:
    power = rf" \times 10^{{{_ZEROS[match[2].lower()]}}} "
    return power if match[1] is None or match[3] else power + match[1]


def _without_unit(text: str, letter_unit: str) -> tuple[str, str]:
    """Return the answer without its unit, and the unit. A unit is words after a number or `\\text{…}`."""
    if letter_unit:
        bare = re.sub(rf"(?<=[\d}}])\s*{re.escape(letter_unit)}\s*$", "", text)
        if bare != text:
            return bare, letter_unit
    match = _UNIT_TEXT.search(text)
    if match is None or not text[: match.start()].strip():
        match = _UNIT_SHORT.search(text) or _UNIT_WORDS.search(text) or _UNIT_CHINESE.search(text)
    if match is not None and _is_unit(match[1]):
        return text[: match.start()].strip(), re.sub(r"[{}\s]+", " ", match[1] + match[2]).strip()
    return text, ""


def _is_unit(words: str) -> bool:
    """Return whether words after a number only say what it counts: neither "or 6" nor "squared"."""
    if re.fullmatch("[\u4e00-\u9fff]{1,4}", words.strip()):
        return not set(words) & _CHINESE_NUMBERS
    latin = re.findall(r"[a-z']+", words.lower())
    if not latin or re.search(r"(?<![\^{-])\d|[,;]", words) or latin[0] in ("squared", "cubed"):
        return words.strip() == "°"
    return not _NO_UNITS & set(latin)


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
