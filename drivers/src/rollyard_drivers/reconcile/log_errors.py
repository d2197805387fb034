"""The line of a program's log that says why it ended. Pure."""

from __future__ import annotations

import re

_ERROR = re.compile(r"(?:^|[\s)\]])((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt): \S.*|error: \S.*)$")
"""`ValueError: …` as a traceback ends, after whatever a logger puts before it; argparse's `error: …`."""
_POINTS_ELSEWHERE = ("Engine core initialization failed",)
"""vLLM's own last words, which say no more than that another error stands further up."""
_COUNTS = re.compile(r"\d+ validation errors? for ")


def points_elsewhere(line: str) -> bool:
    """Whether a line says no more than that the cause stands further up."""
    return any(words in line for words in _POINTS_ELSEWHERE)


def telling(text: str) -> str:
    """The error that a log ends with: the last one that a traceback states; empty if there is none."""
    lines = text.splitlines()
    for number in range(len(lines) - 1, -1, -1):
        match = _ERROR.search(lines[number].rstrip())
        if match is None or points_elsewhere(match[1]):
            continue
        found = match[1]
        if _COUNTS.search(found) and number + 1 < len(lines):
            # pydantic: the next line says what is wrong.
            found += " " + " ".join(line.strip() for line in lines[number + 1 : number + 3])
        return found
    return ""


def last_line(text: str) -> str:
    """The last line that is not empty."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line), "")
