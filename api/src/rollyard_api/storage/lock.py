"""A lock that permits one control plane per state folder, where the database is a SQLite file in it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rollyard_api.core.errors import ControlPlaneError

FILE_NAME: Final = "lock"


class StateFolderInUse(ControlPlaneError):
    """Another process uses this state folder."""


@contextmanager
def held(state_dir: Path) -> Iterator[None]:
    """Hold the folder's lock. The kernel frees it when the process ends, even if it is killed.

    Raises:
        StateFolderInUse: Another process holds the lock.
    """
    with (state_dir / FILE_NAME).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateFolderInUse(
                f"another control plane uses {state_dir}: stop it, or choose another --state-dir "
                "(several replicas need a PostgreSQL --db)"
            ) from error
        yield
