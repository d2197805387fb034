"""The data of a running command, and of the way in which it ended."""

from __future__ import annotations

from time import monotonic

from rollyard_sandbox.execution.capture import Capture

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rollyard_sandbox.errors import SandboxError
    from rollyard_sandbox.execution.event_loop import Timer


class Outcome:
    """The outcome of a command. Its fields are those of `client.results.ExecResult`."""

    __slots__ = (
        "cwd",
        "exit_code",
        "killed",
        "output",
        "seconds",
        "shell_restarted",
        "timed_out",
        "truncated_bytes",
    )

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.output = b""
        self.cwd = ""
        self.seconds = 0.0
        self.timed_out = False
        self.killed = False
        self.truncated_bytes = 0
        self.shell_restarted = False


class Command:
    """The command that a session is running."""

    __slots__ = (
        "cancelled",
        "capture",
        "command",
        "done",
        "number",
        "on_output",
        "outcome",
        "started",
        "timeout",
        "timer",
    )

    def __init__(
        self,
        command: bytes,
        timeout: float,
        max_output: int,
        on_output: Callable[[bytes], None] | None,
        done: Callable[[Outcome | SandboxError], None],
    ) -> None:
        self.command = command
        self.timeout = timeout
        self.capture = Capture(max_output)
        self.on_output = on_output
        self.done = done
        self.number = ""
        self.outcome = Outcome()
        self.started = monotonic()
        self.timer: Timer | None = None
        self.cancelled = False
