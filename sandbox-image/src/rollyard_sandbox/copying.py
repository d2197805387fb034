"""Copying the runtime out of its own image: `copy-runtime.py TARGET`.

Clusters without image volumes need this. The image's root holds the runtime together with what the container
engine adds (/proc, /dev, /etc), so only the runtime's own entries are copied.
"""

from __future__ import annotations

import os
import shutil
import sys

TYPE_CHECKING = False  # `typing` is slow to import.
if TYPE_CHECKING:
    from typing import Final

ENTRIES: Final = ("copy-runtime.py", "exec-server.py", "lib", "libs", "loader", "python", "site", "venv")


def copy_runtime(source: str, target: str) -> None:
    """Copy the runtime at `source` into the existing folder `target`. Repeating it is harmless.

    Raises:
        OSError: An entry is missing, or cannot be written.
    """
    for name in ENTRIES:
        path, copy = os.path.join(source, name), os.path.join(target, name)
        if os.path.isdir(path):
            shutil.rmtree(copy, ignore_errors=True)  # An interrupted copy may have left it.
            shutil.copytree(path, copy, symlinks=True)
        else:
            shutil.copy2(path, copy, follow_symlinks=False)


def main(source: str, arguments: list[str]) -> int:
    """Run the command line of `copy-runtime.py`, and return the exit status."""
    if len(arguments) != 1 or not os.path.isdir(arguments[0]):
        print("usage: copy-runtime.py TARGET (a folder that exists)", file=sys.stderr)
        return 2
    try:
        copy_runtime(source, arguments[0])
    except OSError as error:
        print(f"copy-runtime.py: {error}", file=sys.stderr)
        return 1
    return 0
