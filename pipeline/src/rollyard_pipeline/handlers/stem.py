"""The handler `stem`: multiple choice, numbers with tolerance and unit, and exact answers."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Sequence
from typing import Final, NamedTuple

from rollyard_crds.fields.signals import SHIPPED
from rollyard_crds.task import NumericAnswer, Task

from rollyard_pipeline.errors import TaskInvalid
from rollyard_pipeline.handlers.answers import boxed, final_answer
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.markup import folded, unmarked
from rollyard_pipeline.handlers.quantities import Quantity, quantities, with_unit_behind
from rollyard_pipeline.handlers.units import Unit, unit

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
