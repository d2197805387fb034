"""The command `rollyard open`, which signs a browser in to the page."""

from rollyard.commands.open.link import command

__all__ = ["command"]
