"""Errors that end a command. Each has one line that says what is wrong and what to do."""

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
    """The base class of errors that end the command with exit status 1 and one line."""


class UsageProblem(CliError):
    """Raised if the command line asks for something impossible. The exit status is 2."""

    reason = "Usage"


class NoServer(CliError):
    """Raised if no server answers at the URL."""

    reason = "NoServer"


class NotFound(CliError):
    """Raised if there is no object or file of that name."""

    reason = "NotFound"


class InvalidInput(CliError):
    """Raised if the content of a file or a request is refused."""

    reason = "InvalidInput"


class JobFailed(CliError):
    """Raised if the job that a command waited for ended as Failed or Cancelled."""

    reason = "JobFailed"
