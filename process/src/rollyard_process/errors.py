"""The root of the exceptions of this package."""

from __future__ import annotations


class ProcessError(Exception):
    """The base class of every exception of this package.

    Args:
        message: What is wrong and what to do, in one line.
        reason: The stable name of the error's kind, if that is not the one of the class.
    """

    reason: str = "ProcessError"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or self.reason
