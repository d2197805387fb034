"""A writer of private files, such as the token of one job's workers."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600 in a folder of mode 0700, either completely or not at all.

    Nothing is written if the file already holds the text.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        if path.read_text() == text:
            return
    except OSError:
        pass
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    scratch.replace(path)
