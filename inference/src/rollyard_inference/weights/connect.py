"""The choice of the weight calls that a server has."""

from __future__ import annotations

from rollyard_inference.capabilities import weight_info
from rollyard_inference.transports.interface import Transport
from rollyard_inference.weights.control import WeightCallLimits, WeightControl
from rollyard_inference.weights.sglang import SglangWeights
from rollyard_inference.weights.vllm import VllmWeights


async def weight_control(transport: Transport, url: str, limits: WeightCallLimits) -> WeightControl:
    """Return the weight calls of a server: SGLang's if it answers as SGLang does, and vLLM's otherwise.

    Raises:
        BackendUnavailable: The server did not answer.
    """
    info = await weight_info(transport, url, limits.call)
    if info.shape == "sglang" and info.path is not None:
        return SglangWeights(transport, url, limits, info.path)
    return VllmWeights(transport, url, limits)
