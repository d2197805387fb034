"""Checkpoints: one folder that servers load, with what the trainer needs to continue from it."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from tinygrpo.errors import CheckpointError
from tinygrpo.onnx_folder import OnnxTemplate

_TRAINER: Final = "trainer.pt"
_WEIGHTS: Final = "model.safetensors"
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a resumed run continues from, beside weights and optimiser."""

    step: int
    """The steps that are done, which is the number of updates of the weights."""
    groups_read: int
    """The groups of the stream that they have read."""
    rollouts: int
    """The rollouts of these groups."""
    seconds: float
    """The wall time of the steps, without evaluations."""


class Checkpoints:
    """The checkpoints of one run, `step-0000` and so on. Each is complete as soon as it has its name.

    A folder is a Hugging Face model, which vLLM loads, and an ONNX model beside it, which the embedded engine
    loads. The newest ones have the state of the trainer.

    Args:
        folder: The folder of the run's checkpoints, an absolute path.
        base: The Hugging Face folder that training begins with; its tokenizer is copied.
        template: The ONNX folder of the same model.
    """

    def __init__(self, folder: Path, base: Path, template: OnnxTemplate) -> None:
        self._folder = folder
        self._base = base
        self._template = template

    def path(self, step: int) -> Path:
        """Return the folder of a step's weights."""
        return self._folder / f"step-{step:04d}"

    def save(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
        """Write a checkpoint, and return its folder. An older trainer state than the last is removed.

        Raises:
            CheckpointError: The model does not fit the ONNX graph.
            OSError: The folder cannot be written.
        """
        target = self.path(progress.step)
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
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        (self.path(progress.step - 2) / _TRAINER).unlink(missing_ok=True)
        return target

    def newest(self) -> Path | None:
        """Return the newest checkpoint with which a run can continue, or None if there is none."""
        found = sorted(path.parent for path in self._folder.glob(f"step-????/{_TRAINER}"))
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
            return Progress(**state["progress"])
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / _TRAINER} cannot be used: {error}") from error
