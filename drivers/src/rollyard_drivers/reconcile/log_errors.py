"""Functions that find the line of a program's log that says why the program ended. They are pure."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Final

from rollyard_drivers.reconcile import vllm_version

_ERROR: Final = re.compile(
    r"(?:^|[\s)\]])((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt): \S.*|error: \S.*)$"
)
"""The last line of a traceback, such as `ValueError: …`, after any prefix of a logger, or argparse's `error:
…`."""
_POINTS_ELSEWHERE: Final = (
    "Engine core initialization failed",
    "Frontend process failed during engine core initialization",
    "WorkerProc initialization failed",
)
"""The words of vLLM's own exceptions that say only that another error stands further up in the log. vLLM 0.32
ends with such ones after a process of it has failed."""
_COUNTS: Final = re.compile(r"\d+ validation errors? for ")


def points_elsewhere(line: str) -> bool:
    """Return whether a line says only that the cause stands further up in the log."""
    return any(words in line for words in _POINTS_ELSEWHERE)


def plain_lines(text: str) -> list[str]:
    """Return the lines of a log, with those that hold a record as JSON in the form of a text log."""
    lines: list[str] = []
    for line in text.splitlines():
        record = None
        if line.startswith('{"time": '):
            # Any program may have written the log, with anything in it, such as endless brackets.
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
        if not isinstance(record, dict):
            lines.append(line)
            continue
        lines.append(f"{record.get('level')} {record.get('logger')}: {record.get('message')}")
        lines += str(record.get("exception") or "").splitlines()
    return lines


def telling(text: str) -> str:
    """Return the error that a log ends with, which is the last one that a traceback states.

    The result is empty if there is no such error.
    """
    lines = plain_lines(text)
    for number in range(len(lines) - 1, -1, -1):
        match = _ERROR.search(lines[number].rstrip())
        if match is None or points_elsewhere(match[1]):
            continue
        error = match[1]
        if _COUNTS.search(error) and number + 1 < len(lines):
            # In an error of pydantic, the next line says what is wrong.
            error += " " + " ".join(line.strip() for line in lines[number + 1 : number + 3])
        return vllm_version.with_hint(error)
    return ""


def last_line(text: str) -> str:
    """Return the last line that is not empty, or an empty string if there is none."""
    lines = (line.strip() for line in reversed(plain_lines(text)))
    return next((line for line in lines if line), "")
