"""The policy model on onnxruntime-genai: the sequences share the weights, and each has a KV cache of its own.

Each sequence has a ``Generator`` of its own, to which token ids are appended and from which logits are read;
sampling is done elsewhere. Sequences are not batched into one matrix product. The logits of a token therefore
do not depend, not even in the last bit, on what else runs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollyard_engine.errors import EngineError
from rollyard_engine.folder import ModelFolder, read_folder
from rollyard_engine.generation.sampling import Logits

# Below this size of the weights, a second thread is not worthwhile, because synchronising costs more than it
# computes.
SINGLE_THREAD_BELOW_BYTES: Final = 64 << 20


class KVCache:
    """The cached keys and values of one token sequence, held by an onnxruntime-genai ``Generator``.

    ``length`` is the number of tokens that are cached, and ``capacity`` the number of tokens that fit.
    """

    __slots__ = ("_generator", "capacity", "length")

    def __init__(self, generator: Any, capacity: int) -> None:
        self._generator = generator
        self.capacity = capacity
        self.length = 0

    def append(self, token_ids: NDArray[np.int32]) -> Logits:
        """Run the model over further tokens, and return the logits after the last of them.

        The logits have the shape ``[vocabulary]``.
        """
        self._generator.append_tokens(token_ids)
        self.length += len(token_ids)
        logits: Logits = self._generator.get_logits()[0, -1]
        return logits

    def rewind(self, length: int) -> None:
        """Discard all but the first ``length`` tokens."""
        if length != self.length:
            self._generator.rewind_to(length)
            self.length = length


class PolicyModel:
    """A model that onnxruntime-genai has loaded from ``folder``."""

    __slots__ = ("_model", "_runtime", "folder")

    def __init__(self, folder: ModelFolder, model: Any, runtime: Any) -> None:
        self.folder = folder
        self._model = model
        self._runtime = runtime

    def open(self, capacity: int) -> KVCache:
        """Return an empty cache for ``capacity`` tokens."""
        params = self._runtime.GeneratorParams(self._model)
        params.set_search_options(max_length=capacity, do_sample=False, batch_size=1)
        return KVCache(self._runtime.Generator(self._model, params), capacity)


def load_model(path: Path, threads: int = 0) -> PolicyModel:
    """Load the model folder at ``path`` and run one token through it.

    Args:
        path: The model folder.
        threads: The maximum number of threads of one matrix product. The value 0 means one thread for small
            models, and one per core for others.

    Raises:
        EngineError: Something does not load, as the message says, or the logits are not finite.
    """
    from rollyard_engine.generation.runtime import onnxruntime_genai as runtime

    folder = read_folder(path)
    if threads <= 0:
        threads = 1 if folder.weight_bytes < SINGLE_THREAD_BELOW_BYTES else os.cpu_count() or 1
    overlay = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
    try:
        config = runtime.Config(str(path))
        config.overlay(json.dumps(overlay))
        model = PolicyModel(folder, runtime.Model(config), runtime)
        logits = model.open(2).append(np.zeros(1, dtype=np.int32))
    except (RuntimeError, ValueError, TypeError) as error:
        message = " ".join(str(error).split())
        raise EngineError(
            f"{path} does not load: {message}", param="weights_path", reason="ModelFolderInvalid"
        ) from error
    if logits.shape != (folder.vocab_size,):
        raise EngineError(
            f"{path}: the model gives {logits.shape[-1]} logits, its configuration says {folder.vocab_size}",
            param="weights_path",
            reason="ModelFolderInvalid",
        )
    if not np.isfinite(logits).all():
        raise EngineError(
            f"{path}: the model's logits are not finite numbers",
            param="weights_path",
            reason="ModelFolderInvalid",
        )
    return model
