"""A disk without room."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def fill(path: Path) -> None:
    """Take all that is left on a disk, with a file; a repeated call also takes what has become free since."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while os.write(fd, bytes(4096)):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(fd)
