"""A control plane in a process of its own, for tests that call it over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollyard_testing.pace import patience

LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class StartedControlPlane:
    """The address of a control plane that answers, its tokens by role, and the file with its log."""

    url: str
    tokens: dict[str, str]
    log: Path

    @property
    def port(self) -> int:
        """Return the port of the address."""
        return int(self.url.rpartition(":")[2])


@contextmanager
def a_control_plane(
    folder: Path, *options: str, ready_seconds: float, end_seconds: float
) -> Iterator[StartedControlPlane]:
    """Start a control plane on an SQLite database in a folder, and end it with the block.

    Args:
        folder: The existing folder for its state, its log and its port file.
        options: Further options of `rollyard_api`.
        ready_seconds: The time in which it must answer on a machine of usual speed.
        end_seconds: The time in which it must have ended there after its SIGTERM.

    Raises:
        AssertionError: It ended, or was not ready in time. The message is its log.
        subprocess.TimeoutExpired: It did not end in time.
    """
    port_file, log = folder / "port", folder / "log"
    command = [sys.executable, "-m", "rollyard_api", "--state-dir", str(folder), "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port-file", str(port_file), *options], stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + patience(ready_seconds)
        while not port_file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(LOOK_SECONDS)
        tokens: dict[str, str] = json.loads((folder / "tokens.json").read_text())
        yield StartedControlPlane(f"http://127.0.0.1:{port_file.read_text().strip()}", tokens, log)
    finally:
        process.terminate()
        try:
            process.wait(patience(end_seconds))
        finally:
            process.kill()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Make a certificate of 127.0.0.1 that vouches for itself, and return its file and that of its key."""
    made = folder / "tls.crt", folder / "tls.key"
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "2", "-subj", "/CN=rollyard", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-out", str(made[0]), "-keyout", str(made[1])]
    subprocess.run([*new, *names, *files], check=True, capture_output=True, timeout=patience(30))
    return made
