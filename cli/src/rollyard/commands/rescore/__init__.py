"""The command `rollyard rescore`: its options, and the evaluation of kept trajectories."""

from rollyard.commands.rescore.options import command

__all__ = ["command"]
