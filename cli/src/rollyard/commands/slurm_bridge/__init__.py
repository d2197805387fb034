"""`rollyard slurm-bridge`, which runs the same jobs and pools on a Slurm cluster."""

from rollyard.commands.slurm_bridge.group import command

__all__ = ["command"]
