"""A Rollyard on one machine for fault tests, judged from outside the product.

Nothing here imports Rollyard: the ledger reads the REST API with its own HTTP client, and
processes, mounts and sockets are read from /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
MARK = "ROLLYARD_FAULT_TEST_MARK"


class Ledger:
    """Every trajectory the server ever showed, in the order seen; nothing seen may change or vanish."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self.faults: list[str] = []
        self.lines = 0

    def note(self, record: dict[str, Any]) -> None:
        self.lines += 1
        key = record["id"]
        before = self.seen.get(key)
        if before is not None and before != record:
            self.faults.append(f"{key} changed after it was delivered")
        elif before is not None:
            self.faults.append(f"{key} was delivered twice on one cursor")
        self.seen[key] = record

    def judge(self, expected: set[tuple[str, int]]) -> list[str]:
        """Problems, if any, against the (task, sample) pairs that were submitted."""
        got: dict[tuple[str, int], list[str]] = {}
        for key, record in self.seen.items():
            got.setdefault((record["task_id"], record["sample_index"]), []).append(key)
        problems = list(self.faults)
        problems += [f"no result for {pair}" for pair in sorted(expected - set(got))]
        problems += [f"result for {pair}, never submitted" for pair in sorted(set(got) - expected)]
        problems += [f"{len(keys)} results for {pair}" for pair, keys in got.items() if len(keys) > 1]
        for key, record in self.seen.items():
            ended = record["status"]
            if ended == "succeeded" and record["reward"] is None:
                problems.append(f"{key} succeeded without a reward")
            if ended != "succeeded" and (record["reward"] is not None or not record["reason"]):
                problems.append(
                    f"{key} is {ended} with reward {record['reward']} and reason {record['reason']!r}"
                )
            for segment in record["segments"]:
                lengths = {
                    len(segment[name])
                    for name in ("response_ids", "loss_mask", "logprobs", "policy_versions")
                }
                if len(lengths) != 1:
                    problems.append(f"{key} has a segment of unequal lengths")
        return problems


class Yard:
    """`rollyard up` in a private home, and hands to kill its parts with."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self.mark = uuid.uuid4().hex
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None
        self.log = home.parent / f"{home.name}.log"

    def start(self) -> None:
        env = {**os.environ, MARK: self.mark, "ROLLYARD_HOME": str(self.home)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rollyard",
                    "up",
                    "--home",
                    str(self.home),
                    "--port",
                    "0",
                    *self.arguments,
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_ready()

    def wait_ready(self, seconds: float = 40.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(
                    f"rollyard up ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}"
                )
            with contextlib.suppress(OSError, KeyError, ValueError, httpx.HTTPError):
                if httpx.get(f"{self.context()['url']}/readyz", timeout=2).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready in {seconds:.0f} s:\n{self.log.read_text()[-3000:]}")

    def context(self) -> dict[str, str]:
        return dict(json.loads((self.home / "context.json").read_text()))

    def http(self) -> httpx.Client:
        context = self.context()
        token = json.loads(Path(context["token_file"]).read_text())["admin"]
        return httpx.Client(base_url=context["url"], headers={"Authorization": f"Bearer {token}"}, timeout=20)

    def stop(self, sig: int = signal.SIGINT, seconds: float = 40.0) -> int:
        assert self.process is not None
        self.process.send_signal(sig)
        return self.process.wait(seconds)

    # What there is, read from /proc.

    def members(self) -> dict[int, str]:
        """Every live process of this yard: pid to kind."""
        found: dict[int, str] = {}
        home = str(self.home).encode()
        mark = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if not command:
                    continue  # a zombie holds nothing
                if mark in (entry / "environ").read_bytes():
                    found[int(entry.name)] = _kind(command)
                elif home in command or home in (entry / "mountinfo").read_bytes():
                    found[int(entry.name)] = "sandbox"
        return found

    def leftovers(self) -> list[str]:
        """Processes, mounts, sockets and control groups of this yard that are still there."""
        left = [f"process {pid} ({kind})" for pid, kind in self.members().items()]
        home = str(self.home)
        left += [
            f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if home in line
        ]
        left += [f"socket {line}" for line in Path("/proc/net/unix").read_text().splitlines() if home in line]
        sandboxes = self.home / "run" / "sandboxes"
        if sandboxes.is_dir():
            left += [f"folder {path}" for path in sandboxes.iterdir()]
        return left

    def kill(self, kind: str, rng: random.Random) -> bool:
        """kill -9 of one process of a kind; False where there is none just now."""
        pids = sorted(pid for pid, found in self.members().items() if found == kind)
        if not pids:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(pids), signal.SIGKILL)
        return True


def _kind(command: bytes) -> str:
    words = command.split(b"\0")
    for module, kind in (
        (b"rollyard_api", "control-plane"),
        (b"rollyard_pipeline", "worker"),
        (b"rollyard_engine", "backend"),
    ):
        if module in words:
            return kind
    if b"bwrap" in words[0] or words[0].startswith(b"/.rollyard/") or b"rollyard_sandbox.server" in words:
        return "sandbox"
    return "driver"


@contextlib.contextmanager
def following(yard: Yard, job: str, ledger: Ledger) -> Iterator[None]:
    """Reads trajectories by cursor into the ledger for as long as the block runs, through any outage."""
    done = threading.Event()

    def follow() -> None:
        cursor = ""
        while not done.is_set():
            with contextlib.suppress(OSError, KeyError, ValueError, httpx.HTTPError), yard.http() as http:
                cursor = read_once(http, job, cursor, ledger)
            done.wait(0.3)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(30)


def read_once(http: httpx.Client, job: str, cursor: str, ledger: Ledger) -> str:
    """Everything past the cursor, noted; gives the next cursor."""
    while True:
        answer = http.get(f"/v1/rolloutjobs/{job}/trajectories", params={"cursor": cursor, "limit": 100})
        answer.raise_for_status()
        lines = [line for line in answer.text.splitlines() if line.strip()]
        for line in lines:
            ledger.note(json.loads(line))
        cursor = answer.headers["Rollyard-Cursor"]
        if not lines:
            return cursor
