"""A Rollyard on one machine for fault tests, judged from outside the product.

Nothing here imports Rollyard: the ledger reads the REST API with its own HTTP client, and
processes, mounts, sockets and control groups are read from the kernel's listings.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from rollyard_testing.faults.ledger import Ledger
from rollyard_testing.faults.listing import Process, control_groups, mounts, processes, sandbox_names, sockets
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[4]
MARK = "ROLLYARD_FAULT_TEST_MARK"
LEASE_SECONDS = 5
LOOK_SECONDS = 0.3
START_SECONDS = patience(180.0)
"""The longest start, which takes a few seconds on an idle machine."""


class Yard:
    """`rollyard up` with further arguments in a private home, and methods to kill its parts."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.arguments = arguments
        self.home = folder / "h"
        self.log = folder / "up.log"
        self.names: set[str] = set()
        """The names of all sandboxes that were ever seen."""
        self.met: set[Process] = set()
        """All processes of sandboxes that were ever seen."""
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start `rollyard up` and wait until it answers."""
        name, value = self._mark.split("=")
        command = [sys.executable, "-m", "rollyard", "up", "--home", str(self.home), "--port", "0"]
        command += ["--lease-seconds", str(LEASE_SECONDS), *self.arguments]
        (self.home / "context.json").unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, name: value},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"rollyard up ended with {self._process.returncode}:\n{self.words()}")
            with contextlib.suppress(OSError, KeyError, ValueError, httpx.HTTPError), self.http() as http:
                if http.get("/readyz").status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready within {START_SECONDS:.0f} s:\n{self.words()}")

    def words(self) -> str:
        """Return the end of every log."""
        logs = [self.log, *sorted((self.home / "logs").glob("*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def http(self) -> httpx.Client:
        """Return a client of the control plane that runs now."""
        context = json.loads((self.home / "context.json").read_text())
        token = json.loads(Path(context["token_file"]).read_text())["admin"]
        return httpx.Client(
            base_url=context["url"],
            headers={"Authorization": f"Bearer {token}"},
            timeout=patience(20),
            trust_env=False,
        )

    def stop(self, number: signal.Signals = signal.SIGINT, seconds: float = 60.0) -> int:
        """Signal `rollyard up`, wait for its end, and return its exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(patience(seconds))

    def running(self) -> bool:
        """Return whether `rollyard up` runs."""
        return self._process is not None and self._process.poll() is None

    def look(self) -> None:
        """Remember the present sandboxes, so that none is forgotten when its socket goes."""
        self.names |= sandbox_names(self.home)

    def processes(self) -> list[Process]:
        """Return every live process of this Rollyard."""
        self.look()
        found = processes(self.home, self._mark.encode(), self.names)
        self.met |= {process for process in found if process.kind == "sandbox"}
        return found

    def listing(self) -> list[str]:
        """Return everything of this Rollyard that the kernel knows of, and the folders of its sandboxes."""
        live = set(self.processes()) | {process for process in self.met if process.alive()}
        here = [f"process {one.pid} ({one.kind} {one.sandbox})".replace(" )", ")") for one in live]
        here += [f"mount {line}" for line in mounts(self.home)]
        here += [f"socket {path}" for path in sockets(self.home)]
        here += [f"control group {path}" for path in control_groups(self.names)]
        folder = self.home / "run" / "sandboxes"
        if folder.is_dir():
            here += [f"folder {path}" for path in folder.iterdir()]
        return sorted(here)

    def settled_listing(self, seconds: float = 3.0) -> list[str]:
        """Return the listing once it is empty, or as it is after `seconds`.

        A process that the kernel kills with its parent may need a moment to be gone.
        """
        deadline = time.monotonic() + patience(seconds)
        while (here := self.listing()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return here

    def in_use(self) -> list[str]:
        """Return sandboxes with live processes that a rollout has claimed, or that have no record at all."""
        return sorted(
            name
            for name in {process.sandbox for process in self.processes() if process.kind == "sandbox"}
            if self._record(name).get("state", "lost") not in ("warm", "starting")
        )

    def _record(self, sandbox: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.home / "run/sandboxes" / sandbox / "sandbox.json").read_text()))
        return {}

    def kill(self, kind: str, rng: random.Random, seconds: float = 8.0) -> Process | None:
        """Send kill -9 to one process of a kind, as soon as there is one; return None if there is none for
        `seconds`.

        A sandbox that a rollout uses comes before one that waits. One kill in two hits its first process,
        with which all of it ends; the others hit any: the exec server, a shell, or bwrap outside.
        """
        deadline = time.monotonic() + patience(seconds)
        while time.monotonic() < deadline:
            there = [process for process in self.processes() if process.kind == kind]
            if kind == "sandbox":
                used = set(self.in_use())
                there = [process for process in there if process.sandbox in used] or there
                whole = rng.random() < 0.5
                there = [process for process in there if process.is_first or not whole]
            if there:
                victim = rng.choice(sorted(there, key=lambda process: process.pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
                    return victim
            time.sleep(0.05)
        return None

    def end(self) -> None:
        """End whatever a failed test has left, and remove the home."""
        for process in {*self.processes(), *self.met}:
            if process.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(patience(10))
        for path in sorted(control_groups(self.names), reverse=True):
            with contextlib.suppress(OSError):
                os.rmdir(path)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def a_yard(*arguments: str) -> Iterator[Yard]:
    """Yield a new Rollyard, which is stopped at the end however the block ends."""
    # The path is short, because Unix sockets in it must be nameable.
    yard = Yard(Path(tempfile.mkdtemp(prefix="ryf-")), *arguments)
    try:
        yield yard
    finally:
        yard.end()


@contextlib.contextmanager
def following(yard: Yard, job: str, ledger: Ledger) -> Iterator[None]:
    """Read trajectories by cursor into the ledger, and look for sandboxes, while the block runs."""
    done = threading.Event()

    def follow() -> None:
        while not done.is_set():
            yard.look()
            with contextlib.suppress(OSError, KeyError, ValueError, httpx.HTTPError), yard.http() as http:
                ledger.read(http, job)
            done.wait(LOOK_SECONDS)

    thread = threading.Thread(target=follow, name="ledger")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(patience(60))
