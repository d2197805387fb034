"""Programs of Rollyard in the background: each is started, and waited for until it is ready."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rollyard_drivers.host.log_file import last_line

from rollyard.errors import StartFailed

LOOK_SECONDS = 0.05


def start(arguments: Sequence[str], log: Path, ready: Callable[[int], str], seconds: float) -> str:
    """Runs `rollyard ARGUMENTS` in a session of its own; returns the line that `ready` gives for its pid.

    Args:
        log: gets what it prints.
        ready: given the pid, what to tell of it, or nothing while it is not ready.
        seconds: to wait.

    Raises:
        StartFailed: it ended, or was not ready in time (and was asked to end).
    """
    what = f"`rollyard {' '.join(word for word in arguments[:2] if not word.startswith('-'))}`"
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "rollyard", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(os.environ),
        )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            wrote = log.stat().st_size > begin
            text = last_line(log).removeprefix("rollyard: ") if wrote else ""
            text = text or f"{what} ended"
            raise StartFailed(text if "(log: " in text else f"{text} (log: {log})")
        if told := ready(process.pid):
            return told
        time.sleep(LOOK_SECONDS)
    process.terminate()
    raise StartFailed(f"{what} was not ready within {seconds:.0f} s (log: {log})")
