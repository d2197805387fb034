"""A `rollyard up` of a command's own, which ends with the command, and also when that is interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Final

from rollyard_drivers.host import launcher
from rollyard_drivers.host.home import Home, read_json

from rollyard.detached import wait_ready

START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 30.0


@contextlib.contextmanager
def running_up(home: Home, arguments: Sequence[str]) -> Iterator[None]:
    """Run `rollyard up` as a child process. It is stopped when the block ends, even by an exception.

    Args:
        home: Its home, whose folder exists.
        arguments: Its further arguments.

    Raises:
        StartFailed: It ended, or it was not ready in time.
    """
    log = home.root / "up.log"
    command = [sys.executable, "-m", "rollyard", "up", "--home", str(home.root), "--port", "0", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-IS", str(launcher.__file__), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_ready(process, log, "`rollyard up`", lambda: read_json(home.context_file), START_SECONDS)
        yield
    finally:
        # Ctrl-C, SIGTERM and SIGHUP are ignored, because this block already stops what they would stop.
        with _handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _handled(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Handle signals with `handler` during the block, and restore the old handlers after it."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt the block as Ctrl-C does, so that it stops what it has started."""
    # Under nohup, SIGHUP stays ignored, because the command is meant to outlive the terminal.
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    with _handled(signal.default_int_handler, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,))):
        yield
