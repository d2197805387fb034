"""The data of a running command, its bounded output, and the way in which it ended."""

from __future__ import annotations

from collections import deque
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rollyard_sandbox.errors import SandboxError
    from rollyard_sandbox.execution.event_loop import Timer


class Capture:
    """A capture that keeps at most `limit` of the added bytes: half from the head, half from the tail."""

    __slots__ = ("_head", "_head_room", "_tail", "_tail_limit", "_tail_size", "total")

    def __init__(self, limit: int) -> None:
        self._head = bytearray()
        self._head_room = limit - limit // 2
        self._tail: deque[bytes] = deque()
        self._tail_limit = limit // 2
        self._tail_size = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        """Add bytes in order."""
        self.total += len(data)
        if self._head_room:
            part = data[: self._head_room]
            self._head += part
            self._head_room -= len(part)
            data = data[len(part) :]
            if not data:
                return
        tail = self._tail
        tail.append(data)
        self._tail_size += len(data)
        while tail and self._tail_size - len(tail[0]) >= self._tail_limit:
            self._tail_size -= len(tail.popleft())

    def finish(self) -> tuple[bytes, int]:
        """Return the bytes that were kept, and the number of bytes left out.

        If bytes were left out, a line in the middle says so.
        """
        tail = b"".join(self._tail)
        if len(tail) > self._tail_limit:
            tail = tail[len(tail) - self._tail_limit :]
        omitted = self.total - len(self._head) - len(tail)
        if not omitted:
            return bytes(self._head) + tail, 0
        return b"%b\n[... %d bytes omitted ...]\n%b" % (bytes(self._head), omitted, tail), omitted


class Outcome:
    """The outcome of a command. Its fields are those of `client.results.ExecResult`."""

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
    """A command of a session.

    Args:
        command: The text for bash.
        timeout: The seconds after which it is interrupted.
        max_output: The bytes of output that are kept.
        on_output: Called with output as it comes.
        done: Called once, with the outcome or the reason why the command could not run.
        reads_input: Whether its standard input is the terminal. Otherwise it is at its end.
    """

    def __init__(
        self,
        command: bytes,
        timeout: float,
        max_output: int,
        on_output: Callable[[bytes], None] | None,
        done: Callable[[Outcome | SandboxError], None],
        *,
        reads_input: bool = False,
    ) -> None:
        self.command = command
        self.timeout = timeout
        self.capture = Capture(max_output)
        self.on_output = on_output
        self.done = done
        self.reads_input = reads_input
        self.number = ""
        self.outcome = Outcome()
        self.started = monotonic()
        self.timer: Timer | None = None
        self.cancelled = False
