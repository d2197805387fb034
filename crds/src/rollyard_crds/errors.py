"""The root of the exceptions of this package. Each exception stands beside the code that raises it."""

from __future__ import annotations


class CrdsError(Exception):
    """The base class of every exception of this package.

    Most of them are also a ValueError, because pydantic makes one in a validator a problem of the field.
    """

    reason: str = "CrdsError"
    """A CamelCase word for programs. It is stable."""

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason
