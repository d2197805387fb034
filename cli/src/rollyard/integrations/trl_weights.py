"""The weights of a trainer of TRL, saved as a checkpoint and brought to a pool before rollouts begin."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollyard.integrations.errors import WeightsRefused

if TYPE_CHECKING:
    from rollyard_client import Client
    from rollyard_crds.weights import PauseMode

Convert = Callable[[Path, Path], None]
UPDATE_SECONDS: Final = 600.0


class TrlWeights:
    """Brings the weights of each optimizer step to every backend of a pool.

    Each version is saved to a folder of its own, `FOLDER/RUN-step-N`, and is complete before the pool hears
    of it. Policy versions are the names of these folders.

    Args:
        client: The client of the control plane.
        pool: The pool from which the job samples.
        folder: A folder that the trainer can write and every backend can read.
        convert: What makes the folder that the servers load (second argument) from the Hugging Face folder
            (first argument). Without it, the servers load the Hugging Face folder, as vLLM and SGLang do.
        mode: How servers are paused; see the client's `update_weights`.
        timeout: The seconds that an update may take.
        keep: How many of the newest folders stay, at least 1.
        at_once: Bring the weights before the first rollouts, too. By default the pool is taken to have them.
    """

    def __init__(
        self,
        client: Client,
        pool: str,
        folder: str | Path,
        *,
        convert: Convert | None = None,
        mode: PauseMode = "abort",
        timeout: float = UPDATE_SECONDS,
        keep: int = 2,
        at_once: bool = False,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the folder that the servers have loaded must stay: 1")
        self._client = client
        self._pool = pool
        self._folder = Path(folder).resolve()
        self._convert = convert
        self._mode = mode
        self._timeout = timeout
        self._keep = keep
        # A version must never name other weights, so another run must give other names.
        self._run = uuid.uuid4().hex[:8]
        self._step: int | None = None if at_once else 0
        self._kept: list[Path] = []
        self.version = ""
        """The version that the pool has, or an empty text before the first update."""

    def bring(self, trainer: Any) -> None:
        """Bring the weights to the pool, unless it has those of this step. All processes must call it.

        Raises:
            WeightsRefused: The update failed on a backend.
            RollyardError: The control plane refuses the update, or it takes longer than `timeout`.
            OSError: The checkpoint cannot be written.
        """
        step = int(trainer.state.global_step)
        if step == self._step:
            return
        accelerator = trainer.accelerator
        # With sharded weights, every process takes part in collecting them.
        weights = accelerator.get_state_dict(trainer.model)
        if accelerator.is_main_process:
            self._update(step, self._save(trainer, weights, step))
        accelerator.wait_for_everyone()
        self._step = step

    def _save(self, trainer: Any, weights: Any, step: int) -> Path:
        target = self._folder / f"{self._run}-step-{step}"
        saved = target if self._convert is None else target.with_name(f"{target.name}.hf")
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.save_pretrained(saved, state_dict=weights)
        trainer.processing_class.save_pretrained(saved)
        if self._convert is not None:
            self._convert(saved, target)
            shutil.rmtree(saved)
        return target

    def _update(self, step: int, checkpoint: Path) -> None:
        version = f"{self._run}-step-{step}"
        update = self._client.update_weights(self._pool, version, checkpoint=str(checkpoint), mode=self._mode)
        update = self._client.wait_weights(self._pool, update.id, self._timeout)
        if update.state != "Succeeded":
            raise WeightsRefused(
                f"weights {version} did not reach pool {self._pool}: {update.message or update.state}"
            )
        self.version = version
        self._kept.append(checkpoint)
        while len(self._kept) > self._keep:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)
