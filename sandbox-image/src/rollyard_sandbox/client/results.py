"""The results that the client returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command, a program or a cell.

    Attributes:
        exit_code: The exit code as shells show it (128 + signal), or None if the process ended unobserved.
        output: Standard output and error in order. If bytes were left out, a line in the middle says so.
        cwd: The working directory afterwards.
        seconds: The wall time in the sandbox, in seconds.
        timed_out: Whether the time limit passed. `output` then holds what was printed before.
        killed: Whether SIGKILL was needed to end it.
        truncated_bytes: The number of bytes of output that were left out.
        shell_restarted: Whether the state of the shell (variables, functions, jobs) or the kernel was lost.
        result: The text of an IPython cell's last expression, or "" if it has none.
    """

    exit_code: int | None
    output: bytes
    cwd: str
    seconds: float
    timed_out: bool
    killed: bool
    truncated_bytes: int
    shell_restarted: bool
    result: str = ""

    def text(self) -> str:
        """Return the output as text. Bytes that are not UTF-8 become U+FFFD."""
        return self.output.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class EvalPlace:
    """A private place for an evaluation, which no program that ran before could write to.

    Attributes:
        folder: The absolute path of the place, as programs of the sandbox see it. The others lie in it.
        home: The path of an empty folder.
        tmp: The path of an empty folder.
        reward_file: The path of an empty file.
        sabotage: The evidence that programs of the sandbox have filled or locked folders which could be
            written to when it started, one entry for each folder.
        environment: The variables of the sandbox.
    """

    folder: str
    home: str
    tmp: str
    reward_file: str
    sabotage: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class FileContent:
    """A part of a file.

    Attributes:
        data: The bytes from `offset` on.
        offset: The offset at which `data` begins, in bytes.
        size: The file's size in bytes.
        mode: The file's permission bits.
    """

    data: bytes
    offset: int
    size: int
    mode: int

    @property
    def complete(self) -> bool:
        """Return whether `data` is the whole file."""
        return self.offset == 0 and len(self.data) == self.size

    def text(self) -> str:
        """Return the data as text. Bytes that are not UTF-8 become U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One entry of a directory. `kind` is "file", "directory", "symlink" or "other"."""

    name: str
    kind: str
    size: int
    mode: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The information that the server gives about itself.

    Attributes:
        pid: The server's pid in its own pid namespace.
        protocol: The version of the protocol.
        sessions: The names of the bash sessions that exist.
        python: The path and version of the interpreter.
        ipython: Whether ipykernel and jupyter_client are importable.
        lease_seconds_left: The seconds until the lease ends, or None if there is no lease.
        workdir: The directory in which sessions start.
    """

    pid: int
    protocol: int
    sessions: tuple[str, ...]
    python: str
    ipython: bool
    lease_seconds_left: float | None
    workdir: str


def variables_of(text: str) -> dict[str, str]:
    """Return the variables that `text` holds in the form of `env -0`: NAME=VALUE, separated by NULs."""
    pairs = (line.partition("=") for line in text.split("\0"))
    return {name: value for name, equals, value in pairs if name and equals}
