"""Extraction of the final answer from a text. The verifier decides what the answer is worth."""

from __future__ import annotations

import re
from typing import Final

_BOXED: Final = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HASHES: Final = re.compile(r"^.*####\s*(.+?)\s*$", re.MULTILINE)
_ANSWER_IS: Final = re.compile(r"answer\s*(?:is|:|=)\s*:?\s*(.+)", re.IGNORECASE)
_THOUSANDS: Final = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:,|\{,\}|\\,|,\\!)\d{3})+)(?![\d,])")
_LAST_LINE: Final = 4096  # Characters. No answer is longer than this.


def final_answer(text: str) -> str:
    r"""Return the answer with which `text` ends.

    The answer is the first of these that exists: the last `\boxed{…}`, what follows the last `####`, what
    follows the last "answer is", or the last line. Thousands separators, a leading currency sign and a final
    full stop are removed.
    """
    # Only what was said counts, not what was thought.
    said = text.rpartition("</think>")[2]
    found = _boxed(said)
    if found is None:
        hashes = _HASHES.findall(said)
        if hashes:
            found = hashes[-1]
    if found is None:
        stated = _ANSWER_IS.findall(said)
        if stated:
            found = stated[-1]
    if found is None:
        lines = said.strip().splitlines()
        found = lines[-1] if lines else ""
    return _plain(found[:_LAST_LINE])


def _boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` whose braces balance."""
    last: str | None = None
    for match in _BOXED.finditer(text):
        depth, start = 1, match.end()
        for place in range(start, min(len(text), start + _LAST_LINE)):
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                last = text[start:place]
                break
    return last


def _plain(answer: str) -> str:
    answer = answer.strip().strip("*`").strip()
    if answer.startswith("$") and answer.endswith("$") and len(answer) > 1:
        answer = answer[1:-1].strip()
    answer = answer.removeprefix("\\$").removeprefix("$").strip()
    answer = answer.rstrip(".。").strip().strip("*`$").strip()
    return _THOUSANDS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), answer)
