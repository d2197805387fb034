"""The errors that end a driver's command. Each is one line that says what is wrong and what to do."""

from __future__ import annotations


class HostError(Exception):
    """An error that ends the command with this one line.

    Args:
        message: The line.
        reason: The stable name of the error's kind, if that is not the one of the class. It is HomeInUse if
            another driver uses this home folder, and HomeUnusable if the folder cannot be created or written.
    """

    reason = "CommandFailed"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class StartFailed(HostError):
    """A process did not become ready in time, or ended immediately."""

    reason = "StartFailed"


class CannotStart(HostError):
    """This machine lacks something that a backend needs. The message says what it is and what to do."""

    reason = "CannotStart"
