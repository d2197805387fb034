"""The plugins of the jobs whose rollouts are leased here, in a private folder of this process."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path
from typing import TypeAlias

from rollyard_crds.fields.plugins import OfferingPlugin
from rollyard_crds.rolloutjob import RolloutJobSpec, WorkerJobSpec

from rollyard_pipeline.control_plane.calls import WorkerCalls, persistent
from rollyard_pipeline.registry import Registry

Digests: TypeAlias = tuple[str, ...]
"""The SHA-256 of each plugin that a job uses."""


def plugins_of(spec: RolloutJobSpec) -> list[OfferingPlugin]:
    """Return the plugins that a job uses."""
    return spec.plugins if isinstance(spec, WorkerJobSpec) else []


def digests_of(spec: RolloutJobSpec) -> Digests:
    """Return what tells jobs apart whose names may stand for different extensions."""
    return tuple(plugin.sha256 for plugin in plugins_of(spec))


class JobPlugins:
    """The extensions of each job: those of this process, and those of the job's plugins.

    The text of a plugin is that which it had when its job was submitted. It is fetched once, with the
    worker's token, and lies in a folder that no sandbox has.

    Args:
        control: The control plane, which has the texts.
        extensions: The extensions for jobs without plugins.
        folder: Where the private folder is made; None stands for the usual place of temporary files.
    """

    def __init__(self, control: WorkerCalls, extensions: Registry, folder: Path | None = None) -> None:
        self._control = control
        self._parent = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._registries: dict[Digests, Registry] = {(): extensions}
        self._lock = asyncio.Lock()

    def of(self, spec: RolloutJobSpec) -> Registry:
        """Return the extensions of a job, whose plugins were fetched."""
        return self._registries[digests_of(spec)]

    async def fetch(self, spec: RolloutJobSpec, namespace: str, name: str, uid: str | None) -> None:
        """Fetch the plugins of a job that are not here. This waits as long as the control plane is away.

        Raises:
            ControlPlaneRefused: The control plane refuses to return one.
            OSError: One cannot be written.
        """
        digests = digests_of(spec)
        async with self._lock:
            if digests in self._registries:
                return
            files = []
            for plugin in plugins_of(spec):
                file = self._place(plugin)
                if not file.exists():
                    fetch = partial(self._control.plugin, namespace, name, uid, plugin.sha256)
                    text = await persistent(fetch)
                    await asyncio.to_thread(_write, file, text)
                files.append((file, plugin.offers))
            self._registries[digests] = self._registries[()].with_plugins(files)

    def _place(self, plugin: OfferingPlugin) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="plugins-", dir=self._parent)
        return Path(self._folder.name, plugin.sha256, plugin.file)

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.cleanup()


def _write(file: Path, text: bytes) -> None:
    """Write a file as a whole or not at all."""
    file.parent.mkdir(mode=0o700, exist_ok=True)
    scratch = file.with_name(f".{file.name}")
    scratch.write_bytes(text)
    scratch.chmod(0o400)
    scratch.replace(file)
