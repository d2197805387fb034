"""Bare processes in place of sandboxes. They provide no isolation and are used only if asked for by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rollyard_pipeline.sandboxes.errors import ImageNotUsable
from rollyard_pipeline.sandboxes.host.processes import kill_tree
from rollyard_pipeline.sandboxes.host.records import SOCKET_NAME, SandboxRecord
from rollyard_pipeline.sandboxes.interface import SandboxKey
from rollyard_pipeline.sandboxes.starters.base import START_SECONDS, StartedSandbox, Starter, server_code
from rollyard_pipeline.sandboxes.starters.launch import SandboxLaunch, start

WARNING: Final = (
    "--sandbox process: commands of the model run as bare processes of user %d on this machine. They see its "
    "files, its network and each other. Use it only with models and tasks that you trust."
)


class ProcessStarter(Starter):
    """Starts the exec server as an ordinary process with a private work folder."""

    name = "process"

    def workdir(self, folder: Path) -> str:
        """Return the work folder, which lies on this machine inside the sandbox's own folder."""
        return str(folder / "work")

    def check(self, key: SandboxKey) -> None:
        """Raise ImageNotUsable for every image and every folder, because bare processes have none."""
        if key.image is not None:
            raise ImageNotUsable(
                f"sandbox.image {key.image!r}: bare processes use this machine's own system; leave "
                "image out, or use --sandbox bubblewrap"
            )
        if key.folders:
            raise ImageNotUsable(
                f"sandbox.folders {', '.join(key.folders)}: bare processes have none of their own; use "
                "--sandbox bubblewrap"
            )

    async def start(
        self, key: SandboxKey, folder: Path, cgroups: Sequence[Path], secret: bytes
    ) -> StartedSandbox:
        """Start the exec server as a process of this user; see `Starter.start`."""
        self.check(key)
        work = Path(self.workdir(folder))
        work.mkdir(mode=0o700)
        env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(work),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "SHELL": "/bin/bash",
        }
        # Parts of this worker's path may come from PYTHONPATH and .pth files, which -I and -S ignore.
        path = [entry for entry in sys.path if entry]
        launch = SandboxLaunch(
            argv=[sys.executable, *server_code(key, self.bound, str(work), path, inside=None)],
            env=env,
            socket_path=folder / SOCKET_NAME,
            secret=secret,
            cgroups=cgroups,
        )
        started = await start(launch, self.reaper, START_SECONDS)
        return StartedSandbox(started.child, None)

    def kill(self, record: SandboxRecord, seconds: float) -> bool:
        """Kill the server with all of its descendants, and return whether they are gone."""
        return record.root is None or kill_tree(record.root, seconds)
