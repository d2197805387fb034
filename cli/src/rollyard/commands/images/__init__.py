"""The command `rollyard images`, which builds images of sandboxes ahead of time."""

from rollyard.commands.images.group import command

__all__ = ["command"]
