"""Starting a command: a program in the protections, with descriptors of its own."""

from __future__ import annotations

import os
import signal
import termios

from rollyard_sandbox.isolation.protections import NOT_CONFINED
from rollyard_sandbox.isolation.system_calls import Calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final

    from rollyard_sandbox.isolation.protections import Protections

# Python handles or ignores some of these. A program still ignores what the process that executed it ignored.
_DEFAULTED: Final = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGPIPE,
    signal.SIGXFSZ,
)


def launch(
    argv: list[str],
    environment: Mapping[str, str],
    cwd: str,
    protections: Protections,
    descriptors: tuple[int, int, int],
    *,
    terminal: bool = False,
    inherited: tuple[int, ...] = (),
) -> int:
    """Start a program in a session of its own, and return the number of its process.

    Args:
        argv: The program and its arguments. A name without a slash is looked up in the environment's PATH.
        environment: The program's environment.
        cwd: The folder in which it starts.
        protections: The protections that it enters.
        descriptors: Its standard input, output and error, all above 2.
        terminal: Whether its standard input is a terminal, which becomes that of its session.
        inherited: Further descriptors, which it has under the same numbers.

    Raises:
        OSError: It cannot be started. The `filename` is the program, the folder, or NOT_CONFINED if the
            kernel refused a protection.
        ValueError: An argument or a variable cannot be passed to a program.
    """
    calls = Calls()
    calls.add("setsid")
    if terminal:
        calls.add("ioctl", descriptors[0], termios.TIOCSCTTY, 0)
    for number, descriptor in enumerate(descriptors):
        calls.add("dup3", descriptor, number, 0)
    calls.purpose = cwd
    calls.add("chdir", calls.text(cwd))
    calls.default_signals(_DEFAULTED)
    calls.close_others(inherited)
    with protections.starting():
        protections.add_to(calls, cwd)
        calls.purpose = argv[0]
        calls.unblock_signals()
        arguments, variables = calls.texts(argv), calls.texts(_variables(environment))
        for path in _places(argv[0], environment):
            calls.add("execve", calls.text(path), arguments, variables, may_fail=True)
        return calls.start()


def open_terminal(window: tuple[int, int]) -> tuple[int, int]:
    """Open a terminal without echo, translation of output and flow control.

    Bash remembers the modes that it starts with, and restores them whenever a signal ends a program.

    Args:
        window: The rows and columns.

    Returns:
        The server's end and the programs' end. Programs inherit neither.

    Raises:
        OSError: There are too many terminals.
    """
    master, terminal = os.openpty()
    termios.tcsetwinsize(terminal, window)
    modes = termios.tcgetattr(terminal)
    modes[0] = (modes[0] | termios.ICRNL) & ~(termios.IXON | termios.IXOFF)
    modes[1] &= ~termios.OPOST
    modes[3] |= termios.ICANON | termios.ISIG
    modes[3] &= ~(termios.ECHO | termios.ECHOE | termios.ECHOK | termios.ECHONL | termios.TOSTOP)
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
    return master, terminal


def refused(error: Exception) -> bool:
    """Return whether a protection, and not the program or its arguments, kept a program from starting."""
    return isinstance(error, OSError) and error.filename == NOT_CONFINED


def _variables(environment: Mapping[str, str]) -> list[str]:
    for name in environment:
        if not name or "=" in name:
            raise ValueError(f"illegal environment variable name {name!r}")
    return [f"{name}={value}" for name, value in environment.items()]


def _places(program: str, environment: Mapping[str, str]) -> list[str]:
    if "/" in program:
        return [program]
    # os.get_exec_path does the same with a filter of warnings.
    folders = environment.get("PATH", os.defpath).split(os.pathsep)
    return [os.path.join(folder, program) for folder in folders]
