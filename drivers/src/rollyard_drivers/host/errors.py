"""Errors that end a driver's command: one line that says what is wrong and what to do."""

from __future__ import annotations


class HostError(Exception):
    """Ends the command with this one line."""

    reason = "CommandFailed"


class HomeInUse(HostError):
    """Another driver runs on this home."""

    reason = "HomeInUse"


class HomeUnusable(HostError):
    """The home folder cannot be made or written."""

    reason = "HomeUnusable"


class StartFailed(HostError):
    """A process did not become ready in time, or ended at once."""

    reason = "StartFailed"


class CannotStart(HostError):
    """This machine lacks what a backend needs; the message says what, and what to do."""

    reason = "CannotStart"
