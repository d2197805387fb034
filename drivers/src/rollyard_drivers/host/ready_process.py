"""Stand ready for a program of this installation: `python -m rollyard_drivers.host.ready_process PROGRAM …`.

The process imports PROGRAM and the further modules that are named, and then waits for one line on its
standard input: a JSON list of the program's arguments. Until the line comes, the process has no token, no
connection and no file of a job. It runs the program once and ends with it, and it ends without running
anything when its input ends.
"""

import contextlib
import importlib
import json
import os
import sys

MODULE = "rollyard_drivers.host.ready_process"
MAX_LINE_BYTES = 1 << 20


def main() -> int:
    """Import, wait, run the program, and return its exit status."""
    program, *modules = sys.argv[1:]
    importlib.import_module(f"{program}.__main__")
    for name in modules:
        # They only save time. A module that this installation lacks is the program's own concern.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    line = sys.stdin.buffer.readline(MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        return 0
    arguments = [str(argument) for argument in json.loads(line)]
    # Nothing else is read, and the program finds the input that it has without this module.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.argv = [program, *arguments]
    return int(sys.modules[f"{program}.__main__"].main(arguments))


if __name__ == "__main__":
    sys.exit(main())
