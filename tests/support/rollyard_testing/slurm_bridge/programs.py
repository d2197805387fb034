"""Programs that stand in for Slurm's commands."""

from __future__ import annotations

import os
from pathlib import Path

from rollyard_slurm.calls.command_line import SlurmCommands, environment


class Programs:
    """A folder with programs that print what a test gives them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def write(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def commands(self, timeout: float = 20.0) -> SlurmCommands:
        return SlurmCommands(timeout, environment(os.environ), str(self.folder))
