"""Errors that end a command: one line that says what is wrong and what to do."""

from __future__ import annotations


class CliError(Exception):
    """Ends the command with exit status 1 and this one line."""

    reason = "CommandFailed"


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


class HomeInUse(CliError):
    """Another `rollyard up` runs on this home."""

    reason = "HomeInUse"


class HomeUnusable(CliError):
    """The home folder cannot be made or written."""

    reason = "HomeUnusable"


class StartFailed(CliError):
    """A process did not become ready in time, or ended at once."""

    reason = "StartFailed"


class CannotStart(CliError):
    """This machine lacks what a backend needs; the message says what, and what to do."""

    reason = "CannotStart"


class JobFailed(CliError):
    """The job that was waited for ended as Failed or Cancelled."""

    reason = "JobFailed"
