"""Errors that end a command. Each has one line that says what is wrong and what to do."""

from __future__ import annotations

from typing import Final

from rollyard_drivers.host.errors import CannotStart, HomeInUse, HomeUnusable, HostError, StartFailed

__all__ = [
    "CannotStart",
    "CliError",
    "HomeInUse",
    "HomeUnusable",
    "InvalidInput",
    "JobFailed",
    "LookupFailed",
    "MissingExtra",
    "NoServer",
    "StartFailed",
    "UsageProblem",
]

NAMED_MODULES: Final = 4
"""The number of missing modules that a message names."""


class CliError(HostError):
    """The base class of errors that end the command with exit status 1 and one line."""


class UsageProblem(CliError):
    """Raised if the command line asks for something impossible. The exit status is 2."""

    reason = "Usage"


class MissingExtra(UsageProblem):
    """Raised if a package is missing that an extra of Rollyard installs. The message names the extra."""

    reason = "MissingExtra"

    def __init__(self, purpose: str, extra: str, modules: tuple[str, ...]) -> None:
        """Make the error from what needs the extra, the name of the extra, and the missing modules."""
        named = ", ".join(modules[:NAMED_MODULES])
        more = f" and {len(modules) - NAMED_MODULES} more" if len(modules) > NAMED_MODULES else ""
        super().__init__(
            f"{purpose} needs packages that are not installed here ({named}{more}): "
            f"pip install 'rollyard[{extra}]'"
        )
        self.extra = extra


class NoServer(CliError):
    """Raised if no server answers at the URL."""

    reason = "NoServer"


class LookupFailed(CliError):
    """Raised if there is no object or file of that name."""

    reason = "NotFound"


class InvalidInput(CliError):
    """Raised if the content of a file or a request is refused."""

    reason = "InvalidInput"


class JobFailed(CliError):
    """Raised if the job that a command waited for ended as Failed or Cancelled."""

    reason = "JobFailed"
