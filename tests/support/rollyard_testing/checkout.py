"""The files of this checkout, as git knows them."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def files(*patterns: str, folder: Path = ROOT) -> list[str]:
    """Return the files below a folder that git would commit, relative to it; a file may have been removed.

    Git answers another user than the owner of the checkout, too.
    """
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run([*command, *patterns], cwd=folder, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()
