"""Stand ready for a program of this installation: `python -m rollyard_drivers.host.ready_process PROGRAM …`.

The process imports PROGRAM and the further modules that are named, and then waits for one line on its
standard input: a JSON list of the program's arguments. Until the line comes, the process has no token, no
connection and no file of a job. It runs the program once and ends with it, and it ends without running
anything when its input ends.

With `-- OPTION …` after the modules, the process calls the program's `stand_ready` with these options and a
function that waits for the line. This lets the program prepare what every job on this machine needs.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
from typing import Final

from rollyard_crds.base import build_all

MODULE: Final = "rollyard_drivers.host.ready_process"
MAX_LINE_BYTES: Final = 1 << 20


def main() -> int:
    """Import, wait, run the program, and return its exit status."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    (program, *modules), options = words[:end], words[end + 1 :]
    gc.disable()  # Imports make hardly any garbage, and looking for it takes a fifth of their time.
    importlib.import_module(f"{program}.__main__")
    for name in modules:
        # They only save time. A module that this installation lacks is the program's own concern.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    build_all()
    gc.freeze()
    gc.enable()
    main_module = sys.modules[f"{program}.__main__"]
    if options:
        return int(main_module.stand_ready(options, lambda: _arguments(program)))
    arguments = _arguments(program)
    return 0 if arguments is None else int(main_module.main(arguments))


def _arguments(program: str) -> list[str] | None:
    """Wait for the program's arguments, and return them, or None if the input ended without them."""
    line = sys.stdin.buffer.readline(MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        return None
    arguments = [str(argument) for argument in json.loads(line)]
    # Nothing else is read, and the program finds the input that it has without this module.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.argv = [program, *arguments]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
