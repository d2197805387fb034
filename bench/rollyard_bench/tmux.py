"""A bash in a tmux session, driven by send-keys and capture-pane through libtmux."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import libtmux

from rollyard_bench.processes import needed


class TmuxTimeout(TimeoutError):
    """The marker did not appear on the pane in time."""

    reason = "TmuxTimeout"


class TmuxShell:
    """One tmux server of our own with one session. It is used as a context manager.

    Args:
        timeout: The seconds after which a command without its marker is given up.
        cwd: The folder in which the shell starts; by default, that of this process.
    """

    def __init__(self, timeout: float = 30.0, cwd: Path | None = None) -> None:
        needed("tmux", "tmux")
        self._folder = Path(tempfile.mkdtemp(prefix="rollyard-bench-"))
        self._timeout = timeout
        self._number = 0
        # No configuration file is read: the user's own might slow tmux or change the shell.
        self._server = libtmux.Server(socket_path=self._folder / "tmux.sock", config_file="/dev/null")
        session = self._server.new_session(
            session_name="bench",
            window_command="bash --norc --noprofile",
            x=120,
            y=40,
            start_directory=None if cwd is None else str(cwd),
        )
        pane = session.active_pane
        if pane is None:
            raise RuntimeError("tmux made a session without a pane")
        self._pane = pane

    def __enter__(self) -> TmuxShell:
        self.run("true", pause=0.01, look_first=False)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._server.kill()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, command: str, *, pause: float, look_first: bool) -> int:
        """Type `command`, read the pane until its marker is there, and return the exit status.

        With `look_first` the pane is read at once, otherwise after the first `pause`. A `pause` of 0 reads it
        again without waiting.

        Raises:
            TmuxTimeout: The marker did not appear in time.
        """
        self._number += 1
        marker = f"=={self._number}:"
        self._pane.send_keys(f"{command}; echo {marker}$?", enter=True, suppress_history=False)
        deadline = time.monotonic() + self._timeout
        if not look_first:
            time.sleep(pause)
        while time.monotonic() < deadline:
            lines = self._pane.capture_pane()
            # The typed line holds the marker, too, but behind the prompt and the command.
            for line in reversed(lines):
                if line.startswith(marker):
                    return int(line.removeprefix(marker))
            if pause:
                time.sleep(pause)
        raise TmuxTimeout(f"no marker within {self._timeout} s after {command!r}")
