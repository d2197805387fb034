"""The models of the Hugging Face Hub that a driver downloads before it starts their servers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from rollyard_process.hub import cached
from rollyard_process.hub_names import HubName, hub_name

from rollyard_drivers.host.child import Child, Folders
from rollyard_drivers.host.errors import CannotStart

MODULE: Final = "rollyard_process.hub"
RETRY_SECONDS: Final = 60.0
"""The time between two tries to download a model."""
STOP_SECONDS: Final = 3.0
_REMOVED: Final = (
    "{} was downloaded, but the cache has no complete copy of it: check that nothing removes files of HF_HOME"
)
Engine = Literal["embedded", "vllm"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Where a model is."""

    path: str
    """The folder, or an empty string while the model is downloaded."""
    waits: str = ""
    """How far the download is."""


class Downloads:
    """The downloads of one driver. Each model has a process of its own, however many servers wait for it.

    The process has the environment of the driver, so it reads HF_HOME, HF_TOKEN and HF_ENDPOINT there. It
    gets nothing of a pool but the name of the model.

    Args:
        folders: The folders of the logs and pid files.
        wake: Called when a download has ended.
    """

    def __init__(self, folders: Folders, wake: Callable[[], None]) -> None:
        self._folders = folders
        self._wake = wake
        self._running: dict[tuple[HubName, Engine], Child] = {}
        self._failed: dict[tuple[HubName, Engine], tuple[float, str]] = {}

    async def folder(self, model: str, engine: Engine) -> LocalModel:
        """Return where a pool's model is. A name of the hub that is no folder here is downloaded if need be.

        Raises:
            CannotStart: The model cannot be downloaded. It is tried again after a minute.
        """
        repository = None if os.path.isdir(model) else hub_name(model)
        if repository is None:
            return LocalModel(model)
        key = repository, engine
        child = self._running.get(key)
        if child is None:
            until, reason = self._failed.get(key, (0.0, ""))
            if time.monotonic() < until:
                raise CannotStart(reason)
            path = await asyncio.to_thread(cached, repository, engine)
            if path is not None:
                return LocalModel(str(path))
            child = self._running[key] = await self._start(repository, engine)
        elif child.exit_code is not None:
            del self._running[key]
            path = await asyncio.to_thread(cached, repository, engine)
            if path is not None:
                return LocalModel(str(path))
            # The last line of a process that ended with 0 is about its success.
            line = child.telling_line if child.exit_code else _REMOVED.format(repository)
            reason = f"spec.model: {line.removeprefix('error: ')}"
            self._failed[key] = time.monotonic() + RETRY_SECONDS, reason
            raise CannotStart(reason)
        line = child.last_line
        return LocalModel("", line if line.startswith("downloading") else f"downloading {repository}")

    async def _start(self, repository: HubName, engine: Engine) -> Child:
        name = "".join(letter if letter.isalnum() else "-" for letter in f"download-{repository}-{engine}")
        arguments = ("-m", MODULE, str(repository), "--for", engine)
        return await Child.start(name, arguments, self._folders, on_exit=self._wake)

    async def stop(self) -> None:
        """End all downloads. What has come of finished files stays in the cache."""
        await asyncio.gather(*(child.stop(STOP_SECONDS) for child in self._running.values()))
        self._running.clear()
