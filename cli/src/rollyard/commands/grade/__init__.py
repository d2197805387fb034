"""The command `rollyard grade`: its options, and the evaluation of answers that stand in no rollout."""

from rollyard.commands.grade.options import command

__all__ = ["command"]
