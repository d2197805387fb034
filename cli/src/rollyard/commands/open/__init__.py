"""The command `rollyard open`, which signs a browser in."""

from rollyard.commands.open.opening import command

__all__ = ["command"]
