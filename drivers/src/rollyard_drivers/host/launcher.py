"""Run a command that dies with its parent: `python launcher.py PARENT_PID [--guard] COMMAND…`.

This is a separate program because it is not safe to set the parent-death signal between fork and exec of a
process that has threads. It uses the standard library only, and it replaces itself by the command.

With `--guard`, the launcher stays beside the command, which has subprocesses of its own. However the parent
ends, even by `kill -9`, the guard kills the whole session. When the command ends, the guard ends in the same
way, and the parent ends the processes that are left. The guard passes the signals to stop on to the command.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _die_with(parent: int, number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # The parent died before the request.
        sys.exit(1)


def main() -> None:
    """Ask the kernel for a signal at the parent's death, and then become (or guard) the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if command[0] == "--guard":
        _guard(parent, command[1:])
        return
    _die_with(parent, signal.SIGKILL)
    os.execv(command[0], command)


def _guard(parent: int, command: list[str]) -> None:
    # The signals stay blocked until `sigwait` asks for them, so none is lost between the fork and the first
    # wait.
    waited = {*_PASSED_ON, signal.SIGCHLD, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    _die_with(parent, signal.SIGUSR1)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
        try:
            _die_with(guard, signal.SIGKILL)
            os.execv(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", flush=True)
        os._exit(127)
    while True:
        number = signal.sigwait(waited)
        if number == signal.SIGUSR1 and os.getppid() != parent:
            # This ends the guard itself, too, because no process is left to inform.
            os.killpg(guard, signal.SIGKILL)
        if number in _PASSED_ON:
            os.kill(child, number)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
    if -code == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would raise an exception.
    os.kill(guard, -code)
    os._exit(128 - code)


if __name__ == "__main__":
    main()
