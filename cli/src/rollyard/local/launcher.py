"""Runs a command that dies with its parent: `python launcher.py PARENT_PID COMMAND…`.

A program of its own, because setting the parent-death signal between fork and exec of a
process with threads is not safe. Standard library only; it replaces itself by the command.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks the kernel for SIGKILL at the parent's death, then becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
