"""The handler `stem`: multiple choice, numbers with tolerance and unit, and exact answers."""

from __future__ import annotations

import math
import re
import string
import unicodedata
from typing import Final

from rollyard_crds.fields.signals import SHIPPED
from rollyard_crds.task import NumericAnswer, Task

from rollyard_pipeline.errors import TaskInvalid
from rollyard_pipeline.handlers.answers import boxed, comparison, final_answer
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.units import unit

_STATED: Final = re.compile(
    r"\b(?i:answer(?:\s+(?:choice|option|letter))?\s*(?:is|:|=)\s*:?\s*(?:choice|option)?)[\s*_$`\[{]*"
    r"(?:\\text\{)?(?:\(?([A-Z])(?![\w'’])|\(([a-z])\))",
)
"""A letter that is stated as the answer: "the answer is (B)", "Answer: **C**", "answer choice: d"."""
_ALONE: Final = re.compile(r"[\s*_$`(\[]*([A-Za-z])[\s*_$`)\].:]*")
_LABELLED: Final = re.compile(r"[\s*_$`(\[]*([A-Z])[*_$`)\].:]+\s*(\S.*)", re.DOTALL)
_NUMBER: Final = re.compile(
    r"\s*(?:[A-Za-z_\\]{1,20}\s*(?:=|≈|\\approx)\s*)?([+-]?(?:\d+\.?\d*|\.\d+))"
    r"(?:\s*(?:[eE]\s*|(?:\\times|×|\*|x)\s*10\s*\^?\s*)\{?\s*([+-]?\d{1,4})\s*\}?)?(.*)",
    re.DOTALL,
)
_TAIL: Final = 4096  # Characters. No stated answer is farther from the end.


class StemHandler(Handler):
    """Returns reward 1.0 for the right answer, else 0.0.

    The answer comes from `submit` or from the last assistant message. With `task.choices` it is a letter;
    with `task.numeric` a number, whose unit is converted to the task's; else a text that must be equal but
    for case and spaces. Nothing is guessed: an answer without a letter or a number scores 0.
    """

    needs_sandbox = False
    reward_range = SHIPPED["stem"].reward
    components = SHIPPED["stem"].components

    def check(self, task: Task) -> list[str]:
        """Return the problems of the answer, which must be a letter of the choices or a number."""
        if not task.answer or not task.answer.strip():
            return ["answer: required by the handler 'stem'"]
        if len(task.choices) == 1:
            return ["choices: must be at least two"]
        if task.choices and task.numeric is not None:
            return ["numeric: cannot be given beside 'choices'"]
        if task.choices and letter(task.answer, task.choices) is None:
            return [
                f"answer: must be one of the letters A to {string.ascii_uppercase[len(task.choices) - 1]}"
            ]
        if task.numeric is not None and unit(task.numeric.unit) is None:
            return [f"numeric.unit: is not known: {task.numeric.unit!r}"]
        if task.numeric is not None and number(task.answer, task.numeric.unit) is None:
            return ["answer: must be a number, in the unit that 'numeric.unit' names"]
        return []

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return a score of 1.0 if the answer is the task's, else 0.0."""
        problems = self.check(ctx.task)
        if problems:
            raise TaskInvalid(f"task '{ctx.task.id}': {problems[0]}")
        gold, said = ctx.task.answer or "", ctx.final_text
        ctx.show(comparison(said.strip(), gold))
        if ctx.task.choices:
            chosen = letter(said, ctx.task.choices)
            return _scored(chosen is not None, chosen == letter(gold, ctx.task.choices))
        if ctx.task.numeric is not None:
            given = number(final_answer(said), ctx.task.numeric.unit)
            wanted = number(gold, ctx.task.numeric.unit)
            return _scored(given is not None, _close(given, wanted, ctx.task.numeric))
        answer = final_answer(said)
        return _scored(bool(answer), _folded(answer) == _folded(final_answer(gold)))


def _scored(answered: bool, right: bool) -> Evaluation:
    return Evaluation(1.0 if answered and right else 0.0, {"answered": float(answered)})


def letter(text: str, choices: list[str]) -> str | None:
    r"""Return the letter that a text chooses, or None if it chooses none.

    The choice is the first of these that exists: the last `\boxed{…}`, what is stated last as the answer, or
    the whole last line. The text of exactly one choice stands for its letter.
    """
    content = boxed(text)
    if content is not None:
        return _letter_of(content, choices)
    stated = _STATED.findall(text[-_TAIL:])
    if stated:
        return _permitted("".join(stated[-1]), choices)
    lines = text.strip().splitlines()
    return _letter_of(lines[-1], choices) if lines else None


def _letter_of(text: str, choices: list[str]) -> str | None:
    text = re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", text[:_TAIL])
    same = [place for place, choice in enumerate(choices) if _folded(choice) == _folded(text)]
    alone = _ALONE.fullmatch(text)
    if alone is not None:
        return _permitted(alone[1], choices)
    if len(same) == 1:
        return string.ascii_uppercase[same[0]]
    labelled = _LABELLED.fullmatch(text)
    if labelled is not None:
        found = _permitted(labelled[1], choices)
        # "B. It depends on C" is only a choice if the words are those of B.
        if found is not None and _folded(choices[ord(found) - ord("A")]) == _folded(labelled[2]):
            return found
    return None


def _permitted(found: str, choices: list[str]) -> str | None:
    found = found.upper()
    return found if found in string.ascii_uppercase[: len(choices)] else None


def _folded(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text[:_TAIL]).casefold()
    return " ".join(folded.strip().strip(".;").split())


def number(text: str, wanted: str) -> float | None:
    """Return the number with which a text begins, in the wanted unit, or None if it has none.

    A number without a unit is in the wanted one. One in a unit of another kind is none.
    """
    match = _NUMBER.fullmatch(text[:_TAIL])
    if match is None:
        return None
    value = float(match[1]) * 10.0 ** int(match[2] or 0) if abs(int(match[2] or 0)) <= 300 else math.nan
    rest = match[3].strip().strip("$.")
    if rest:
        given, target = unit(rest), unit(wanted)
        if given is None or target is None or given.dimension != target.dimension:
            return None
        value *= given.factor / target.factor
    return value if math.isfinite(value) else None


def _close(given: float | None, wanted: float | None, rule: NumericAnswer) -> bool:
    if given is None or wanted is None:
        return False
    return abs(given - wanted) <= max(rule.absolute, rule.relative * abs(wanted))
