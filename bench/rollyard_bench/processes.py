"""Starting the real programs for a measurement, and stopping all that was started."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx
from rollyard import AsyncClient

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parent
START_SECONDS = 30.0
STOP_SECONDS = 20.0


class ProgramFailed(RuntimeError):
    """A program ended early or did not come up; the text holds the end of its log."""

    reason = "ProgramFailed"


class Missing(RuntimeError):
    """A figure needs something that is not on this machine; the text says what, and how to get it.

    It is for set-ups only. What goes wrong once everything is there is a failure, and never this.
    """

    reason = "Missing"


def needed(name: str, package: str) -> None:
    """Check that a program is on the PATH.

    Raises:
        Missing: It is not; the text names Debian's package.
    """
    if shutil.which(name) is None:
        raise Missing(f"{name} is not installed (Debian: apt install {package})")


async def output(
    *command: str, seconds: float | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Run a command and return what it prints.

    Raises:
        Missing: The command says so, by the exit status that `sysexits.h` calls EX_UNAVAILABLE.
        ProgramFailed: The command failed or took too long.
    """
    # The output goes to files, because a process that the command leaves behind may keep pipes open for ever.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env={**os.environ, **(environment or {})},
        )
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError as error:
            raise ProgramFailed(f"{' '.join(command)} took longer than {seconds:.0f} s") from error
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        out.seek(0)
        errors.seek(0)
        printed, words = out.read().decode(errors="replace"), errors.read().decode(errors="replace")
    if process.returncode == os.EX_UNAVAILABLE:
        raise Missing((words.strip() or " ".join(command)).splitlines()[-1])
    if process.returncode != 0:
        text = (words + printed).strip()[-600:]
        raise ProgramFailed(f"{' '.join(command)} ended with code {process.returncode}: {text}")
    return printed


def unwind(signum: int, frame: FrameType | None) -> None:
    """Leave every context manager after a signal, so that everything which was started is stopped."""
    raise SystemExit(128 + signum)


@dataclass(frozen=True, slots=True)
class Program:
    """A running program, which writes its output to `log`."""

    process: asyncio.subprocess.Process
    log: Path

    def tail(self) -> str:
        """Return the last lines that the program wrote."""
        return " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-6:])[-900:]

    def check(self, name: str) -> None:
        """Raise ProgramFailed if the program has ended."""
        if self.process.returncode is not None:
            raise ProgramFailed(f"{name} ended with code {self.process.returncode}: {self.tail()}")


@asynccontextmanager
async def program(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    stop: signal.Signals = signal.SIGTERM,
    stop_seconds: float = STOP_SECONDS,
) -> AsyncIterator[Program]:
    """Run `command` in a session of its own.

    When the block is left, the program gets the signal `stop`. If it does not end in time, its whole session
    gets SIGKILL.
    """
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield Program(process, log)
    finally:
        if process.returncode is None:
            process.send_signal(stop)
            try:
                async with asyncio.timeout(stop_seconds):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


async def port_of(running: Program, name: str, port_file: Path) -> int:
    """Return the port that the program wrote to its port file.

    Raises:
        ProgramFailed: The program ended, or wrote no port in time.
    """
    try:
        async with asyncio.timeout(START_SECONDS):
            while not (port_file.exists() and port_file.read_text().strip()):
                running.check(name)
                await asyncio.sleep(0.05)
    except TimeoutError as error:
        raise ProgramFailed(
            f"{name} opened no port within {START_SECONDS:.0f} s: {running.tail()}"
        ) from error
    return int(port_file.read_text())


async def answers(running: Program, name: str, url: str) -> None:
    """Wait until `url` answers 200.

    Raises:
        ProgramFailed: The program ended, or did not answer in time.
    """
    try:
        async with asyncio.timeout(START_SECONDS), httpx.AsyncClient(timeout=5.0) as client:
            while True:
                running.check(name)
                try:
                    if (await client.get(url)).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)
    except TimeoutError as error:
        raise ProgramFailed(f"{name} did not answer at {url}: {running.tail()}") from error


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A running control plane on SQLite."""

    program: Program
    url: str
    tokens: Mapping[str, str]
    """The tokens by role: admin, worker, driver."""
    tokens_file: Path

    def client(self) -> AsyncClient:
        """Return a client with the administrator's token."""
        return AsyncClient(self.url, self.tokens["admin"], timeout=60.0)


@asynccontextmanager
async def control_plane(
    folder: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[ControlPlane]:
    """Start `python -m rollyard_api` with its state in `folder`, and yield it once it is ready."""
    state, port_file = folder / "state", folder / "port"
    command = [sys.executable, "-m", "rollyard_api", "--state-dir", str(state)]
    command += ["--port", "0", "--port-file", str(port_file)]
    async with program(command, folder / "api.log", environment) as running:
        port = await port_of(running, "rollyard_api", port_file)
        url = f"http://127.0.0.1:{port}"
        await answers(running, "rollyard_api", f"{url}/readyz")
        tokens_file = state / "tokens.json"
        yield ControlPlane(running, url, json.loads(tokens_file.read_text()), tokens_file)
