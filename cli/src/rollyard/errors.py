"""Errors that end a command. Each has one line that says what is wrong and what to do."""

from __future__ import annotations

from rollyard_drivers.host.errors import CannotStart, HostError, StartFailed

__all__ = [
    "CannotStart",
    "CliError",
    "InvalidInput",
    "LookupFailed",
    "StartFailed",
    "UsageProblem",
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
