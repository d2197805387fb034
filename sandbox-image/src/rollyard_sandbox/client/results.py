"""What the client hands back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command, a program or a cell ended.

    Attributes:
        exit_code: as shells show it (128 + signal); None where the process ended out of sight.
        output: standard output and error in order; where bytes were left out, a line in the middle says so.
        cwd: the working directory afterwards.
        seconds: wall time in the sandbox.
        timed_out: the time limit passed; `output` holds what came before.
        killed: SIGKILL was needed to end it.
        truncated_bytes: how many bytes of output were left out.
        shell_restarted: the state of the shell (variables, functions, jobs) or the kernel was lost.
        result: IPython only: the text of the cell's last expression, "" where it has none.
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
        """The output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.output.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class EvalPlace:
    """A private place for an evaluation, which no program that ran before could write to.

    Attributes:
        folder: an absolute path, as programs of the sandbox see it; the others lie in it.
        home: an empty folder.
        tmp: an empty folder.
        reward_file: an empty file.
        sabotage: what shows that programs of the sandbox have filled or locked folders which could be written
            to when it started, one entry for each folder.
    """

    folder: str
    home: str
    tmp: str
    reward_file: str
    sabotage: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileContent:
    """A part of a file.

    Attributes:
        data: the bytes from `offset` on.
        offset: where `data` begins.
        size: the file's size in bytes.
        mode: its permission bits.
    """

    data: bytes
    offset: int
    size: int
    mode: int

    @property
    def complete(self) -> bool:
        """Whether `data` is the whole file."""
        return self.offset == 0 and len(self.data) == self.size

    def text(self) -> str:
        """The data as text; bytes that are not UTF-8 become U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One entry of a directory; `kind` is file, directory, symlink or other."""

    name: str
    kind: str
    size: int
    mode: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says about itself.

    Attributes:
        pid: its pid in its own pid namespace.
        protocol: the version of the frames.
        sessions: names of the bash sessions that have been used.
        python: path and version of the interpreter.
        ipython: whether ipykernel and jupyter_client are importable.
        lease_seconds_left: None where there is no lease.
        workdir: the directory in which sessions start.
    """

    pid: int
    protocol: int
    sessions: tuple[str, ...]
    python: str
    ipython: bool
    lease_seconds_left: float | None
    workdir: str
