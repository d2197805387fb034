"""Checkpoints: one folder that servers load, with what the trainer needs to continue from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from tinygrpo.errors import CheckpointError
from tinygrpo.ledger import UsedGroup, write_ledger
from tinygrpo.onnx_folder import OnnxTemplate
from tinygrpo.rollouts import StreamPlace

_TRAINER: Final = "trainer.pt"
_WEIGHTS: Final = "model.safetensors"
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a resumed run continues from, beside weights and optimiser."""

    step: int = 0
    """The steps that are done, which is the number of updates of the weights."""
    place: StreamPlace = field(default_factory=StreamPlace)
    """How far they have used the stream."""
    rollouts: int = 0
    """The rollouts of the groups that they have read."""
    seconds: float = 0.0
    """The wall time of the steps, without evaluations."""
    good: int = 0
    """The last steps after each other that had enough success for the training to end."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the last step's metrics when its checkpoint is written."""


class Checkpoints:
    """The checkpoints of one run, `step-0000` and so on. Each is complete as soon as it has its name.

    A folder is a Hugging Face model, which vLLM loads, and an ONNX model beside it, which the embedded engine
    loads. It has the ledger of its step, too, and the newest ones have the state of the trainer. All of this
    is brought to the disk, and then appears at once, when the folder gets its name. A run that continues from
    the newest folder therefore never has the weights of one step and the place in the stream of another.

    Args:
        folder: The folder of the run's checkpoints, an absolute path.
        base: The Hugging Face folder that training begins with; its tokenizer is copied.
        template: The ONNX folder of the same model.
    """

    def __init__(self, folder: Path, base: Path, template: OnnxTemplate) -> None:
        self._folder = folder
        self._base = base
        self._template = template

    @property
    def folder(self) -> Path:
        """The folder of the run's checkpoints."""
        return self._folder

    def path(self, step: int) -> Path:
        """Return the folder of a step's weights."""
        return self._folder / f"step-{step:04d}"

    def save(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        used: Sequence[UsedGroup] = (),
    ) -> Path:
        """Write a checkpoint, and return its folder. An older trainer state than the last is removed.

        Args:
            model: The policy.
            optimizer: Its optimiser.
            progress: What a resumed run continues from.
            used: The part of the ledger that belongs to the step.

        Raises:
            CheckpointError: The model does not fit the ONNX graph, or the step has a checkpoint already.
            OSError: The folder cannot be written.
        """
        target = self.path(progress.step)
        if target.exists():
            # Servers may be loading it, and its ledger counts.
            raise CheckpointError(f"{target} exists already; a checkpoint is never written over")
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        # The library writes it for its owner only, and a server may run as another user.
        (partial / _WEIGHTS).chmod(0o644)
        for name in _TOKENIZER:
            shutil.copyfile(self._base / name, partial / name)
        weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
        self._template.write(weights, partial)
        state = {
            "progress": asdict(progress),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        torch.save(state, partial / _TRAINER)
        write_ledger(partial, used)
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        os.replace(partial, target)
        # Only now does the name outlive a power cut.
        _sync(self._folder)
        (self.path(progress.step - 2) / _TRAINER).unlink(missing_ok=True)
        return target

    def newest(self) -> Path | None:
        """Return the newest checkpoint, from which a run continues, or None if there is none.

        Raises:
            CheckpointError: It has no state of the trainer, so it was changed after it was written.
        """
        found = sorted(self._folder.glob("step-????"))
        if found and not (found[-1] / _TRAINER).exists():
            raise CheckpointError(
                f"{found[-1]} has no {_TRAINER}, from which a run would continue; bring it back"
            )
        return found[-1] if found else None

    def restore(self, folder: Path, optimizer: torch.optim.Optimizer) -> Progress:
        """Load the state of the trainer from a checkpoint. The caller loads the model from the same folder.

        Raises:
            CheckpointError: The state cannot be read.
        """
        try:
            state: dict[str, Any] = torch.load(folder / _TRAINER, weights_only=True)
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
            progress = state["progress"]
            return Progress(**{**progress, "place": StreamPlace(**progress["place"])})
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / _TRAINER} cannot be used: {error}") from error


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
