"""The handler `stem`: multiple choice, numbers with tolerance and unit, and exact answers.

Quantities are the numbers of a text, each with the unit that follows it.
"""

from __future__ import annotations

import itertools
import math
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from rollyard_crds.fields.signals import SHIPPED
from rollyard_crds.task import NumericAnswer, Task

from rollyard_pipeline.errors import TaskInvalid, WorkerError
from rollyard_pipeline.handlers.answers import boxed, final_answer
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.markup import folded, unmarked
from rollyard_pipeline.handlers.tables import pairs
from rollyard_pipeline.handlers.units import Unit, leading_unit, symbols, unit

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
_QUANTITY_ROUNDING: Final = 0.1
"""The share of a value by which rounding may change it within a chain of equations."""
_MAX_NUMBERS: Final = 8
_MAX_DEPTH: Final = 4
_PLAIN: Final = Unit(1.0, frozenset())


_STATED: Final = re.compile(
    r"(?:(?i:\banswer(?:\s+(?:choice|option|letter))?|\b(?:correct|right|best|final|chosen)\s+(?:choice|option|letter))"
    r"\s*+(?i:is|are|:|=|would\s+be|must\s+be|should\s+be)"
    r"|(?i:\bI(?:\s+would|['’]d)?\s+(?:choose|pick|select|go\s+with|say))"
    r"|答案|正确选项|正確選項|(?<![不别別])(?<!不[应應])[应應该該故我以此][选選])"
    r"(?:\s|[:=\"“「是为為应應选選择擇项項]|(?i:the|correct|best|choice|option|letter|answer|clearly|thus|therefore)\b)*+"
    r"(?:[(\[]\s?([A-Za-z])\s?[)\]]|([A-Z])(?![\w'’])|([a-z])(?=[):]| ?[.。]? ?(?:\n|$)))"
)
"""A letter that is stated as the answer: "the answer is (B)", "Answer: C", "I choose D", "答案：B"."""
_ALONE: Final = re.compile(r"[\s(\[\"“「]*+([A-Za-z])[\s)\].:,;\"”」。]*+")
_LABELLED: Final = re.compile(r"[\s(\[]*+([A-Z])(?:[)\].:,]++\s*+|\s++)(\S.*)", re.DOTALL)
_INTRODUCED: Final = re.compile(
    r"(?:(?:so|thus|hence|therefore|is|the|correct|best|right|answer|option|choice|letter)\b[\s,:]*+)++",
    re.IGNORECASE,
)
_IS_RIGHT: Final = re.compile(
    r"\s+is\s+(?:(?:the\s+)?(?:correct|right|best)(?:\s+(?:answer|choice|option|one))?|the\s+answer)[\s.!]*+$",
    re.IGNORECASE,
)
_LABEL_BEHIND: Final = re.compile(r"(.*\S)\s*+\((?:(?i:answer|option|choice)\s)?([A-Z])\)[\s.]*+")
_ARTICLE: Final = re.compile(
    r"A\s(?!(?:a[snt]|and|although|based|because|but|by|due|followed|for|from|given|hence|here|if|in|is|not|only"
    r"|or|per|rather|since|so|though|thus|via|when|where|which|while|with)\b)[a-z]"
)
"""An A that begins the words of an answer."""
_ANOTHER: Final = re.compile(
    r"\s*+(?:[,/;&|+、或和与-]\s*+)?(?:\(?(?:or|and|also|maybe|perhaps|possibly|even|option|choice)\b\s*+)*+"
    r"\(?([A-Z])(?![\w'’])"
)
"""A second letter after the first one, which says that none was chosen."""
_OR: Final = re.compile(r"[\s)]*+(?:[/&,]|(?:or|and)\b|[或和])")
_DENIED: Final = re.compile(
    r"[)\s]*+(?:(?i:(?:is|was)(?:\s+not|n['’]t|\s+wrong|\s+incorrect|\s+false))\b|是?[错錯不])"
)
"""What says that the letter before it is not the answer."""
_BOX: Final = re.compile(r"(?=\\(?:boxed|fbox)\s*+\{)")
_SENTENCE_END: Final = re.compile(r"[.!?。](?!\w)")
_MAX_BOXES: Final = 8
_PARTIAL: Final = re.compile(
    r"(?:[-−+\d]|(?:_\{|[\^/±≤≥≠]|\\(?:pm|mp|neq?|[lg]e(?:q|qslant)?|[lg]t|sqrt|ln|log|exp|a?r?c?(?:sin|cos|tan))"
    r"|\S\s[<>]|\b(?:not|than|at least|at most|half of|twice))[\s{$(]*+)\Z"
)
"""What says, right before a box, that a number in it is not all of the value."""
_MAX_BEFORE: Final = 24  # Characters.
_MAX_BEHIND: Final = 200  # Characters.
_MAX_SHOWN: Final = 200  # Characters.
_ANSWER_SHOWN: Final = 500  # Characters, from the end of an answer.
_ROUNDING: Final = 1e-9
"""The share of a number by which conversions between units may change it."""


class StemHandler(Handler):
    """Returns reward 1.0 for the right answer, else 0.0.

    The answer comes from `submit` or from the last assistant message. With `task.choices` it is a letter;
    with `task.numeric` a number, whose unit is converted to the task's; else a text that must be equal except
    for mark-up, spaces and the case of words. Where the task has `answers`, it must be one of them. Nothing
    is guessed: an answer without a letter or a number, or with several, scores 0.
    """

    needs_sandbox = False
    reward_range = SHIPPED["stem"].reward
    components = SHIPPED["stem"].components

    def check(self, task: Task) -> list[str]:
        """Return the problems of the answer, which must be a letter of the choices or a number."""
        golds = task.accepted_answers()
        if not golds:
            return ["answer: required by the handler 'stem'"]
        if len(task.choices) == 1:
            return ["choices: must be at least two"]
        if task.choices and task.numeric is not None:
            return ["numeric: cannot be given beside 'choices'"]
        wanted_unit = None if task.numeric is None else _unit_of(task.numeric)
        if task.numeric is not None and wanted_unit is None:
            return [f"numeric.unit: is not known: {task.numeric.unit!r}"]
        for number, gold in enumerate(golds):
            problem = _key_problem(gold, task, wanted_unit)
            if problem:
                return [f"answer: {problem}" if task.answers is None else f"answers[{number}]: {problem}"]
        return []

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return a score of 1.0 if the answer is the task's, else 0.0."""
        problems = self.check(ctx.task)
        if problems:
            raise TaskInvalid(f"task '{ctx.task.id}': {problems[0]}")
        golds, text = ctx.task.accepted_answers(), _within_mark(ctx.final_text)
        shown, expected = ctx.final_text.strip()[-_ANSWER_SHOWN:] or "none", "\nexpected: ".join(golds)
        ctx.show(f"compared answer: {shown}\nexpected: {expected}")
        if ctx.task.choices:
            return _by_letter(ctx, text, golds)
        if ctx.task.numeric is not None:
            return _by_number(ctx, text, golds, ctx.task.numeric)
        texts = [folded(answer.text) for answer in _answers(text)]
        ctx.show(f"read: {', '.join(texts)[:_MAX_SHOWN] or 'nothing'}")
        return _scored(any(texts), any(set(texts) == {folded(final_answer(gold))} for gold in golds))


def _key_problem(gold: str, task: Task, wanted_unit: Unit | None) -> str:
    """Return what is wrong with an accepted answer, or "" if it can be compared."""
    if task.choices:
        last = string.ascii_uppercase[len(task.choices) - 1]
        return "" if letter(gold, task.choices) else f"must be one of the letters A to {last}"
    if wanted_unit is None:
        return "" if folded(final_answer(gold)) else "must be more than punctuation"
    number = _key(gold, wanted_unit)
    return "" if number is not None else "must be one number, in the unit that 'numeric.unit' names"


def _scored(answered: bool, right: bool) -> Evaluation:
    return Evaluation(1.0 if answered and right else 0.0, {"answered": float(answered)})


def _within_mark(text: str) -> str:
    """Return what a text has in the mark `<answer>` at its end, else all of it."""
    begun, closing, rest = text.rpartition("</answer>")
    before, opening, within = begun.rpartition("<answer>")
    alone = opening and not rest.strip() and not before.rstrip().endswith("</answer>")
    return within.strip() if closing and alone else text


class _Answer(NamedTuple):
    text: str
    before: str = ""
    """What comes before its box, and after it in its line."""
    rest: str = ""


def _answers(text: str) -> list[_Answer]:
    """Return the content of the last box and of those before it in its line, else what ends the text.

    Two answers side by side are a hedge. A box in an earlier line is a step, or was taken back.
    """
    content = boxed(text)
    if content is None:
        return [_Answer(final_answer(text))]
    answers: list[_Answer] = []
    parts = _BOX.split(text)[-_MAX_BOXES - 1 :]
    for before, part in reversed(list(itertools.pairwise(parts))):
        box = boxed(part)
        if answers and "\n" in part:
            break
        if box is not None:
            end = part.index("{") + len(box) + 2
            rest = part[end : end + _MAX_BEHIND].partition("\n")[0]
            answers.append(_Answer(box, before[-_MAX_BEFORE:], rest))
    return answers or [_Answer(content)]


def _by_letter(ctx: StageContext, text: str, golds: Sequence[str]) -> Evaluation:
    answers = [_Answer(text)] if boxed(text) is None else _answers(text)
    chosen = {letter(answer.text, ctx.task.choices) for answer in answers}
    read = chosen.pop() if len(chosen) == 1 else None
    if read is not None and any(_hedged(read, answer.rest, ctx.task.choices) for answer in answers):
        read = None
    ctx.show(f"read: {read or 'no single letter'}")
    right = {letter(gold, ctx.task.choices) for gold in golds}
    return _scored(read is not None, read in right)


def _hedged(chosen: str, rest: str, choices: Sequence[str]) -> bool:
    """Return whether what follows a box takes back the letter in it, or names another one as well."""
    rest = unmarked(rest)
    another = _ANOTHER.match(rest) if _OR.match(rest) else None
    named = another is not None and _permitted(another[1], choices) not in (None, chosen)
    return named or _DENIED.match(rest) is not None


def letter(text: str, choices: Sequence[str]) -> str | None:
    """Return the letter that a text chooses, or None if it chooses none or several.

    The choice is the last one that is stated as the answer, or else the whole last line. The text of exactly
    one choice stands for its letter.
    """
    text = unmarked(text)
    stated = list(_STATED.finditer(text))
    if not stated:
        lines = text.splitlines()
        return _whole(lines[-1], choices) if lines else None
    last = stated[-1]
    line = text[last.start(last.lastindex or 0) :].partition("\n")[0]
    rest = text[last.end() :].partition("\n")[0]
    named = _named(line, choices)
    chosen = _permitted(line[0], choices)
    if named is not None and (chosen is None or folded(rest)):
        return named
    return chosen if chosen is not None and _agrees(chosen, line, rest, choices) else None


def _agrees(chosen: str, line: str, rest: str, choices: Sequence[str]) -> bool:
    """Return whether the rest of a line neither names another letter nor is the text of another choice.

    Args:
        chosen: The letter that is stated.
        line: What is said from the letter on.
        rest: What is said after the letter and its parentheses.
        choices: The texts of the choices.
    """
    words = folded(re.sub(r"^[)\].:\s]+", "", rest))
    own = folded(choices[ord(chosen) - ord("A")])
    if own and words.startswith(own):
        return True
    if _ARTICLE.match(line) or _DENIED.match(rest):
        return False
    another = _ANOTHER.match(rest)
    if another is not None and _permitted(another[1], choices) not in (None, chosen):
        return False
    return words not in map(folded, choices)


def _whole(line: str, choices: Sequence[str]) -> str | None:
    """Return the letter that a line consists of, maybe with the text of its choice."""
    introduced = _INTRODUCED.match(line)
    rest = line if introduced is None else line[introduced.end() :]
    named = _named(line, choices) or _named(rest, choices)
    if named is not None:
        return named
    line = _IS_RIGHT.sub("", rest)
    alone = _ALONE.fullmatch(line)
    if alone is not None:
        return _permitted(alone[1], choices)
    labelled = _LABELLED.fullmatch(line)
    if labelled is not None:
        chosen = _permitted(labelled[1], choices)
        # "B. It depends on C" is only a choice if the words are those of B.
        if chosen is not None and folded(choices[ord(chosen) - ord("A")]) == folded(labelled[2]):
            return chosen
    behind = _LABEL_BEHIND.fullmatch(line)
    return behind[2] if behind is not None and _named(behind[1], choices) == behind[2] else None


def _named(text: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the only choice that has this text."""
    same = [index for index, choice in enumerate(choices) if folded(choice) == folded(text)]
    return string.ascii_uppercase[same[0]] if len(same) == 1 else None


def _permitted(name: str, choices: Sequence[str]) -> str | None:
    name = name.upper()
    return name if name in string.ascii_uppercase[: len(choices)] else None


def _by_number(ctx: StageContext, text: str, golds: Sequence[str], rule: NumericAnswer) -> Evaluation:
    target = _unit_of(rule)
    assert target is not None  # The task has been checked.
    keys = [key for gold in golds if (key := _key(gold, target)) is not None]
    read = [_values(answer) for answer in _answers(text)]
    # More than one value is an answer only if each of them is right, as in 450 K (177 °C).
    stated = [quantity for quantities_read in read for quantity in quantities_read] if all(read) else []
    values = [quantity.value_in(target) for quantity in stated]
    ctx.show(f"read: {_shown(stated, values, rule.unit)}")
    right = False
    for key in keys:
        permitted = max(rule.absolute, rule.relative * abs(key))
        ctx.show(f"right: {key:.12g} ± {permitted:.6g} {rule.unit}".rstrip())
        right = right or all(value is not None and _close(value, key, permitted) for value in values)
    return _scored(bool(values) and None not in values, right)


def _values(answer: _Answer) -> list[Quantity]:
    """Return the quantities of an answer, with the unit and the alternative that follow its box."""
    values = [] if _PARTIAL.search(answer.before) else quantities(answer.text)
    rest, _, alternative = _SENTENCE_END.split(answer.rest, maxsplit=1)[0].partition(" or ")
    whole = with_unit_behind(values[-1], rest) if values else None
    further = quantities(alternative)
    unread = not further and re.search(r"\d", alternative)
    return [] if whole is None or unread else [*values[:-1], whole, *further]


def _shown(stated: list[Quantity], values: list[float | None], name: str) -> str:
    texts = [
        f"{quantity.written} (not in the unit of the answer)"
        if value is None
        else f"{value:.12g} {name}".rstrip()
        for quantity, value in zip(stated, values, strict=True)
    ]
    return ", ".join(texts) or "no value, or several"


def _unit_of(rule: NumericAnswer) -> Unit | None:
    return unit(unmarked(rule.unit))


def _key(gold: str, target: Unit) -> float | None:
    values = quantities(final_answer(gold))
    return values[0].value_in(target) if len(values) == 1 else None


def _close(value: float, key: float, permitted: float) -> bool:
    return abs(value - key) <= permitted + _ROUNDING * max(abs(value), abs(key))


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
    return value is not None and abs(value - last.value) > _QUANTITY_ROUNDING * max(
        abs(value), abs(last.value)
    )


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
