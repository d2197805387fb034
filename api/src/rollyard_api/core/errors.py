"""The root of the package's exceptions."""

from __future__ import annotations


class ControlPlaneError(Exception):
    """The root of all exceptions of `rollyard_api`. The `reason` is stable, and the message is for people."""

    reason: str = "InternalError"
