"""A tunnel to the control plane of a cluster. It lasts as long as the command, and it needs no ingress."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Final

from rollyard_drivers.host import launcher
from rollyard_process.backoff import Backoff

from rollyard.cluster.installations import Installation
from rollyard.cluster.kubectl import ClusterProblem
from rollyard.errors import CliError, NoServer

START_SECONDS: Final = 30.0
"""The limit of the time until the tunnel is open, in seconds."""
_PAUSES: Final = Backoff(first=0.1, longest=1.0)
"""The seconds between two attempts to restore a broken tunnel."""
_FORWARDING: Final = re.compile(rb"^Forwarding from 127\.0\.0\.1:(\d+) ")


class Tunnel:
    """A `kubectl port-forward` that is started again on the same port when its pod ends."""

    def __init__(self, installation: Installation, errors: IO[bytes]) -> None:
        """Make a tunnel, which is not open yet. `errors` is an empty file for kubectl's standard error."""
        self._installation = installation
        self._errors = errors
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self.port = 0

    def open(self) -> None:
        """Open the tunnel, and return when it accepts local connections.

        Raises:
            ClusterProblem: The user may not forward ports.
            NoServer: The tunnel is not open in time, or no pod runs.
        """
        opened = threading.Event()
        process = self._start(0)
        assert process is not None
        self._run(self._read, process.stdout, opened)
        in_time = opened.wait(START_SECONDS)
        if not self.port:
            failure = self._failure(in_time)
            self.close()
            raise failure
        self._run(self._keep, process)

    def close(self) -> None:
        """End kubectl, and return when it has ended."""
        with self._lock:
            self._closing.set()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
        for thread in self._threads:
            thread.join()

    def _run(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(
            target=target, args=arguments, name=f"kubectl{target.__name__}", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def _start(self, port: int) -> subprocess.Popen[bytes] | None:
        """Start kubectl on a local port and return its process, or None if the tunnel is being closed.

        The port 0 selects any free one.
        """
        installation = self._installation
        program = shutil.which("kubectl") or "kubectl"
        command = [program, "port-forward", "--namespace", installation.namespace, "--address", "127.0.0.1"]
        command += [f"service/{installation.service}", f"{port or ''}:{installation.port}"]
        with self._lock:
            if self._closing.is_set():
                return None
            # The session of its own keeps Ctrl-C away from kubectl. The launcher ends it with this process.
            self._process = subprocess.Popen(
                [sys.executable, "-IS", str(launcher.__file__), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if not port else subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
            return self._process

    def _read(self, output: IO[bytes], opened: threading.Event) -> None:
        with output:
            for line in output:
                match = _FORWARDING.match(line)
                if match is not None and not self.port:
                    self.port = int(match[1])
                    opened.set()
        opened.set()

    def _keep(self, process: subprocess.Popen[bytes] | None) -> None:
        # The kernel counts this thread as the parent of new processes, so it lives as long as they do.
        failures = 0
        while process is not None:
            began = time.monotonic()
            process.wait()
            failures = 1 if time.monotonic() - began > _PAUSES.longest else failures + 1
            if self._closing.wait(_PAUSES.pause(failures)):
                return
            process = self._start(self.port)

    def _failure(self, in_time: bool) -> CliError:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        text = next((line for line in reversed(lines) if line), "kubectl said nothing").removeprefix(
            "error: "
        )
        where = f"{self._installation.service!r} in namespace {self._installation.namespace!r}"
        if not in_time:
            return NoServer(f"no tunnel to Service {where} within {START_SECONDS:.0f} s: {text}")
        if "forbidden" in text.lower():
            return ClusterProblem(
                f"you may not forward a port to Service {where}: {text}; ask for `get services`, `list pods` "
                "and `create pods/portforward` there, or give --url (an ingress, say)"
            )
        return NoServer(f"no tunnel to Service {where}: {text}; does its pod run?")


@contextlib.contextmanager
def forwarded(installation: Installation) -> Iterator[str]:
    """Yield a local URL of the installation's control plane, which works as long as the block lasts.

    Raises:
        ClusterProblem: The user may not forward ports.
        NoServer: The tunnel is not open in time, or no pod runs.
    """
    with tempfile.TemporaryFile() as errors:
        tunnel = Tunnel(installation, errors)
        tunnel.open()
        try:
            yield f"{installation.scheme}://127.0.0.1:{tunnel.port}"
        finally:
            tunnel.close()
