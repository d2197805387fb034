"""The root of the package's exceptions. This module imports nothing, so that the options need no library."""

from __future__ import annotations


class ControlPlaneError(Exception):
    """The root of all exceptions of `rollyard_api`. The `reason` is stable, and the message is for people.

    The reason is the name of the class, unless the class or the exception has another one.
    """

    reason: str = "InternalError"

    def __init__(self, message: str = "", *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason

    def __init_subclass__(cls) -> None:
        if "reason" not in vars(cls):
            cls.reason = cls.__name__


class OptionInvalid(ControlPlaneError, ValueError):
    """An option, an entry of a list, a file or an address cannot be used, so the program does not start.

    The message names the option, variable, key, field or entry, and says what would be right.
    """

    reason = "InvalidOption"
