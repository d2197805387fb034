"""The IPython kernel of a sandbox: an ipykernel child, with which the server communicates over ipc sockets.

The event loop starts the process and learns of its end. A thread imports jupyter_client, which takes a while,
as the kernel starts, and then speaks the Jupyter protocol. Nothing polls at intervals: the thread waits in
one `zmq_poll` for the kernel's sockets and for the event loop's notice that the kernel died or the cell was
cancelled.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from time import monotonic

from rollyard_sandbox import folders
from rollyard_sandbox.errors import BadRequest, IPythonUnavailable, SandboxError
from rollyard_sandbox.execution.commands import Capture, Outcome
from rollyard_sandbox.execution.launching import launch
from rollyard_sandbox.execution.processes import exit_code, kill_session, prefer_for_oom, send_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from queue import SimpleQueue
    from typing import Final

    from rollyard_sandbox.execution.event_loop import EventLoop
    from rollyard_sandbox.execution.jupyter_wire import JupyterWire
    from rollyard_sandbox.isolation.protections import Protections

_START_LIMIT: Final = 45.0  # The seconds that a new kernel has to answer.
_INTERRUPT_GRACE: Final = 2.0  # The seconds between SIGINT and SIGKILL.
_CLEANUP_LIMIT: Final = 2.0  # seconds
_INJECTED: Final = "/.rollyard/"  # A server that runs from this folder is a guest in another system.
# The image's Python runs this: it starts its own kernel or, if it has no working ipykernel, the command that
# follows.
_CHOOSE: Final = """
import os, sys
try:
    import ipykernel.kernelapp
except Exception:
    os.execv(sys.argv[1], sys.argv[1:])
import runpy
sys.argv = sys.argv[3:]
runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
"""
_PORTS: Final = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


class Cell:
    """One cell: its code and its outcome."""

    def __init__(
        self,
        code: str,
        timeout: float,
        max_output: int,
        done: Callable[[Outcome | SandboxError, str], None],
    ) -> None:
        self.code = code
        self.timeout = timeout
        self.capture = Capture(max_output)
        self.done = done
        self.outcome = Outcome()
        self.result = ""


class Kernel:
    """One kernel process, and the thread that communicates with it."""

    def __init__(self, loop: EventLoop, protections: Protections, cwd: str) -> None:
        from queue import SimpleQueue
        from threading import Thread

        self._loop = loop
        # The name is short, because socket paths end at 107 bytes.
        self.directory = f"/tmp/.ipy-{os.urandom(5).hex()}"
        os.mkdir(self.directory, 0o700)
        connection = {
            "transport": "ipc",
            "ip": f"{self.directory}/s",
            "key": os.urandom(16).hex(),
            "signature_scheme": "hmac-sha256",
            **{name: number for number, name in enumerate(_PORTS, 1)},
        }
        path = f"{self.directory}/kernel.json"
        with open(path, "w", encoding="ascii", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
            json.dump(connection, file)
        own = [sys.executable, "-m", "ipykernel_launcher", "-f", path, "--HistoryManager.enabled=False"]
        image_python = _image_python()
        environment = {
            **os.environ,
            "IPYTHONDIR": self.directory,
            "JUPYTER_PLATFORM_DIRS": "1",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "TERM": "dumb",
            "PAGER": "cat",
        }
        argv = [image_python, "-c", _CHOOSE, *own] if image_python else own
        with open(f"{self.directory}/log", "wb") as log, open(os.devnull, "rb") as nothing:
            output = log.fileno()
            self.pid = launch(argv, environment, cwd, protections, (nothing.fileno(), output, output))
        prefer_for_oom(self.pid)
        self.status: int | None = None
        self.stop_requested = False
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._cells: SimpleQueue[Cell | None] = SimpleQueue()
        loop.on_exit(self.pid, self._ended)
        self._thread = Thread(target=self._serve, args=(connection,), name="ipython", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether the process has not ended."""
        return self.status is None

    def submit(self, cell: Cell) -> None:
        """Run `cell`. Only one cell may run at a time."""
        self.stop_requested = False
        self._cells.put(cell)

    def stop_cell(self) -> None:
        """Interrupt the running cell, and kill the kernel if that does not help."""
        self.stop_requested = True
        os.eventfd_write(self.wake, 1)

    def kill(self) -> None:
        """Kill the kernel and what it started."""
        if self.alive:
            kill_session(self.pid)

    def _ended(self, status: int) -> None:
        self.status = exit_code(status)
        os.eventfd_write(self.wake, 1)
        self._cells.put(None)

    def join(self) -> None:
        """Wait until the thread of an ended kernel has cleaned up."""
        self._thread.join(_CLEANUP_LIMIT)

    # The methods below run in the thread.

    def _serve(self, connection: dict[str, str | int]) -> None:
        wire: JupyterWire | None = None
        problem = ""
        try:
            from rollyard_sandbox.execution.jupyter_wire import JupyterWire

            wire = JupyterWire(connection, self.wake)
        except ImportError as error:
            problem = f"jupyter_client cannot be imported: {error}"
        ready = False
        while True:
            cell = self._cells.get()
            if cell is None:
                break
            if wire is not None and not ready and not problem:
                ready = wire.wait_until_ready(_START_LIMIT, lambda: self.alive and not self.stop_requested)
                problem = "" if ready else f"the kernel did not start: {self._log()}"
            refusal = None
            if wire is None or not ready:
                refusal = IPythonUnavailable(problem)
                send_signal((self.pid,), signal.SIGKILL)
            else:
                try:
                    self._run(wire, cell)
                except Exception:
                    # A bug of ours, which must not leave the cell without an end.
                    sys.excepthook(*sys.exc_info())
                    kill_session(self.pid)
                    cell.outcome.killed = cell.outcome.shell_restarted = True
            self._loop.call_from_thread(partial(_deliver, cell, refusal))
        if wire is not None:
            wire.close()
        os.close(self.wake)
        try:
            folders.remove(self.directory)
        except OSError:
            return  # The sandbox's own folders are removed with it.

    def _run(self, wire: JupyterWire, cell: Cell) -> None:
        outcome = cell.outcome
        started = monotonic()
        deadline: float = started + cell.timeout
        interrupted = False
        wire.execute(cell.code)
        while self.alive:
            ended = wire.receive_until(deadline, cell.capture)
            if ended:
                outcome.exit_code = 0 if wire.succeeded else 1
                break
            if not self.alive:
                break
            now = monotonic()
            if interrupted and now >= deadline:
                outcome.killed = True
                kill_session(self.pid)
                deadline = now + _INTERRUPT_GRACE  # The kernel's end wakes this thread.
            elif not interrupted and (now >= deadline or self.stop_requested):
                interrupted = True
                outcome.timed_out = now >= deadline
                send_signal((self.pid,), signal.SIGINT)
                deadline = now + _INTERRUPT_GRACE
        else:
            wire.receive_until(0.0, cell.capture)
        if outcome.exit_code is None and self.status is not None:
            outcome.exit_code = self.status
            outcome.shell_restarted = True
        cell.result = wire.result
        outcome.seconds = monotonic() - started
        outcome.output, outcome.truncated_bytes = cell.capture.finish()

    def _log(self) -> str:
        try:
            with open(f"{self.directory}/log", encoding="utf-8", errors="replace") as file:
                return file.read(64 * 1024)[-2000:].strip() or "no answer in time"
        except OSError as error:
            return str(error)


class IPython:
    """The sandbox's kernel, which is started when it is first used and replaced when it is lost."""

    def __init__(self, loop: EventLoop, protections: Protections, cwd: str) -> None:
        self._loop = loop
        self._protections = protections
        self._cwd = cwd
        self._kernel: Kernel | None = None
        self._cell: Cell | None = None
        self._lost_state = False

    def execute(
        self,
        code: str,
        timeout: float,
        max_output: int,
        done: Callable[[Outcome | SandboxError, str], None],
    ) -> Callable[[], None]:
        """Run a cell, and call `done(outcome, result text)` once.

        Returns:
            A function that cancels the cell.

        Raises:
            BadRequest: Another cell is running (reason SessionBusy).
            IPythonUnavailable: ipykernel is not importable here, or the kernel cannot be started.
        """
        if self._cell is not None:
            raise BadRequest("IPython is running another cell", reason="SessionBusy")
        if self._kernel is None or not self._kernel.alive:
            self._lost_state = self._kernel is not None
            self._kernel = self._start()
        kernel = self._kernel

        def ended(outcome: Outcome | SandboxError, result: str) -> None:
            self._cell = None
            if isinstance(outcome, Outcome):
                outcome.shell_restarted |= self._lost_state
                self._lost_state = False
                outcome.cwd = self._cwd
                try:
                    outcome.cwd = os.readlink(f"/proc/{kernel.pid}/cwd")
                except OSError:
                    outcome.cwd = self._cwd  # The kernel has ended.
                if not kernel.alive:
                    self._kernel = None  # The loss has been reported.
            elif self._kernel is kernel:
                self._kernel = None
            done(outcome, result)

        cell = Cell(code, timeout, max_output, ended)
        self._cell = cell
        kernel.submit(cell)

        def cancel() -> None:
            if self._cell is cell:
                kernel.stop_cell()

        return cancel

    def expect_kill(self) -> None:
        """Note that the caller is about to kill every process: a running cell will end as `killed`."""
        if self._cell is not None:
            self._cell.outcome.killed = True

    def forget(self) -> None:
        """Forget a kernel that was killed on purpose. The next cell starts a new one and reports no loss."""
        self._kernel = None
        self._lost_state = False

    def close(self) -> None:
        """Wait until the private folder of the kernel, which was killed at the server's end, is removed."""
        if self._kernel is not None:
            self._kernel.join()

    def _start(self) -> Kernel:
        from importlib.util import find_spec

        missing = [name for name in ("ipykernel", "jupyter_client", "zmq") if find_spec(name) is None]
        if missing:
            raise IPythonUnavailable(
                f"{sys.executable} cannot import {', '.join(missing)}; install ipykernel"
            )
        try:
            return Kernel(self._loop, self._protections, self._cwd)
        except (OSError, ValueError) as error:
            raise IPythonUnavailable(f"the kernel cannot be started: {error}") from error


def _image_python() -> str | None:
    """Return the Python of the system in which this server is a guest.

    Returns:
        None if that system has no Python, or if the server is not a guest.
    """
    if not sys.executable.startswith(_INJECTED):
        return None
    from shutil import which

    return which("python3")


def _deliver(cell: Cell, error: SandboxError | None) -> None:
    cell.done(error or cell.outcome, cell.result)
