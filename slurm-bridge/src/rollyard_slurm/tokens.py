"""The file with the token of one job's workers, on storage that the nodes share."""

from __future__ import annotations

import os
from pathlib import Path


def write_token(path: Path, token: str) -> None:
    """Writes it whole or not at all, mode 0600 in a folder of mode 0700; nothing if it stands there.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        if path.read_text() == token:
            return
    except OSError:
        pass
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.write(token)
        file.flush()
        os.fsync(descriptor)
    scratch.replace(path)
