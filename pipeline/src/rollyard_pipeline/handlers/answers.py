"""Extraction of the final answer from a text. The verifier decides what the answer is worth."""

from __future__ import annotations

import re
from typing import Final

_BOXED: Final = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HASHES: Final = re.compile(r"^.*####\s*+(.+)$", re.MULTILINE)
_ANSWER_IS: Final = re.compile(r"^.*answer\s*+(?:is|:|=)\s*+:?+\s*+(.+)$", re.IGNORECASE | re.MULTILINE)
_THOUSANDS: Final = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:,|\{,\}|\\,|,\\!)\d{3})+)(?![\d,])")
_HOPE: Final = re.compile(r"(?:[.,]|(?<!\s))\s*+I hope it is correct\.?\s*$", re.IGNORECASE)
"""The end of an answer in the form that Minerva's prompts ask for."""
_INLINE: Final = re.compile(r"\\[(\[](.*?)\\[)\]]\.?", re.DOTALL)
_LAST_LINE: Final = 4096  # Characters. No answer is longer than this.


def final_answer(text: str) -> str:
    r"""Return the answer with which `text` ends.

    The answer is the first of these that exists: the last `\boxed{…}`, what follows the last `####`, what
    follows the last "answer is", or the last line. Thousands separators, a leading currency sign and a final
    full stop are removed.
    """
    answer = boxed(text)
    if answer is None:
        hashes = _HASHES.findall(text)
        if hashes:
            answer = hashes[-1]
    if answer is None:
        stated = _ANSWER_IS.findall(text)
        if stated:
            answer = stated[-1]
    if answer is None:
        lines = text.strip().splitlines()
        answer = lines[-1] if lines else ""
    return _plain(answer[:_LAST_LINE])


_OPENINGS: Final = 64
"""The number of boxes, from the end of the text, that are looked at."""


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` whose braces balance."""
    # A text of nothing but openings would otherwise be scanned once for each of them.
    for match in reversed(list(_BOXED.finditer(text))[-_OPENINGS:]):
        end = closing_brace(text, match.end())
        if end is not None:
            return text[match.end() : end]
    return None


def closing_brace(text: str, start: int) -> int | None:
    """Return the place of the brace that closes the group which begins at `start`, or None."""
    depth = 1
    for index in range(start, min(len(text), start + _LAST_LINE)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    return None


def _plain(answer: str) -> str:
    answer = _HOPE.sub("", answer).strip().strip("*`").strip()
    inline = _INLINE.fullmatch(answer)
    if inline is not None:
        answer = inline[1].strip()
    if answer.startswith("$") and answer.endswith("$") and len(answer) > 1:
        answer = answer[1:-1].strip()
    answer = answer.removeprefix("\\$").removeprefix("$").strip()
    answer = answer.rstrip(".。").strip().strip("*`$").strip()
    return _THOUSANDS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), answer)
