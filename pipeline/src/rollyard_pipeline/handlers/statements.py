r"""Where in a text its answer stands.

One place is chosen by its form, never by what stands there: the boxes, else what follows the last `####` or
"answer is", else the last sentence. Of several numbers in a sentence that is no list, the last one that is
stated ("is 5", "= 5", "gives 5") counts; where none is stated, there is no answer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_LAST: Final = 32_768  # Characters. The answer stands at the end.
_LONGEST: Final = 4096  # Characters. No answer is longer than this.
_MOST_BOXES: Final = 64
_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_CLOSE: Final = 10  # Characters between boxes that belong together, as in math-verify.
_NEAR: Final = 70  # The same where a separator stands between them.
_SEPARATOR: Final = re.compile(r"\b(?:and|or)\b|[,;]")

_HASHES: Final = re.compile(r"####[ \t]{0,8}([^#\n][^\n]{0,4096})")
_HASHED_NUMBER: Final = re.compile(r"[-+−$€£\\(\[{]*\.?\d[^A-Za-z\n]*(?:[A-Za-z%°\\][^\n]{0,40})?")
_NUMBERED_HEADING: Final = re.compile(r"\d+[.):]\s")
_ANSWER_IS: Final = re.compile(
    r"\banswers?\b[*_]{0,3}(?:[^\n.:=：]{0,60}?\s(?:is|are)\b|\s{0,4}(?:is|are|[:=：]))[*_]{0,3}\s{0,8}[:：]?[*_]{0,3}"
    r"|答案\s{0,4}(?:是|为|應為|：|:)\s{0,4}[:：]?",
    re.IGNORECASE,
)
_FINAL: Final = re.compile(r"final answer is:?\s{0,4}(?:\$|\\[(\[]|-?\d)", re.IGNORECASE)
_HOPE: Final = re.compile(r"[.,]?\s{0,4}I hope it is correct.{0,2000}", re.IGNORECASE | re.DOTALL)
_TOKEN: Final = re.compile(r"<\|[^|>\n]{1,40}\|>.{0,20}")

_MATH: Final = re.compile(
    r"\$\$(?P<a>(?:[^$\\]|\\.){1,4096})\$\$|(?<!\\)\$(?P<b>(?:[^$\\\n]|\\[^\n]){1,4096})\$"
    r"|\\\((?P<c>.{1,4096}?)\\\)|\\\[(?P<d>.{1,4096}?)\\\]",
    re.DOTALL,
)
_JOINT: Final = re.compile(r"[\s\"']*(?:,?\s*(?:and|or)|[,;])[\s\"']*")
_AFTER_MATH: Final = re.compile(r"\s*(?:\\?%|percent\b|percentage\b|pct\b)", re.IGNORECASE)
_SENTENCE_END: Final = re.compile(r"(?<=[^A-Z\s])[.。!！?？](?=\s|$|\*)|[。！\n]")
_COMMAND: Final = re.compile(
    r"\\text\{[^{}]*\}|\\[A-Za-z]+"
    r"|\b(?:sqrt|sin|cos|tan|log|ln|pi|inf|infinity|and|or|percent|pct)\b"
)
_PROSE: Final = re.compile(
    r"[A-Za-z]{2,}[,;:]?\s+(?:[a-z]+\s+)*[$€£]?[A-Za-z]{2,}|[A-Za-z]{2,}\s?[,;:]?\s+[$€£]?\d"
    r"|[\u4e00-\u9fff]|[A-Za-z]'s\b"
)
_NUMBER: Final = (
    r"(?<![\w.])[-+−]?[$€£]?\d(?:[\d,\u2009\u202f ]*\d)?(?:[.,]\d+)*(?:\s*/\s*\d+)?"
    r"(?:\s*\\?%|\s*(?:percent|pct)\b)?"
)
_NUMBERS: Final = re.compile(rf"{_NUMBER}(?:(?:\s*,\s*(?:and\s+|or\s+)?|\s*\b(?:and|or)\s+){_NUMBER})*")
_REMARK: Final = re.compile(r"[\s,;(\u2013-]*\b(?:not|because|since|as|which|when|where|so|but)\b")
"""The end of an answer: "7, not 8"."""
_STATED: Final = re.compile(
    r"(?:=|:|'s|\b(?:is|are|equals?|equal to|be|was|were|gives?|gets?|got|makes?|yields?|has|have|by|only"
    r"|exactly|approximately|about|total of|pays?|costs?|needs?|earns?)\b)\s*(?:\w+\s+)?$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Statement:
    """An answer as it stands in a text.

    Attributes:
        text: The answer.
        where: Where it stands, for people.
    """

    text: str
    where: str


def statements(text: str) -> list[Statement]:
    r"""Return the answer of a text, or none if there is none.

    There are two only where a text has several boxes: the last box, and the list of the last boxes that stand
    together (`\boxed{2} and \boxed{3}`).
    """
    text = _TOKEN.sub("", text[-_LAST:]).strip()
    boxes = [_stated(box) if _is_prose(box) else box for box in _boxes(text)]
    mark = _last_mark(text)
    if boxes and not (mark is not None and mark.final and mark.place > text.rfind("\\boxed")):
        last = Statement(boxes[-1], "in the last box")
        together = Statement(", ".join(boxes), "in all boxes together")
        return [last] if len(boxes) == 1 else [last, together]
    if mark is not None:
        found = _stated(mark.text, first=True)
        if found:
            return [Statement(found, mark.where)]
    found = _of_sentences(text)
    return [Statement(found, "at the end of the text")] if found else []


def _boxes(text: str) -> list[str]:
    """Return the content of the last box and, before it, of those boxes that stand together with it."""
    found: list[str] = []
    next_start: int | None = None
    openings = list(_BOX.finditer(text))[-_MOST_BOXES:]
    for opening in reversed(openings):
        end = _closing(text, opening.end())
        if end is None:
            continue
        content = text[opening.end() : end].strip()
        if next_start is not None:
            if end > next_start:  # It holds the boxes that were found.
                found, next_start = [_BOX.sub("{", content)], opening.start()
                continue
            between = text[end + 1 : next_start]
            near = len(between) < _NEAR and content != found[0] and _SEPARATOR.search(between)
            if len(between) >= _CLOSE and not near:
                break
        if content and found[:1] != [content]:
            found.insert(0, content)
        next_start = opening.start() if found else None
    if not found and openings:  # The text ended within its box.
        rest = text[openings[-1].end() :].partition("\n")[0].strip()
        return [rest[:_LONGEST]] if rest else []
    return found


def _closing(text: str, start: int) -> int | None:
    """Return the place of the brace that closes a box, or None."""
    depth = 1
    for place in range(start, min(len(text), start + _LONGEST)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place
    return None


@dataclass(frozen=True)
class _Mark:
    """What follows "answer is" or `####`, and whether it says "final answer is" and a formula or number."""

    place: int
    text: str
    where: str
    final: bool


def _last_mark(text: str) -> _Mark | None:
    """Return what follows the last "answer is" or GSM8K's `####`, up to the end of its line.

    `####` also begins a heading of Markdown. It is GSM8K's mark where a number follows.
    """
    marks = [
        _Mark(match.start(), match[1], "after '####'", False)
        for match in _HASHES.finditer(text)
        if _HASHED_NUMBER.fullmatch(match[1].strip()) and not _NUMBERED_HEADING.match(match[1])
    ]
    marks += [
        _Mark(
            match.start(),
            text[match.end() :].lstrip(" \t*_\n\r>"),
            "after 'answer is'",
            _FINAL.match(text, max(0, match.start() - 6)) is not None,
        )
        for match in _ANSWER_IS.finditer(text)
    ]
    if not marks:
        return None
    last = max(marks, key=lambda mark: mark.place)
    found = last.text
    if not found.startswith(("\\[", "$$", "\\begin")):
        found = found.partition("\n")[0]
    return dataclasses.replace(last, text=_HOPE.sub("", found[:_LONGEST]))


def _of_sentences(text: str) -> str:
    """Return what the last sentence of a text states; one without a number ("Well done!") is skipped."""
    text = _HOPE.sub("", text)
    last_line = text.rpartition("\n")[2]
    if not text.endswith(("\\]", "$$")) and not _is_sentence(last_line):
        return plain(last_line)
    for sentence in _sentences_backwards(text[-_LONGEST:]):
        found = _stated(sentence)
        if found and re.search(r"\d|\\", found):
            return found
    return plain(last_line)


def _sentences_backwards(text: str) -> Iterator[str]:
    """Yield the sentences of the last paragraph, the last one first. Formulas are not split."""
    inside = [match.span() for match in _MATH.finditer(text)]
    found = {match.end() for match in _SENTENCE_END.finditer(text)}
    found = {end for end in found if not any(start < end < stop for start, stop in inside)}
    ends = sorted({*found, len(text)})
    starts = [0, *ends[:-1]]
    for start, end in list(zip(starts, ends, strict=True))[-8:][::-1]:
        if text[start:end].strip():
            yield text[start:end].strip()


def _stated(text: str, *, first: bool = False) -> str:
    """Return what one sentence states: all of it if it is no prose, else its formula or its number.

    Args:
        text: The sentence.
        first: Whether it follows "answer is", so that a formula at its beginning is the answer.
    """
    text = text.strip()
    formulas = _formulas(text)
    if first and formulas and not text[: formulas[0][0]].strip(" *_\"'"):
        return formulas[0][1]
    leading = _NUMBERS.match(text) if first else None
    if leading is not None and _REMARK.match(text, leading.end()):
        return leading[0].strip(" ,")
    if not _is_sentence(text):
        return plain(text)
    if first:
        text = next((part for part in reversed(list(_sentences_backwards(text)))), text)
        formulas = _formulas(text)
        if not _is_sentence(text):
            return plain(text)
    masked = _MATH.sub(lambda match: "\x00" * len(match[0]), text)
    number = _stated_number(masked)
    if formulas and (number is None or formulas[-1][0] > number[0]):
        return formulas[-1][1]
    return number[1] if number is not None else plain(text)


def _formulas(text: str) -> list[tuple[int, str]]:
    """Return the formulas of a text with their places; those that "and", "or" or a comma joins are one."""
    found: list[tuple[int, str]] = []
    end = -1
    for match in _MATH.finditer(text):
        content = plain(next(part for part in match.groups() if part is not None))
        percent = _AFTER_MATH.match(text, match.end())
        content += r"\%" if percent is not None and "%" not in content else ""
        if found and _JOINT.fullmatch(text, end, match.start()):
            found[-1] = (found[-1][0], f"{found[-1][1]} , {content}")
        else:
            found.append((match.start(), content))
        end = match.end()
    return found


def _stated_number(text: str) -> tuple[int, str] | None:
    """Return the number of a sentence with its place: the only one, or the last one that is stated."""
    found = [(match.start(), match[0].strip(" ,")) for match in _NUMBERS.finditer(text)]
    if len(found) == 1:
        return found[0]
    said = [each for each in found if _STATED.search(text[: each[0]])]
    return said[-1] if said else None


def _is_prose(text: str) -> bool:
    return _PROSE.search(_COMMAND.sub(" ", text)) is not None


def _is_sentence(text: str) -> bool:
    """Return whether words stand beside a formula or a number."""
    if _is_prose(text):
        return True
    outside = _MATH.sub(" ", text)
    return outside != text and re.search(r"[A-Za-z]{2,}", _COMMAND.sub(" ", outside)) is not None


def plain(text: str) -> str:
    """Return an answer without the signs around it: Markdown, quotes, dollars, the full stop."""
    text = text.strip()
    before = None
    while before != text:
        before = text
        text = text.strip().strip("*`_\"'").strip().rstrip(".。,;").strip()
        if len(text) > 1 and text[0] == text[-1] == "$":
            text = text.strip("$")
        for start, end in (("\\(", "\\)"), ("\\[", "\\]")):
            if text.startswith(start) and text.endswith(end) and text.count(start) == 1:
                text = text[2:-2]
    return text[:_LONGEST]
