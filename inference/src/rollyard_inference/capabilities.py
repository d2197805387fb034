"""The capabilities of one server, which are determined by sending requests to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from rollyard_inference.errors import BackendMismatch, BackendUnavailable
from rollyard_inference.replies import NO_SUCH_CALL, json_or_none
from rollyard_inference.sampling.call import SamplingCall
from rollyard_inference.sampling.prorl import ProrlGenerate
from rollyard_inference.sampling.request import ServedModel
from rollyard_inference.sampling.sglang import SglangGenerate
from rollyard_inference.sampling.vllm import VllmCompletions, VllmGenerate
from rollyard_inference.transports.interface import Transport, base_url

Shape = Literal["vllm", "sglang"]

PROBE_SECONDS: Final = 10.0
FIRST_LABEL: Final = "default"
"""The label that servers give to the weights that they were started with (vLLM 0.32, SGLang 0.5)."""
_MAX_BYTES: Final = 8 << 20
_ABORT: Final = "/inference/v1/abort_requests"  # vLLM has it exactly where it has `VllmGenerate.path`.
_WEIGHT_INFO: Final = "/weight_info"  # This is the path of vLLM.
# These are the paths of SGLang; the second is the older name.
_MODEL_INFO: Final = ("/model_info", "/get_model_info")
_SERVER_INFO: Final = ("/server_info", "/get_server_info")


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """What a server reports about its weights."""

    path: str | None = None
    """The path of the call that reports it, or None if the server has no such call."""
    label: str | None = None
    """The weight version, or None if the server does not say."""
    folder: str | None = None
    """The folder that the weights were loaded from, if the server says it."""

    @property
    def shape(self) -> Shape:
        """The protocol of the server, as far as this shows.

        It is vLLM's unless the server answers like SGLang.
        """
        return "sglang" if self.path in _MODEL_INFO else "vllm"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server reported about itself."""

    call: SamplingCall
    """The call that samples."""
    models: Mapping[str, ServedModel] | None
    """The models by name, or None if the server does not list them."""
    weights: WeightInfo
    reports_pause: bool
    """Whether the server has `/is_paused`."""

    def serves(self, name: str) -> bool:
        """Return whether the server lists a model, or lists no models at all."""
        return self.models is None or name in self.models or self._renamed is not None

    def model(self, name: str) -> ServedModel:
        """Return what is known of a model."""
        renamed = self._renamed
        if self.models is not None and name in self.models:
            return self.models[name]
        return ServedModel(name) if renamed is None else replace(renamed, name=name)

    def limit(self, name: str) -> int | None:
        """Return the context length of a model in tokens, or that of its base model.

        The result is None if the server reports neither.
        """
        model = self.model(name)
        if model.max_model_len is None and model.parent is not None:
            model = self.model(model.parent)
        return model.max_model_len

    @property
    def _renamed(self) -> ServedModel | None:
        return renamed_model(self.models or {}, self.weights)


def renamed_model(models: Mapping[str, ServedModel], weights: WeightInfo) -> ServedModel | None:
    """Return the model of an SGLang server whose weights were updated, or None for any other server.

    After an update, SGLang names the model by the folder that it was loaded from.
    """
    updated = weights.shape == "sglang" and weights.label not in (None, FIRST_LABEL)
    return models.get(weights.folder) if updated and weights.folder is not None else None


async def probe(transport: Transport, url: str, seconds: float = PROBE_SECONDS) -> Capabilities:
    """Determine what a server can do.

    No request samples anything, so a paused server answers, too. vLLM is asked in ways that it does not log
    as errors: to abort no request, a call that it has together with `/inference/v1/generate`, and whether
    `/v1/completions` would take a POST. Where that says nothing, a call exists if an empty request to it is
    refused for what the request lacks, rather than with 403 (vLLM without `--enable-scale-out`), 404, 405 or
    501.

    Args:
        transport: Sends the requests.
        url: The base URL of the server.
        seconds: The time limit of each request. There are at most thirteen requests.

    Raises:
        BackendUnavailable: The server did not answer, or answered with an error that says nothing about the
            call.
        BackendMismatch: The server has none of the calls that return token ids.
    """
    url = base_url(url)
    models = await served_models(transport, url, seconds)
    weights = await weight_info(transport, url, seconds)
    if await _has_generate(transport, url, seconds):
        call: SamplingCall = VllmGenerate()
    elif weights.shape == "sglang" and await _has(transport, url, SglangGenerate.path, seconds):
        call = SglangGenerate()
    elif await _takes_posts(transport, url + VllmCompletions.path, seconds):
        call = VllmCompletions()
    elif models is None and weights.path is None and await is_prorl(transport, url, seconds):
        call = ProrlGenerate()
    else:
        raise BackendMismatch(
            f"{url} has no call with token ids in and out: neither {VllmGenerate.path} (vLLM with "
            f"--enable-scale-out) nor {VllmCompletions.path} nor {SglangGenerate.path} of SGLang or of ProRL"
        )
    try:
        status, _ = await get(transport, url + "/is_paused", seconds)
    except BackendUnavailable:
        # The server's engine may be loading weights and answer nothing meanwhile; the other calls did answer.
        status = 200
    return Capabilities(call, models, weights, reports_pause=status == 200)


async def served_models(
    transport: Transport, url: str, seconds: float = PROBE_SECONDS
) -> dict[str, ServedModel] | None:
    """Return the models of `/v1/models` by name, or None if the server does not list them.

    Raises:
        BackendUnavailable: The server did not answer, or failed.
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
            length, *texts = (entry.get(key) for key in ("max_model_len", "parent", "logprobs_mode", "root"))
            models[name] = ServedModel(
                name,
                length if type(length) is int and length > 0 else None,
                *(text if isinstance(text, str) else None for text in texts),
            )
    return models or None


async def weight_info(transport: Transport, url: str, seconds: float = PROBE_SECONDS) -> WeightInfo:
    """Request the label of a server's weights, by the calls of vLLM and of SGLang.

    Raises:
        BackendUnavailable: The server did not answer.
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


async def cache_tokens(transport: Transport, url: str, seconds: float = PROBE_SECONDS) -> int | None:
    """Return the number of tokens that the KV caches of an SGLang server hold, or None if it does not say.

    Raises:
        BackendUnavailable: The server did not answer.
    """
    for path in _SERVER_INFO:
        status, body = await get(transport, base_url(url) + path, seconds)
        if status == 200 and isinstance(body, dict):
            tokens, engines = body.get("max_total_num_tokens"), body.get("dp_size", 1)
            if type(tokens) is int and type(engines) is int and tokens > 0 and engines > 0:
                return tokens * engines
    return None


async def get(transport: Transport, url: str, seconds: float = PROBE_SECONDS) -> tuple[int, Any]:
    """Return the status and the JSON of a call that answers immediately.

    The JSON is None if the answer is not JSON.

    Raises:
        BackendUnavailable: The server did not answer within `seconds`.
    """
    reply = await transport.request("GET", url, seconds=seconds, limit=_MAX_BYTES)
    return reply.status, json_or_none(reply)


def label_in(body: object) -> str | None:
    """Return the weight version in an answer of `/weight_info` or `/model_info`, or None if there is none."""
    label = body.get("weight_version") if isinstance(body, dict) else None
    return None if label is None else str(label)


async def _has_generate(transport: Transport, url: str, seconds: float) -> bool:
    # Since it is in developer mode, vLLM would log a traceback of an empty request to the call itself.
    nothing: dict[str, list[str]] = {"request_ids": []}
    reply = await transport.request("POST", url + _ABORT, nothing, seconds=seconds, limit=_MAX_BYTES)
    if reply.status in (200, 403):
        return reply.status == 200
    return await _has(transport, url, VllmGenerate.path, seconds)


async def is_prorl(transport: Transport, url: str, seconds: float = PROBE_SECONDS) -> bool:
    """Return whether a server that is known to be neither vLLM nor SGLang has ProRL's `/generate`.

    Raises:
        BackendUnavailable: The server did not answer, or failed.
    """
    return await _takes_posts(transport, base_url(url) + ProrlGenerate.path, seconds)


async def _takes_posts(transport: Transport, address: str, seconds: float) -> bool:
    reply = await transport.request("GET", address, seconds=seconds, limit=_MAX_BYTES)
    if reply.status == 405 and "POST" in reply.headers.get("allow", "").upper():
        return True
    return await _has(transport, address, "", seconds)


async def _has(transport: Transport, url: str, path: str, seconds: float) -> bool:
    reply = await transport.request("POST", url + path, {}, seconds=seconds, limit=_MAX_BYTES)
    if reply.status >= 500 and reply.status != 501:
        raise BackendUnavailable(f"{url}{path} answered {reply.status} to a probe")
    return reply.status not in NO_SUCH_CALL
