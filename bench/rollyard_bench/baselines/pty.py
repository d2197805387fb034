"""A bash on a pseudo-terminal without a server, which is read by blocking.

The end of a command is learnt in the customary way: the shell prints a marker after it.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress

import ptyprocess

READ_SIZE = 1 << 16


class PtyTimeout(TimeoutError):
    """The marker did not come in time."""

    reason = "PtyTimeout"


class RawShell:
    """One interactive bash outside every sandbox. It is used as a context manager."""

    def __init__(self, timeout: float = 30.0) -> None:
        environment = {**os.environ, "PS1": "", "PS2": "", "PROMPT_COMMAND": "", "TERM": "dumb"}
        self._process = ptyprocess.PtyProcess.spawn(
            ["bash", "--norc", "--noprofile", "--noediting"],
            env=environment,
            echo=False,
            dimensions=(50, 200),
        )
        self._fd: int = self._process.fd
        self._timeout = timeout
        self._number = 0

    def __enter__(self) -> RawShell:
        self.blocking("PS1='' PS2=''")
        return self

    def __exit__(self, *_: object) -> None:
        # close() hangs up before it kills, and a shell that has already ended is fine.
        with suppress(ptyprocess.PtyProcessError, OSError):
            self._process.close(force=True)

    def _send(self, command: str) -> bytes:
        self._number += 1
        os.write(self._fd, f"{command}\nprintf '\\036{self._number}:%d\\036' $?\n".encode())
        return f"\036{self._number}:".encode()

    def blocking(self, command: str) -> bytes:
        """Run `command`, read the terminal as soon as it has data, and return the output without the marker.

        Raises:
            PtyTimeout: The shell did not answer in time.
        """
        marker = self._send(command)
        deadline = time.monotonic() + self._timeout
        output = bytearray()
        while True:
            seen = max(0, len(output) - len(marker) - 8)
            chunk = self._read(deadline)
            output += chunk
            at = output.find(marker, seen)
            if at >= 0 and output.find(b"\036", at + len(marker)) >= 0:
                return bytes(output[:at])

    def _read(self, deadline: float) -> bytes:
        if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise PtyTimeout(f"no marker within {self._timeout} s")
        return os.read(self._fd, READ_SIZE)
