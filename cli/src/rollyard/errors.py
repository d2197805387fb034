"""Errors that end a command: one line that says what is wrong and what to do."""

from __future__ import annotations

from rollyard_drivers.host.errors import CannotStart, HomeInUse, HomeUnusable, HostError, StartFailed

__all__ = [
    "CannotStart",
    "CliError",
    "HomeInUse",
    "HomeUnusable",
    "InvalidInput",
    "JobFailed",
    "NoServer",
    "NotFound",
    "StartFailed",
    "UsageProblem",
]


class CliError(HostError):
    """Ends the command with exit status 1 and this one line."""


class UsageProblem(CliError):
    """The command line asks for something impossible; exit status 2."""

    reason = "Usage"


class NoServer(CliError):
    """Nothing answers at the URL."""

    reason = "NoServer"


class NotFound(CliError):
    """There is no object or file of that name."""

    reason = "NotFound"


class InvalidInput(CliError):
    """A file holds something that is refused."""

    reason = "InvalidInput"


class JobFailed(CliError):
    """The job that was waited for ended as Failed or Cancelled."""

    reason = "JobFailed"
