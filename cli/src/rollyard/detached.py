"""The start of Rollyard's programs in the background, and the wait until they are ready."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, TypeVar

import click
from rollyard_drivers.host.log_file import last_line

from rollyard.errors import StartFailed

T = TypeVar("T")
LOOK_SECONDS: Final = 0.05
END_SECONDS: Final = 30.0
"""The time in seconds that a program has to end before its failure is reported. It may end later by
itself."""


def start(arguments: Sequence[str], log: Path, ready: Callable[[int], str], seconds: float) -> str:
    """Run `rollyard ARGUMENTS` in a session of its own, and return the line that `ready` gives for its pid.

    Args:
        arguments: The command and its arguments.
        log: The file to which the program's output is appended.
        ready: A function of the pid. It returns a line about the program, or "" while that is not ready. If
            it raises StartFailed, the program is ended.
        seconds: The longest wait in seconds.

    Raises:
        StartFailed: The program ended, or it was not ready in time or failed, and was asked to end.
    """
    name = f"`rollyard {' '.join(word for word in arguments[:2] if not word.startswith('-'))}`"
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
    try:
        return wait_ready(process, log, name, lambda: ready(process.pid), seconds, begin)
    except StartFailed:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        raise


def wait_ready(
    process: subprocess.Popen[bytes],
    log: Path,
    name: str,
    ready: Callable[[], T | None],
    seconds: float,
    begin: int = 0,
) -> T:
    """Wait until a program in the background is ready, and return what `ready` then returns.

    Args:
        process: The program.
        log: The file with its output.
        name: What messages call it.
        ready: Returns something true once the program is ready. It may raise StartFailed.
        seconds: The longest wait in seconds.
        begin: The size of the file before the program wrote to it.

    Raises:
        StartFailed: The program ended, was not ready in time, or failed.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            wrote = log.stat().st_size > begin
            text = last_line(log).removeprefix("rollyard: ") if wrote else ""
            text = text or f"{name} ended"
            raise StartFailed(text if "(log: " in text else f"{text} (log: {log})")
        if state := ready():
            return state
        time.sleep(LOOK_SECONDS)
    raise StartFailed(f"{name} was not ready within {seconds:.0f} s (log: {log})")


def arguments_again(ctx: click.Context, without: Collection[str]) -> list[str]:
    """Return the arguments of the command that runs now, without the parameters of these names."""
    words: list[str] = []
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if not isinstance(parameter, click.Option) or parameter.name in without:
            continue
        flag = max(parameter.opts, key=len)
        if parameter.is_flag:
            negative = parameter.secondary_opts if value is False else []
            words += [flag] if value else negative
        elif parameter.multiple:
            words += [f"{flag}={item}" for item in value or ()]
        elif value not in (None, ""):
            words.append(f"{flag}={value}")
    return words
