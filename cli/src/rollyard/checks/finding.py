"""One line of `rollyard doctor`, and the run of a program within a time limit, on which it may be based."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

Verdict = Literal["ok", "missing", "optional"]
TIMEOUT_SECONDS: Final = 10.0
Runner = Callable[..., tuple[int, str]]
"""A function that runs a command, given word by word, and returns its exit status and its last line.

The status is 127 if there is no such program, and 124 if the program did not end in time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `rollyard doctor`. `optional` means that it is absent and that only some uses need it."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def run(*command: str) -> tuple[int, str]:
    """Run a program for ten seconds at most, and return its exit status and the last line of its output."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return 127, f"{command[0]}: not found"
    except PermissionError:
        return 126, f"{command[0]}: permission denied"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]}: no answer within {TIMEOUT_SECONDS:.0f} s"
    lines = (process.stdout + process.stderr).strip().splitlines()
    return process.returncode, lines[-1] if lines else ""
