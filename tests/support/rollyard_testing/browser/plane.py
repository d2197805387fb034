"""A control plane whose store was filled before, which can be ended and started again at its address."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from rollyard_testing.browser.signin import Served
from rollyard_testing.crds.conversations import harness_record
from rollyard_testing.pace import patience
from rollyard_testing.page.attacks import hostile_job
from rollyard_testing.page.conversations import TINY_POLICY
from rollyard_testing.page.ordinary import VERSIONS, Ordinary, ordinary_job
from rollyard_testing.page.store import Result, opened, plain_tasks, recorded

READY_SECONDS: Final = patience(120.0)
END_SECONDS: Final = patience(30.0)
LOOK_SECONDS: Final = 0.05

ENDED: Final = "ended"
"""The name of the job whose rollouts have all ended."""
HALF: Final = "half"
"""The name of the job of which half of the rollouts wait."""
HOSTILE: Final = "hostile"
"""The name of the job whose rollouts attack whoever looks at them."""
HARNESS: Final = "harness"
"""The name of the job with a rollout of `harness_record`, whose conversations have branches."""
GROUPS: Final = 40


class Plane:
    """A control plane in a process of its own.

    Args:
        state: The folder of its state.
        options: Further options of `rollyard_api`.
    """

    def __init__(self, state: Path, *options: str) -> None:
        self.state = state
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._prefix = options[options.index("--path-prefix") + 1] if "--path-prefix" in options else ""

    @property
    def log(self) -> Path:
        """The file with what it logs."""
        return self.state / "api.log"

    @property
    def served(self) -> Served:
        """Its address, which stays the same after a restart, and its tokens as its file holds them now."""
        tokens = json.loads((self.state / "tokens.json").read_text())
        return Served(f"http://127.0.0.1:{self._port}{self._prefix}", tokens)

    @property
    def pid(self) -> int:
        """The id of its process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, at the same port as before, and return once it is ready.

        Raises:
            AssertionError: It ended, or was not ready in time. The message is its log.
        """
        port_file = self.state / "port"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "rollyard_api", "--state-dir", str(self.state)]
        command += ["--port", str(self._port), "--port-file", str(port_file), *self._options]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_SECONDS
        while not self._ready(port_file):
            assert self._process.poll() is None, self.log.read_text(errors="replace")
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")
            time.sleep(LOOK_SECONDS)

    def _ready(self, port_file: Path) -> bool:
        if not (port_file.exists() and port_file.read_text().strip()):
            return False
        self._port = int(port_file.read_text())
        try:
            return httpx.get(f"{self.served.origin}/readyz", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal its process and wait for its end. It is killed if it does not end in time."""
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


@contextmanager
def a_plane(state: Path, *options: str) -> Iterator[Plane]:
    """Start a control plane on a state folder, and end it with the block."""
    plane = Plane(state, *options)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@dataclass(frozen=True, slots=True)
class Filled:
    """A state folder with a job of each kind, and what is to be seen of the ordinary ones."""

    state: Path
    ended: Ordinary
    half: Ordinary

    def copy(self, folder: Path) -> Path:
        """Copy the state into another folder, so that a test may change it, and return that folder."""
        return Path(shutil.copytree(self.state, folder))


async def _fill(state: Path) -> Filled:
    now = time.time()
    async with opened(state) as store:
        await store.pool("default", TINY_POLICY, VERSIONS)
        ended = await ordinary_job(store, ENDED, GROUPS, now, pool="default", long=True)
        half = await ordinary_job(store, HALF, GROUPS, now, pool="default", ended=0.5, seed=1)
        await hostile_job(store, HOSTILE, now, pool="default")
        result = Result(ended_at=now - 30, recorded=recorded(harness_record()), tokens=12)
        await store.job(
            HARNESS, plain_tasks(1), 1, lambda no, sample: result, [(0, 0)], began=now - 600, pool="default"
        )
    return Filled(state, ended, half)


@contextmanager
def filled() -> Iterator[Filled]:
    """Fill a state folder with the jobs ENDED, HALF, HOSTILE and HARNESS, and remove it with the block."""
    folder = Path(tempfile.mkdtemp(prefix="ry-page-"))
    try:
        # A thread of its own may have a loop, even where Playwright's runs in this one.
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(lambda: asyncio.run(_fill(folder / "state"))).result()
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)
