"""Weights of a trainer, brought to every backend of a pool under a version for each optimizer step.

The modules of the trainers have a `PoolWeights` each, which knows where its trainer hands out weights.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollyard.errors import CliError
from rollyard.integrations.errors import TrainerMismatch

if TYPE_CHECKING:
    from rollyard_client import Client
    from rollyard_crds.weights import PauseMode

__all__ = ["PoolWeights", "link_files", "wait_for"]

UPDATE_SECONDS: Final = 600.0
LOOK_SECONDS: Final = 0.5
_ADAPTER: Final = "adapter_config.json"
"""The file that every adapter (LoRA) has, and no whole model."""


@dataclass
class PoolWeights:
    """Brings the weights of each optimizer step to every backend of a pool.

    Each version has a folder of its own, `FOLDER/RUN-step-N`, which is complete before the pool is asked to
    load it. Policy versions are the names of these folders. RUN differs each time the trainer starts, because
    a version must never name other weights.

    Args:
        client: The client of the control plane.
        pool: The pool from which the job samples.
        folder: A folder that the trainer can write and every backend can read.
        adapter: The name under which the servers load the adapter (LoRA) that the trainer trains. Without
            it, the trainer trains whole models. vLLM needs `--enable-lora` and the variable
            `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`.
        mode: How servers are paused; see the client's `update_weights`.
        timeout: The seconds that an update may take.
        keep: How many of the newest folders are kept, at least 1.
        require_verified: Refuse weights that no backend could be verified against.
        at_once: Also bring the weights before the first rollouts. By default the pool is assumed to have
            them.
    """

    client: Client
    pool: str
    folder: str | Path
    _: KW_ONLY
    adapter: str = ""
    mode: PauseMode = "abort"
    timeout: float = UPDATE_SECONDS
    keep: int = 2
    require_verified: bool = False
    at_once: InitVar[bool] = False
    version: str = field(default="", init=False)
    """The version that the pool has, or an empty text before the first update."""
    step: int | None = field(default=0, init=False)
    """The optimizer step whose weights the pool has, or None if it must get those of the first one too."""

    def __post_init__(self, at_once: bool) -> None:
        if self.keep < 1:
            raise ValueError(
                f"keep is {self.keep}; at least the folder that the servers have loaded must stay: 1"
            )
        self._run = uuid.uuid4().hex[:8]
        self._folders: list[Path] = []
        if at_once:
            self.step = None

    def bring_step(self, step: int, fill: Callable[[Path], None]) -> None:
        """Bring the weights of a step to the pool, unless it has them.

        Args:
            step: The number of the optimizer step.
            fill: Makes the folder that the servers load. It gets the folder's path, where nothing is yet.

        Raises:
            TrainerMismatch: The folder holds an adapter and none was named, or the other way round.
            CliError: The update failed on a backend.
            RollyardError: The control plane refuses the update, or it takes longer than `timeout`.
            OSError: The folder cannot be written.
        """
        if step == self.step:
            return
        version = f"{self._run}-step-{step}"
        folder = Path(self.folder).resolve() / version
        # One that is there is complete. Its update failed, or still runs, so servers may be reading it.
        if not folder.exists():
            try:
                fill(folder)
                self._check_kind(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        self._update(version, folder)
        self.version, self.step = version, step
        self._folders.append(folder)
        while len(self._folders) > self.keep:
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)

    def _check_kind(self, folder: Path) -> None:
        is_adapter = (folder / _ADAPTER).is_file()
        if is_adapter and not self.adapter:
            raise TrainerMismatch(
                "the trainer trains an adapter, which the pool gets under a name: give "
                f"{type(self).__name__} adapter='NAME', or merge the adapter into the model that is saved",
                reason="AdapterMismatch",
            )
        if self.adapter and not is_adapter:
            raise TrainerMismatch(
                f"{type(self).__name__} has adapter={self.adapter!r}, and the trainer saved a whole model: "
                "leave it out, or let the trainer train an adapter (LoRA)",
                reason="AdapterMismatch",
            )

    def _update(self, version: str, folder: Path) -> None:
        update = self.client.update_weights(
            self.pool,
            version,
            checkpoint=None if self.adapter else str(folder),
            lora=(self.adapter, str(folder)) if self.adapter else None,
            mode=self.mode,
            # The first adapter changes the model's name in requests.
            in_flight="restart" if self.adapter and not self.version else "continue",
            require_verified=self.require_verified,
        )
        update = self.client.wait_weights(self.pool, update.id, self.timeout)
        if update.state != "Succeeded":
            raise CliError(
                f"weights {version} did not reach pool {self.pool}: {update.message or update.state}",
                reason="WeightsRefused",
            )


def link_files(files: Iterable[Path], folder: Path) -> None:
    """Give files a second name in a folder, or copy those that lie on another file system.

    Folders among them are left out. The trainer that wrote the files may remove its own names of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        if file.is_dir():
            continue
        # Files of a Hugging Face cache are symbolic links.
        source = file.resolve()
        try:
            os.link(source, folder / file.name)
        except OSError:
            shutil.copy2(source, folder / file.name)


def wait_for(holds: Callable[[], bool], timeout: float, what: str) -> None:
    """Wait until a trainer has written something.

    Raises:
        CliError: It has not done so within `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while not holds():
        if time.monotonic() >= end:
            raise CliError(f"{what} was not there within {timeout:.0f} s", reason="WeightsLate")
        time.sleep(LOOK_SECONDS)
