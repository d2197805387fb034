"""One bash on a pseudo-terminal, and the private channel on which it reports.

A command is run as follows, and nothing can forge or delay the report of its end:

* bash inherits one end of a SOCK_SEQPACKET socket pair and moves it, in pure bash, to a descriptor with
  FD_CLOEXEC: when `{ …; } 64>&-` runs, bash saves descriptor 64 above 10 with that flag, and duplicating a
  descriptor that has the flag keeps it. Therefore programs do not inherit the channel.
* Subshells are forks without exec and do hold it. The kernel stamps every message with its sender's pid
  (SO_PASSCRED), and only messages of the shell's own pid count.
* PROMPT_COMMAND (readonly) sends the exit status with the number of the command, then blocks until it has
  read the number of the next one. Therefore bash does not read the terminal between commands, input that a
  program left over can be flushed before bash takes it for a command, and a stray prompt repeats an old
  number.
* The command itself is one typed line, `\\builtin eval -- $'…'`, at the top level, where `declare` is
  global. A command that is too long for the terminal's line buffer (4,096 bytes) is read from a memory file.
* A command to which nobody will send input gets `</dev/null` after its `eval`, so that a program that reads
  standard input ends and does not wait for the time limit. Bash restores the terminal afterwards, at an
  error or a SIGINT, too. A command with `exec` keeps the terminal: `exec bash` takes the place of the shell.
* Output is complete when, after the report, reading the non-blocking master fails with EAGAIN: since Linux
  4.5 n_tty flushes the terminal's pending work before it returns that error.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import struct
import termios

from rollyard_sandbox.errors import LaunchError
from rollyard_sandbox.execution.launching import launch, open_terminal, refused
from rollyard_sandbox.execution.processes import prefer_for_oom

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ptyprocess import PtyProcess

    from rollyard_sandbox.isolation.protections import Protections

CHANNEL: Final = 11  # The descriptor of the channel in bash.
_MEMORY: Final = 12  # The descriptor of the memory file in bash.
_TIOCGPTPEER: Final = 0x5441  # This opens the slave without a path, in any mount namespace (Linux 4.13).
_CREDENTIALS: Final = struct.Struct("3i")
_TYPED_LIMIT: Final = 3500  # bytes; the terminal's line buffer holds 4,096
_WINDOW: Final = (50, 512)  # Rows and columns. The window is wide to keep programs from wrapping lines.

_REPORT: Final = (
    r"""{ \builtin printf '%s %s' "$?" "${__ry-}" >&CHANNEL; \builtin read -r -N 8 -u CHANNEL __ry; }"""
    r""" 2>/dev/null"""
).replace("CHANNEL", str(CHANNEL))
_FAREWELL: Final = (
    r"""{ \builtin printf 'x%s %s %s' "$?" "${__ry-}" "$PWD" >&CHANNEL; } 2>/dev/null""".replace(
        "CHANNEL", str(CHANNEL)
    )
)
_INIT: Final = (
    "set +o history +H; unset HISTFILE MAILCHECK; export -n PS1 PS2; PS1= PS2=; shopt -u checkwinsize; "
    "{{ exec {channel}>&10; }} {inherited_channel}>&- || exec {channel}>&{inherited_channel}; "
    "{{ exec {memory}<&10; }} {inherited_memory}<&- || exec {memory}<&{inherited_memory}; "
    "exec {inherited_channel}>&- {inherited_memory}<&-; "
    "trap {farewell} EXIT; readonly PROMPT_COMMAND={report}\n"
)

_EXEC: Final = re.compile(rb"(?<![\w-])exec\s")  # The builtin, not the `-exec` of find.
_NO_INPUT: Final = b" </dev/null"

_PLAIN: Final = bytes(range(0x20, 0x7F)).translate(None, b"'\\")
_ESCAPES: Final = {code: b"\\%03o" % code for code in range(256) if code not in _PLAIN} | {
    ord("\n"): b"\\n",
    ord("'"): b"\\'",
    ord("\\"): b"\\\\",
}


def single_quoted(text: str) -> str:
    """Return `text` quoted as one word for a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def typed_line(command: bytes) -> bytes | None:
    """Return the line that makes bash run `command`, without its end, or None if it is too long to type.

    Everything except printable ASCII is escaped, because other bytes may mean something to the terminal.
    """
    if len(command) > _TYPED_LIMIT:
        return None
    if command.translate(None, _PLAIN):
        escapes = _ESCAPES
        command = b"".join([escapes.get(code) or b"%c" % code for code in command])
        if len(command) > _TYPED_LIMIT:
            return None
    return b"\\builtin eval -- $'%b'" % command


class Report:
    """A message from the shell with the exit status of command `number`.

    `leaving` is True when the shell exits; `cwd` is then its working directory.
    """

    def __init__(self, status: int, number: str, leaving: bool, cwd: str) -> None:
        self.status = status
        self.number = number
        self.leaving = leaving
        self.cwd = cwd


def parse_report(message: bytes) -> Report | None:
    """Return the report in a channel message, or None if the message is not a report."""
    leaving = message.startswith(b"x")
    fields = message[leaving:].split(b" ", 2)
    if len(fields) < 2 or not fields[0].isdigit():
        return None
    cwd = os.fsdecode(fields[2]) if leaving and len(fields) == 3 else ""
    return Report(int(fields[0]), fields[1].decode("ascii", "replace"), leaving, cwd)


class Shell:
    """A running bash. The session that owns it watches `master` and `channel`, and reaps `pid`."""

    def __init__(self, process: PtyProcess, slave: int, channel: socket.socket, memory: int) -> None:
        self._process = process
        self.pid: int = process.pid
        self.master: int = process.fd
        self.slave = slave
        self.channel = channel
        self._memory = memory
        self._terminal = os.fstat(slave).st_rdev
        self._clean = fcntl.ioctl(slave, termios.TCGETS, bytes(60))
        self._input = f"/proc/{self.pid}/fd/0"

    @classmethod
    def spawn(cls, cwd: str, environment: dict[str, str], protections: Protections) -> Shell:
        """Start bash in `cwd`. It is ready when its first report arrives.

        Raises:
            LaunchError: There is no bash, no pseudo-terminal, or no room for another process.
        """
        from shutil import which

        from ptyprocess import PtyProcess

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        opened: list[int] = []
        try:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            ours.setblocking(False)
            # The numbers are well above 10, because bash then saves them at exactly 10.
            channel_fd = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 64)
            opened.append(channel_fd)
            memory = os.memfd_create("command")
            memory_fd = fcntl.fcntl(memory, fcntl.F_DUPFD_CLOEXEC, 64)
            opened.append(memory_fd)
            os.close(memory)
            opened += open_terminal(_WINDOW)
            *_, master, terminal = opened
            bash = which("bash")  # The server's own PATH decides, not that of a task.
            if bash is None:
                raise FileNotFoundError(errno.ENOENT, "there is no bash in the PATH", "bash")
            pid = launch(
                [bash, "--norc", "--noprofile", "--noediting", "-i"],
                environment,
                cwd,
                protections,
                (terminal, terminal, terminal),
                terminal=True,
                inherited=(channel_fd, memory_fd),
            )
        except (OSError, ValueError) as error:
            for fd in opened:
                os.close(fd)
            ours.close()
            reason = "ConfinementFailed" if refused(error) else None
            if which("bash", path=environment.get("PATH")) is None:
                reason = "ProgramNotFound"
            raise LaunchError(f"bash could not be started in {cwd}: {error}", reason=reason) from error
        finally:
            theirs.close()
        process = PtyProcess(pid, master)
        os.close(channel_fd)
        os.set_blocking(master, False)
        prefer_for_oom(pid)
        slave = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
        os.close(terminal)
        shell = cls(process, slave, ours, memory_fd)
        init = _INIT.format(
            channel=CHANNEL,
            memory=_MEMORY,
            inherited_channel=channel_fd,
            inherited_memory=memory_fd,
            farewell=single_quoted(_FAREWELL),
            report=single_quoted(_REPORT),
        )
        os.write(shell.master, init.encode())
        return shell

    def reads_terminal(self) -> bool:
        """Return whether the shell's standard input is still our terminal (`exec < file` would change it)."""
        try:
            return os.stat(self._input).st_rdev == self._terminal
        except OSError:
            return False

    def run(self, command: bytes, number: str, *, reads_input: bool) -> None:
        """Make the idle shell run `command`. Its report will carry `number` (8 characters).

        Without `reads_input`, its standard input is at its end, and not the terminal.
        """
        self.forget_input()
        line = typed_line(command)
        if line is None:
            os.ftruncate(self._memory, 0)
            view, offset = memoryview(command), 0
            while offset < len(view):
                offset += os.pwrite(self._memory, view[offset:], offset)
            line = b'\\builtin eval -- "$(</proc/self/fd/%d)"' % _MEMORY
        if not (reads_input or _EXEC.search(command)):
            line += _NO_INPUT
        os.write(self.master, line + b"\n")
        self.channel.send(number.encode())

    def probe(self, number: str) -> None:
        """Make the idle shell read an empty line and report with `number` (8 characters). `$?` is kept."""
        os.write(self.master, b"\n")
        self.channel.send(number.encode())

    def forget_input(self) -> None:
        """Drop the input that a program left unread, before the idle shell takes it for a command."""
        self.reset_terminal()
        termios.tcflush(self.slave, termios.TCIFLUSH)

    def receive(self) -> bytes | None:
        """Return the next message of the shell itself. Messages of other processes are dropped.

        Returns:
            The message, None if there is none now, or b"" if the channel is closed.
        """
        while True:
            try:
                data, ancillary, _, _ = self.channel.recvmsg(8192, 64)
            except BlockingIOError:
                return None
            except OSError:
                return b""
            if not data:
                return b""
            for level, kind, payload in ancillary:
                if (
                    level == socket.SOL_SOCKET
                    and kind == socket.SCM_CREDENTIALS
                    and _CREDENTIALS.unpack(payload[: _CREDENTIALS.size])[0] == self.pid
                ):
                    return data

    def cwd(self) -> str | None:
        """Return the shell's working directory, or None if it is not known."""
        try:
            return os.readlink(f"/proc/{self.pid}/cwd")
        except OSError:
            return None

    def reset_terminal(self) -> None:
        """Undo what programs have done to the terminal's modes."""
        modes = fcntl.ioctl(self.slave, termios.TCGETS, bytes(60))
        if modes != self._clean:
            fcntl.ioctl(self.slave, termios.TCSETS, self._clean)
            termios.tcflow(self.slave, termios.TCOON)

    def unstick(self) -> None:
        """Resume stopped output and a stopped shell. Otherwise a signal could not take effect."""
        fcntl.ioctl(self.slave, termios.TCSETS, self._clean)
        termios.tcflow(self.slave, termios.TCOON)
        os.kill(self.pid, signal.SIGCONT)

    def foreground(self) -> int:
        """Return the process group in the foreground of the terminal, or 0 if there is none."""
        try:
            return os.tcgetpgrp(self.master)
        except OSError:
            return 0

    def is_fresh_shell(self) -> bool | None:
        """Check, after the shell's process has replaced itself, what it is now.

        Returns:
            Whether it is an interactive shell at its prompt. None while that is not known, because exec is
            still setting up the new program.
        """
        try:
            with open(f"/proc/{self.pid}/cmdline", "rb") as file:
                arguments = file.read().split(b"\0")[:-1]
            program = os.path.basename(os.readlink(f"/proc/{self.pid}/exe")).removesuffix(" (deleted)")
        except OSError:
            return False
        if not arguments:
            return None
        shells = {"bash", "sh", "dash", "zsh", "ash", "ksh", "mksh", "fish", "busybox"}
        return program in shells and all(
            argument.startswith(b"--") or (argument.startswith(b"-") and b"c" not in argument)
            for argument in arguments[1:]
        )

    def environment(self) -> dict[str, str] | None:
        """Return the environment with which the process was executed, or None if it cannot be read."""
        try:
            with open(f"/proc/{self.pid}/environ", "rb") as file:
                pairs = (os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0") if entry)
                return {name: value for name, _, value in pairs}
        except OSError:
            return None

    def close(self) -> None:
        """Close the descriptors. The process must have ended or been killed."""
        self._process.closed = True  # Its own `close` would sleep and send signals.
        self._process.fileobj.close()
        os.close(self.slave)
        os.close(self._memory)
        self.channel.close()
