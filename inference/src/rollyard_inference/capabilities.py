"""What one server can do, found out by asking it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from rollyard_inference.errors import BackendMismatch, BackendUnavailable
from rollyard_inference.replies import NO_SUCH_CALL, json_or_none
from rollyard_inference.sampling.request import SamplingCall, ServedModel
from rollyard_inference.sampling.sglang import SglangGenerate
from rollyard_inference.sampling.vllm import VllmCompletions, VllmGenerate
from rollyard_inference.transports.interface import Transport, base_url

Shape = Literal["vllm", "sglang"]

PROBE_SECONDS: Final = 10.0
FIRST_LABEL: Final = "default"
"""What servers call the weights that they were started with (vLLM 0.32, SGLang 0.5)."""
_MAX_BYTES: Final = 8 << 20
_WEIGHT_INFO: Final = "/weight_info"  # vLLM's
_MODEL_INFO: Final = ("/model_info", "/get_model_info")  # SGLang's; the second is the older name


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """What a server says of its weights."""

    path: str | None = None
    """Path of the call that says it; None: the server has none."""
    label: str | None = None
    """The weight version; None where the server does not say."""
    folder: str | None = None
    """The folder that they were loaded from, where the server says it."""

    @property
    def shape(self) -> Shape:
        """The protocol of the server, as far as this shows: vLLM's unless it answers like SGLang."""
        return "sglang" if self.path in _MODEL_INFO else "vllm"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server said about itself."""

    call: SamplingCall
    """The call that samples."""
    models: Mapping[str, ServedModel] | None
    """By name; None where the server does not list them."""
    weights: WeightInfo
    reports_pause: bool
    """The server has `/is_paused`."""

    def serves(self, name: str) -> bool:
        """Whether the server lists a model, or lists none at all."""
        return self.models is None or name in self.models or self._renamed is not None

    def model(self, name: str) -> ServedModel:
        """What is known of a model."""
        renamed = self._renamed
        if self.models is not None and name in self.models:
            return self.models[name]
        return ServedModel(name) if renamed is None else replace(renamed, name=name)

    def limit(self, name: str) -> int | None:
        """Context length of a model in tokens: its own, or its base model's."""
        model = self.model(name)
        if model.max_model_len is None and model.parent is not None:
            model = self.model(model.parent)
        return model.max_model_len

    @property
    def _renamed(self) -> ServedModel | None:
        return renamed_model(self.models or {}, self.weights)


def renamed_model(models: Mapping[str, ServedModel], weights: WeightInfo) -> ServedModel | None:
    """The model of a SGLang server after an update; SGLang names it by the folder it was loaded from."""
    updated = weights.shape == "sglang" and weights.label not in (None, FIRST_LABEL)
    return models.get(weights.folder) if updated and weights.folder is not None else None


async def probe(transport: Transport, url: str, seconds: float = PROBE_SECONDS) -> Capabilities:
    """Ask a server what it has. No request samples anything, so a paused server answers too.

    A call is there if an empty request to it is refused for what it lacks, rather than with 403
    (vLLM without `--enable-scale-out`), 404, 405 or 501.

    Args:
        seconds: for each of the requests, of which there are at most nine.

    Raises:
        BackendUnavailable: no answer, or an error that says nothing about the call.
        BackendMismatch: the server has none of the calls that give token ids.
    """
    url = base_url(url)
    models = await served_models(transport, url, seconds)
    weights = await weight_info(transport, url, seconds)
    if await _has(transport, url, VllmGenerate.path, seconds):
        call: SamplingCall = VllmGenerate()
    elif weights.shape == "sglang" and await _has(transport, url, SglangGenerate.path, seconds):
        call = SglangGenerate()
    elif await _has(transport, url, VllmCompletions.path, seconds):
        call = VllmCompletions()
    else:
        raise BackendMismatch(
            f"{url} has no call with token ids in and out: neither {VllmGenerate.path} (vLLM with "
            f"--enable-scale-out) nor {VllmCompletions.path} nor SGLang's {SglangGenerate.path}"
        )
    try:
        status, _ = await get(transport, url + "/is_paused", seconds)
    except BackendUnavailable:
        # The server's engine may load weights and answer nothing meanwhile; the other calls did answer.
        status = 200
    return Capabilities(call, models, weights, reports_pause=status == 200)


async def served_models(
    transport: Transport, url: str, seconds: float = PROBE_SECONDS
) -> dict[str, ServedModel] | None:
    """The models of `/v1/models` by name; None where the server does not list them.

    Raises:
        BackendUnavailable: no answer, or the server failed.
    """
    status, body = await get(transport, base_url(url) + "/v1/models", seconds)
    if status >= 500 or status == 429:
        raise BackendUnavailable(f"{base_url(url)}/v1/models answered {status}")
    entries = body.get("data") if status == 200 and isinstance(body, dict) else None
    if not isinstance(entries, list):
        return None
    models: dict[str, ServedModel] = {}
    for entry in entries:
        name = entry.get("id") if isinstance(entry, dict) else None
        if isinstance(name, str):
            length, parent, mode = (entry.get(key) for key in ("max_model_len", "parent", "logprobs_mode"))
            models[name] = ServedModel(
                name,
                length if type(length) is int and length > 0 else None,
                parent if isinstance(parent, str) else None,
                mode if isinstance(mode, str) else None,
            )
    return models or None


async def weight_info(transport: Transport, url: str, seconds: float = PROBE_SECONDS) -> WeightInfo:
    """Ask a server for the label of its weights, in the calls of vLLM and of SGLang.

    Raises:
        BackendUnavailable: no answer.
    """
    for path in (_WEIGHT_INFO, *_MODEL_INFO):
        status, body = await get(transport, base_url(url) + path, seconds)
        if status == 200 and isinstance(body, dict):
            label = label_in(body)
            if path == _WEIGHT_INFO and label is not None:
                return WeightInfo(path, label)
            if path in _MODEL_INFO and "model_path" in body:
                folder = body["model_path"]
                return WeightInfo(path, label, folder if isinstance(folder, str) else None)
    return WeightInfo()


async def get(transport: Transport, url: str, seconds: float = PROBE_SECONDS) -> tuple[int, Any]:
    """Status and JSON (None where it is none) of a call that answers at once.

    Raises:
        BackendUnavailable: no answer within `seconds`.
    """
    reply = await transport.request("GET", url, seconds=seconds, limit=_MAX_BYTES)
    return reply.status, json_or_none(reply)


def label_in(body: object) -> str | None:
    """The weight version in an answer of `/weight_info` or `/model_info`."""
    label = body.get("weight_version") if isinstance(body, dict) else None
    return None if label is None else str(label)


async def _has(transport: Transport, url: str, path: str, seconds: float) -> bool:
    reply = await transport.request("POST", url + path, {}, seconds=seconds, limit=_MAX_BYTES)
    if reply.status >= 500 and reply.status != 501:
        raise BackendUnavailable(f"{url}{path} answered {reply.status} to a probe")
    return reply.status not in NO_SUCH_CALL
