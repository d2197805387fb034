"""The root of the exceptions of this package. Each exception stands beside the code that raises it."""

from __future__ import annotations


class ProcessError(Exception):
    """The base class of every exception of this package."""

    reason: str = "ProcessError"
    """A CamelCase word for programs. It is stable."""
