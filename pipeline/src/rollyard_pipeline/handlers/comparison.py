"""The comparison of a text with an expected answer, which the verifier's child process makes.

What the text states is compared as text, as a numeral of another base, and by what latex2sympy reads.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Final

import sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from latex2sympy2_extended.sets import FiniteSet
from math_verify.parser import parse_latex_cached

from rollyard_pipeline.handlers.equality import PERCENT, equal, satisfied
from rollyard_pipeline.handlers.spelling import INEQUALITY, Spelling, spellings
from rollyard_pipeline.handlers.statements import Statement, expected, statements
from rollyard_pipeline.handlers.tables import pairs
from rollyard_pipeline.handlers.units import symbols, unit

# Units are removed in `spelling`: math-verify takes letters such as t, h and m for units, too.
_NORMALIZATION: Final = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_SHOWN: Final = 300
"""The number of characters of an answer, from its end, that people are shown."""

_TEXT: Final = re.compile(r"\\(?:text(?:rm|bf|it|normal|sf)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_BLANKS: Final = re.compile(r"(?<!\\)\\[ ,;:!]|~|\\(?:display|text)style(?![A-Za-z])")
_LOOSE: Final = re.compile(r"(?<![\w,])\s+|(?<!,)\s+(?!\w)")
"""Spaces that stand neither between letters and digits nor after a comma."""
_WORDS: Final = re.compile(r"[^\W\d_]+(?:[ ',.\-]+[^\W\d_]+)*")
_WORD: Final = re.compile(r"(?<![A-Za-z\\{])[A-Za-z]{3,}(?![A-Za-z}])")
_CHOICE: Final = re.compile(r"\(?([A-Z])\)?")
_CHOICES: Final = re.compile(r"\(?[A-Z]\)?(?:(?:\s*,\s*(?:and\s+)?|\s+and\s+)\(?[A-Z]\)?)+")
_OTHER_CHOICE: Final = re.compile(
    r"\([A-Za-z]\)|(?<![A-Za-z])[A-Z](?:[.):,]|\s*$)|(?<![A-Za-z])(?:and|or|not)(?![A-Za-z])"
)
_CHOSEN: Final = re.compile(r"\(([A-Za-z])\)(?![\w(])|([A-Z])[.):](?=\s|$)|([A-Z])$")
_BASES: Final = {
    word: int(base)
    for word, base in pairs("two=2 three=3 four=4 five=5 six=6 seven=7 eight=8 nine=9 ten=10").items()
}
_BASE: Final = re.compile(
    rf"\(?((?=[A-Za-z]*\d)[0-9A-Za-z]+)\)?_\{{?\(?(?:\\text\{{)?(\d+|{'|'.join(_BASES)})\}}?\)?\}}?"
)
_MONEY: Final = {"$": "dollar", "euros": "euro", "€": "euro", "¥": "yen", "rupee": "₹", "rupees": "₹"}
_CURRENCIES: Final = frozenset({"dollar", "cent", "euro", "yen", "yuan", "₹", "₽", "₩"})
_TIME: Final = re.compile(r"0?(\d{1,2}):(\d\d)(?::(\d\d))?\s*([ap])?\.?m?\.?", re.IGNORECASE)
_SEPARATOR: Final = re.compile(r"[,;](?![^(\[{]*[)\]}])")
"""A comma or semicolon outside of brackets."""
_MOST_PARTS: Final = 64
_LETTER: Final = re.compile(r"\\(?:begin|end|mathbb|text)\s*\{[^{}]*\}|\\[A-Za-z]+|([A-Za-z])")
_NAMES: Final = "wqrskvujlgt"
"""Letters that stand for upper-case ones."""


_NUMBER: Final = re.compile(
    r"(?P<sign>[-+]?)\s*(?:(?P<infinity>\\infty)|(?P<decimal>\d*\.\d+)|(?P<top>\d+)(?:\s*/\s*(?P<bottom>\d+))?"
    r"|\\frac\s*\{(?P<above>\d+)\}\s*\{(?P<below>\d+)\})"
)
_LONGEST_NUMBER: Final = 4000  # Digits. Python converts no longer ones.
_LIST: Final = re.compile(r"(?P<left>\\\{|[(\[]?)(?P<parts>[^()\[\]]*?)(?P<right>\\\}|[)\]]?)")


@dataclass(frozen=True)
class _Read:
    """One reading of an answer: its spelling and what latex2sympy makes of it."""

    spelling: Spelling
    value: Any


def compare(gold: str, text: str) -> tuple[bool | None, str]:
    """Return whether the answer of `text` is equal to the expected one, and how both were read.

    Instead of the first, it returns None if the expected answer is neither words nor a formula that can be
    read, and then the expected answer.
    """
    statement, answers = expected(gold), statements(text)
    key = statement.text
    readable = statement.words or _is_words(key) or _is_prose(key) or bool(_reads(key, is_key=True))
    if not readable and not any(_same_text(key, answer.text) for answer in answers):
        return None, _cut(key)
    if not answers:
        return False, f"There is no answer.\nexpected: {_cut(key)}"
    why = f"compared answer: {_cut(answers[0].text)} ({answers[0].where})\nexpected: {_cut(key)}"
    for answer in answers:
        how = _stated_how(statement, answer)
        if how is not None:
            shown = f"{_cut(answer.text)} ({answer.where})"
            return True, f"compared answer: {shown}\nexpected: {_cut(key)}\nequal{how}"
    unread = "" if _is_words(key) or _reads(answers[0].text) else ": the answer cannot be read as a formula"
    return False, f"{why}\ndifferent{unread}"


def _stated_how(statement: Statement, answer: Statement) -> str | None:
    """Return how two statements are equal, as `_equal_how` does. Words are equal to the same words only."""
    key, texts = statement.text, (answer.text, answer.whole)
    if not statement.words and not answer.words:
        return _equal_how(key, answer.text)
    if statement.words or _is_words(key):
        words = _as_words(key, folded=True)
        return " as text" if any(_as_words(text, folded=True) == words for text in texts) else None
    return " by their letter" if _same_choice(key, answer.text) else None


def _cut(text: str) -> str:
    return text[-_SHOWN:]


def _equal_how(key: str, answer: str) -> str | None:
    """Return how two answers are equal, as the end of a sentence, or None if they are not."""
    if _same_text(key, answer):
        return " as text"
    if _same_choice(key, answer):
        return " by their letter"
    key_numeral, numeral = _numeral(key), _numeral(answer)
    if key_numeral is not None and numeral is not None:
        return " as numerals" if key_numeral == numeral and numeral[1] is not None else None
    if numeral is not None:  # The expected answer names no base.
        answer = "" if numeral[1] is None else str(numeral[1])
    times = [_TIME.fullmatch(_bare(each)) for each in (key, answer)]
    if all(times):
        return " as numerals" if len({match.groups() for match in times if match}) == 1 else None
    if times[0] is not None and ":" in key:
        return None
    if _is_words(key) and not _may_be_product(key):
        return None
    return _equal_by_value(key, answer)


def _equal_by_value(key: str, answer: str) -> str | None:
    for gold in _reads(key, is_key=True):
        for read in _reads(answer, _letter(gold.spelling.unit)):
            if not _units_differ(gold.spelling.unit, read.spelling.unit) and _reads_equal(gold, read):
                how = read.spelling.how or gold.spelling.how
                return f": read {how}" if how else ""
    return None


def _reads_equal(gold: _Read, answer: _Read) -> bool:
    try:
        return equal(*_values_with_case(gold, answer))
    except RecursionError:  # This is how sympy walks through deep formulas.
        return False


def _values_with_case(gold: _Read, answer: _Read) -> tuple[Any, Any]:
    """Return both values. Where both x and X are variables, X gets another name."""
    letters = {
        match[1] for read in (gold, answer) for match in _LETTER.finditer(read.spelling.latex) if match[1]
    }
    free = iter(letter for letter in _NAMES if not {letter, letter.upper()} & letters)
    names = {
        letter: name
        for letter, name in zip(sorted(filter(str.isupper, letters)), free, strict=False)
        if letter.lower() in letters and letter != "E"
    }
    if not names:
        return gold.value, answer.value
    renamed = (
        _parsed(_LETTER.sub(lambda match: names.get(match[1], match[0]), read.spelling.latex))
        for read in (gold, answer)
    )
    first, second = renamed
    return first, second


def _numeral(text: str) -> tuple[int, int | None] | None:
    """Return the base and the value of a numeral such as 101_2, or None. 5_2 is a numeral without a value."""
    match = _BASE.fullmatch(_TEXT.sub(r"\1", _bare(text)))
    if match is None:
        return None
    base = _BASES.get(match[2]) or int(match[2][:4])
    try:
        return base, int(match[1], base)
    except ValueError:
        return (base, None) if match[1].isdigit() else None


def _bare(text: str) -> str:
    return text.strip().strip("$").replace("\\,", "").replace(" ", "").strip(".")


def _same_text(key: str, answer: str) -> bool:
    words = _is_words(key)
    texts = [_as_words(each, words) for each in (key, answer)]
    return bool(texts[0]) and texts[0] == texts[1]


def _as_words(text: str, folded: bool) -> str:
    """Return a text without its commands and what surrounds it, for the comparison as text.

    Args:
        text: An answer.
        folded: Whether the case of letters is left out, too.
    """
    words = _BLANKS.sub(" ", _TEXT.sub(r"\1", text).replace("$", ""))
    words = " ".join(words.split()).strip(' "*`').rstrip(" .,;:")
    bare = words.strip(' .,;:!"*`(){}')
    if len(bare) > 1 and _WORDS.fullmatch(bare) and not _may_be_product(bare):
        words = bare
    return _LOOSE.sub("", words.casefold() if folded else words)


def _is_words(text: str) -> bool:
    """Return whether a text is words, such as "Monday" or `\\text{Yes}`, and not a formula."""
    inside = _TEXT.sub(r"\1", text).strip().strip("$(). ")
    return _WORDS.fullmatch(inside) is not None and (len(inside) > 1 or "\\" in text or "(" in text)


def _is_prose(text: str) -> bool:
    """Return whether words stand in a text, as in "5 feet 3 inches": such a text is not a formula."""
    return _WORD.search(_TEXT.sub(r" \1 ", text)) is not None


def _may_be_product(text: str) -> bool:
    """Return whether a word may be a product of variables: `xy`, and neither `Yes` nor `ABC`."""
    return len(text) <= 3 and text.isalpha() and text.islower()


def _same_choice(key: str, answer: str) -> bool:
    """Compare the letter of multiple choice: C, (C), `\\text{(C)}` or "C) 42" for the key C."""
    texts = [_TEXT.sub(r"\1", _BLANKS.sub(" ", each)).strip(" $.") for each in (key, answer)]
    if all(map(_CHOICES.fullmatch, texts)):
        chosen = [re.findall("[A-Z]", each) for each in texts]
        return sorted(chosen[0]) == sorted(chosen[1])
    gold = _CHOICE.fullmatch(texts[0])
    if gold is None:
        return False
    text = _TEXT.sub(r"\1", _BLANKS.sub(" ", answer)).strip(" $*")
    match = _CHOSEN.match(text)
    if match is None or _OTHER_CHOICE.search(text, match.end()):
        return False
    letter = match[1] or match[2] or match[3]
    return letter == gold[1] or (match[1] is not None and "(" in key and letter.upper() == gold[1])


def _letter(unit: str) -> str:
    return unit if len(unit) == 1 else ""


def _units_differ(gold: str, answer: str) -> bool:
    """Return whether both name a unit that is known, and not the same: 5 cm and 5 km, dollars and cents."""
    known = [_known_unit(each) for each in (gold, answer)]
    return None not in known and known[0] != known[1]


def _known_unit(text: str) -> Any:
    word = text.lower().strip(" .")
    money = _MONEY.get(word) or word.removesuffix("s")
    if money in _CURRENCIES:
        return money
    return unit(symbols(text.replace(".", " "))) if text else None


def _reads(text: str, letter_unit: str = "", *, is_key: bool = False) -> list[_Read]:
    readings = []
    for spelling in spellings(text, letter_unit=letter_unit, is_key=is_key):
        value = _parsed(spelling.latex)
        if value is not None:
            readings.append(_Read(spelling, value))
    return readings


@functools.lru_cache(maxsize=64)
def _parsed(latex: str) -> Any:
    """Return what latex2sympy reads, or None. Numbers and lists of them are read here, because it is slow."""
    quick = _number(latex) if "," not in latex else _numbers(latex)
    if quick is not None:
        return quick
    parts = _SEPARATOR.split(latex)
    if 1 < len(parts) <= _MOST_PARTS and all(map(INEQUALITY.search, parts)):
        solutions = satisfied([_parsed_part(part) for part in parts], all_of_them=";" not in latex)
        if solutions is not None:
            return solutions
    whole = _parsed_part(latex)
    if whole is not None or not 1 < len(parts) <= _MOST_PARTS:
        return whole
    # It cannot read a list in which one part has two values, such as "x = 1, x = 2 \pm \sqrt{3}".
    values = [_parsed_part(part) for part in parts]
    if any(value is None for value in values):
        return None
    return FiniteSet(*(e for v in values for e in (v.args if isinstance(v, FiniteSet) else (v,))))


def _number(latex: str) -> Any:
    match = _NUMBER.fullmatch(latex.strip())
    if match is None or len(latex) > _LONGEST_NUMBER:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if match["infinity"]:
        return sign * sympy.oo
    if match["decimal"]:
        return sign * sympy.Float(match["decimal"])
    bottom = int(match["bottom"] or match["below"] or 1)
    return sign * sympy.Rational(int(match["top"] or match["above"]), bottom) if bottom else None


def _numbers(latex: str) -> Any:
    """Return the tuple, interval or set of a list in which everything is a number."""
    match = _LIST.fullmatch(latex.strip())
    if match is None:
        return None
    parts = [_number(part) for part in match["parts"].split(",")]
    if None in parts or not 1 < len(parts) <= _MOST_PARTS:
        return None
    left, right = match["left"], match["right"]
    if left in ("", "\\{") and right in ("", "\\}") and bool(left) == bool(right):
        return FiniteSet(*parts)
    if left not in ("(", "[") or right not in (")", "]"):
        return None
    if len(parts) == 2 and (left == "[" or right == "]" or parts[0] < parts[1]):
        return sympy.Interval(*parts, left == "(", right == ")")
    return sympy.Tuple(*parts)


def _parsed_part(latex: str) -> Any:
    tries = [latex] if _SEPARATOR.search(latex) else [latex, latex.rpartition("=")[2]]
    for each in tries:
        try:
            return parse_latex_cached(normalize_latex(each, config=_NORMALIZATION))
        except MemoryError:
            raise
        except Exception:  # Its grammar and its conversion raise exceptions of all kinds.
            continue
    if latex.endswith("\\%") and "," not in latex:  # It cannot read a per cent sign after a bracket.
        bare = _parsed_part(latex.removesuffix("\\%").strip())
        return sympy.Mul(bare, PERCENT) if isinstance(bare, sympy.Expr) else None
    if latex.count("\\pm") == 1:
        both = [_parsed_part(tries[-1].replace("\\pm", sign)) for sign in "+-"]
        return None if None in both else FiniteSet(*both)
    return None
