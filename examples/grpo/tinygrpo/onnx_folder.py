"""A checkpoint for the embedded engine: the graph of the shipped ONNX folder, with other weights.

The graph of a model does not change while it is trained. So onnxruntime-genai's model builder has built it
once (examples/tiny-policy), and a checkpoint is a copy of that folder in which the weights are written over.
This takes milliseconds, where the builder takes ten seconds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray

from tinygrpo.errors import CheckpointError

Weights = Mapping[str, NDArray[np.float32]]

_GRAPH: Final = "model.onnx"
_COMPUTED: Final = frozenset({"cos_cache", "sin_cache"})
"""What the builder computes from the configuration, and what training does not change."""
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_QKV: Final = "attn.qkv_proj.MatMul"
_NORMS: Final = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "attn.q_norm.layernorm": "self_attn.q_norm",
    "attn.k_norm.layernorm": "self_attn.k_norm",
}
_MATRICES: Final = {
    "attn.o_proj.MatMul": "self_attn.o_proj",
    "mlp.gate_proj.MatMul": "mlp.gate_proj",
    "mlp.up_proj.MatMul": "mlp.up_proj",
    "mlp.down_proj.MatMul": "mlp.down_proj",
}


class OnnxTemplate:
    """An ONNX folder of the builder, whose weights can be replaced.

    Args:
        folder: The folder. Its graph must keep its weights in one external file, as float32.

    Raises:
        CheckpointError: The folder has another form.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            graph = onnx.load(str(folder / _GRAPH), load_external_data=False).graph
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / _GRAPH} cannot be read: {error}") from error
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}
        files: set[str] = set()
        for tensor in graph.initializer:
            where = {entry.key: entry.value for entry in tensor.external_data}
            if not where:
                continue
            if tensor.data_type != onnx.TensorProto.FLOAT:
                raise CheckpointError(f"{folder}: {tensor.name} is not float32; export the model as fp32")
            files.add(where["location"])
            self._places[tensor.name] = (int(where.get("offset", "0")), tuple(tensor.dims))
        if len(files) != 1:
            raise CheckpointError(
                f"{folder}: the weights are in {len(files)} external files; one is expected"
            )
        self._file = files.pop()
        self._data = (folder / self._file).read_bytes()

    def write(self, weights: Weights, folder: Path) -> None:
        """Write the graph, these weights and all files beside them into `folder`, which exists.

        Args:
            weights: The tensors under the names of transformers' Qwen3.
            folder: The folder to write to. Files of the template are written over.

        Raises:
            CheckpointError: A weight is missing, is left over, or has another shape than in the graph.
        """
        data = bytearray(self._data)
        used: set[str] = set()
        for name, (offset, shape) in self._places.items():
            if name in _COMPUTED:
                continue
            sources, value = _value(name, weights)
            used |= sources
            if value.shape != shape:
                raise CheckpointError(
                    f"{name} has the shape {list(value.shape)}, the graph has {list(shape)}"
                )
            raw = np.ascontiguousarray(value, dtype="<f4").tobytes()
            data[offset : offset + len(raw)] = raw
        if used != set(weights):
            raise CheckpointError(f"the graph has no place for {', '.join(sorted(set(weights) - used))}")
        for file in self._folder.iterdir():
            if file.is_file() and file.name != self._file:
                shutil.copyfile(file, folder / file.name)
        (folder / self._file).write_bytes(data)


def _value(name: str, weights: Weights) -> tuple[set[str], NDArray[np.float32]]:
    """Return which weights an initializer of the graph holds, and their values as the graph has them.

    A linear layer of torch has the shape [out, in], and the graph multiplies from the right: [in, out].
    """
    sources, transposed = _sources(name)
    try:
        found = [weights[source] for source in sources]
    except KeyError as error:
        raise CheckpointError(f"the graph needs {error}, which the checkpoint lacks") from error
    value = np.concatenate(found) if len(found) > 1 else found[0]
    return set(sources), value.T if transposed else value


def _sources(name: str) -> tuple[list[str], bool]:
    """Return the weights of an initializer in the order in which it joins them, and whether it transposes."""
    if name == "model.embed_tokens.weight":
        return [name], False
    if name == "lm_head.MatMul.weight":
        return ["lm_head.weight"], True
    found = _LAYER.fullmatch(name)
    if found is not None:
        layer, part = f"model.layers.{found[1]}", found[2]
        if part == "final_norm_layernorm":
            return ["model.norm.weight"], False
        if part == _QKV:
            return [f"{layer}.self_attn.{one}_proj.weight" for one in "qkv"], True
        if part in _NORMS:
            return [f"{layer}.{_NORMS[part]}.weight"], False
        if part in _MATRICES:
            return [f"{layer}.{_MATRICES[part]}.weight"], True
    raise CheckpointError(f"the graph has the weight {name}, which this export does not know")
