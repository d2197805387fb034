"""One line of `rollyard doctor`, and the bounded run of a program that it may rest on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "missing", "optional"]
TIMEOUT_SECONDS = 10.0
Runner = Callable[..., tuple[int, str]]
"""Runs a command given word by word; its exit status (127: no such program, 124: no answer) and last line."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `rollyard doctor`. `optional`: absent, and only some uses need it."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def run(*command: str) -> tuple[int, str]:
    """Exit status and last line of a program, waited for ten seconds at most."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return 127, f"{command[0]}: not found"
    except PermissionError:
        return 126, f"{command[0]}: permission denied"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]}: no answer within {TIMEOUT_SECONDS:.0f} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""
