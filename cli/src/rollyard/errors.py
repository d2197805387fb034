"""The exceptions that the calls of a client raise, and those that end a command.

Each exception of a command has one line that says what is wrong and what to do.
"""

from __future__ import annotations

from rollyard_client.errors import (
    AnswerInvalid,
    Conflict,
    ContextError,
    Invalid,
    JobFailed,
    JobReplaced,
    NotFound,
    RollyardError,
    ServerUnavailable,
    StorageFull,
    TokenizerDiffers,
    TooMany,
    Unauthorized,
    WaitTimeout,
)
from rollyard_drivers.host.errors import CannotStart, HostError, StartFailed

__all__ = [
    "AnswerInvalid",
    "CannotStart",
    "CliError",
    "Conflict",
    "ContextError",
    "Invalid",
    "InvalidInput",
    "JobFailed",
    "JobReplaced",
    "LookupFailed",
    "NotFound",
    "RollyardError",
    "ServerUnavailable",
    "StartFailed",
    "StorageFull",
    "TokenizerDiffers",
    "TooMany",
    "Unauthorized",
    "UsageProblem",
    "WaitTimeout",
]


class CliError(HostError):
    """An error that ends the command with exit status 1 and one line."""


class UsageProblem(CliError):
    """Raised if the command line asks for something impossible. The exit status is 2."""

    reason = "Usage"


class LookupFailed(CliError):
    """Raised if there is no object or file with that name."""

    reason = "NotFound"


class InvalidInput(CliError):
    """Raised if the content of a file or a request is refused."""

    reason = "InvalidInput"
