"""The errors that end a driver's command. Each is one line that says what is wrong and what to do."""

from __future__ import annotations


class HostError(Exception):
    """An error that ends the command with this one line."""

    reason = "CommandFailed"


class HomeInUse(HostError):
    """Another driver uses this home folder."""

    reason = "HomeInUse"


class HomeUnusable(HostError):
    """The home folder cannot be created or written."""

    reason = "HomeUnusable"


class StartFailed(HostError):
    """A process did not become ready in time, or ended immediately."""

    reason = "StartFailed"


class CannotStart(HostError):
    """This machine lacks something that a backend needs. The message says what it is and what to do."""

    reason = "CannotStart"
