"""The limit on the files that this process may have open, to which connections count."""

from __future__ import annotations

import resource


def open_many_files() -> None:
    """Raise the limit on open files to the permitted maximum."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
