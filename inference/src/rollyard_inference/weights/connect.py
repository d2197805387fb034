"""The weight calls of vLLM, which the embedded engine has as well, of SGLang, and the choice between them.

vLLM has them only with VLLM_SERVER_DEV_MODE=1. SGLang's are those of its HTTP server and of its guide "SGLang
for RL Systems" (0.5). They were checked against that contract only, and never against a running server. These
parts of it matter here:

- `/pause_generation` has the modes `abort`, `retract` and `in_place`. `retract` puts running requests back
  into the queue. The cache can then be flushed, and it is computed again from their ids; this is the mode
  `keep` of this package. No mode waits for the requests in flight.
- `/update_weights_from_disk` answers 400 with `success: false` if the folder cannot be loaded. It renames the
  served model to that folder (see `Capabilities.model`).
- `/flush_cache` answers 400 while requests run. Later versions wait for them for `timeout` seconds.
- No call says whether the server is paused, and none says what it was started on after weights were loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from rollyard_inference.capabilities import served_models, weight_info
from rollyard_inference.errors import BackendError, BackendMismatch, BackendRefused, NoSuchCall, ServerFailed
from rollyard_inference.sampling.request import ServedModel
from rollyard_inference.sampling.sglang import SglangGenerate
from rollyard_inference.sampling.vllm import VllmGenerate
from rollyard_inference.transports.interface import Transport
from rollyard_inference.weights.control import (
    COMPARE_SECONDS,
    PROBE_SECONDS,
    ControlCalls,
    WeightCallLimits,
    WeightControl,
)

if TYPE_CHECKING:
    from rollyard_crds.weights import PauseMode, WeightSource

_MODES: Final[dict[PauseMode, str]] = {"abort": "abort", "keep": "retract"}
_LOADS_ADAPTERS: Final = "vLLM loads adapters with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
_FLUSH_SECONDS: Final = 10.0  # The server may wait this long for its last requests to end.


async def weight_control(transport: Transport, url: str, limits: WeightCallLimits) -> WeightControl:
    """Return the weight calls of a server: SGLang's if it answers as SGLang does, and vLLM's otherwise.

    Raises:
        BackendUnavailable: The server did not answer.
    """
    info = await weight_info(transport, url, limits.call)
    if info.shape == "sglang" and info.path is not None:
        return SglangWeights(transport, url, limits, info.path)
    return VllmWeights(transport, url, limits)


class VllmWeights(ControlCalls):
    """The weight calls of one vLLM server. See `WeightControl`."""

    pause_modes: Final[frozenset[PauseMode]] = frozenset(("abort", "wait", "keep"))

    def __init__(self, transport: Transport, url: str, limits: WeightCallLimits) -> None:
        super().__init__(transport, url, limits, "vLLM has it with VLLM_SERVER_DEV_MODE=1")

    async def label(self) -> str:
        """Return the label of the server's weights."""
        info = await self._call("GET", "/weight_info")
        if not isinstance(info, dict) or not isinstance(info.get("weight_version"), str):
            raise BackendMismatch(f"GET {self._base}/weight_info gave no weight_version")
        version: str = info["weight_version"]
        return version

    async def set_label(self, version: str) -> None:
        """Set the label of the weights, which all tokens sampled from now on carry."""
        await self._call("POST", "/update_weight_version", {"new_version": version})

    async def is_paused(self) -> bool:
        """Return whether the server reports that it samples nothing."""
        answer = await self._call("GET", "/is_paused")
        return isinstance(answer, dict) and answer.get("is_paused") is True

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. The mode says what happens to the requests in flight."""
        await self._call("POST", f"/pause?mode={mode}", seconds=self._limits.pause)

    async def resume(self) -> None:
        """Continue sampling."""
        await self._call("POST", "/resume")

    async def reset_prefix_cache(self) -> None:
        """Discard what earlier weights have computed.

        This includes the caches of requests that mode `keep` holds; the server computes them again from the
        ids of the requests. Without `reset_running_requests`, vLLM discards nothing while there are such
        requests (it answers 200 with `success: false`), and every later request with the same beginning would
        continue from the cache of the old weights.
        """
        answer = await self._call("POST", "/reset_prefix_cache?reset_running_requests=true")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerFailed(f"POST {self._base}/reset_prefix_cache answered success: false")

    async def load(self, source: WeightSource) -> None:
        """Load a checkpoint or an adapter.

        Weights that the trainer has pushed are in place already, so nothing is loaded for them.
        """
        if source.checkpoint is not None:
            await self.reload(source.checkpoint.path)
        elif source.lora is not None:
            body = {
                "lora_name": source.lora.name,
                "lora_path": source.lora.path,
                "load_inplace": any(card.get("id") == source.lora.name for card in await self._cards()),
            }
            try:
                # vLLM answers 404 for an adapter that it cannot find, too.
                await self._call("POST", "/v1/load_lora_adapter", body, self._limits.load, known=True)
            except BackendRefused as error:
                raise BackendRefused(f"{error} ({_LOADS_ADAPTERS})") from error

    async def reload(self, path: str) -> None:
        """Load a checkpoint folder into the running model."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._call("POST", "/collective_rpc", body, self._limits.load)

    async def folder(self) -> str | None:
        """Return the model folder that the server was started on (`root`), or None if it does not say."""
        for card in await self._cards():
            root = card.get("root")
            if card.get("parent") is None and isinstance(root, str) and root:
                return root
        return None

    async def dtype(self) -> str | None:
        """Return the data type in which the server computes, or None if it does not say.

        vLLM computes in bfloat16 where a checkpoint is float32 and no `--dtype` is given.
        """
        try:
            info = await self._call("GET", "/server_info?config_format=json")
            dtype = info["vllm_config"]["model_config"]["dtype"]
        except (BackendError, LookupError, TypeError):
            return None
        return dtype.removeprefix("torch.") if isinstance(dtype, str) else None

    async def reports_versions_of_tokens(self, model: str) -> bool:
        """Return whether an answer says which weights sampled which tokens.

        A paused server answers no request. A paused server that has `/is_paused` is assumed to report them.
        """
        if await self.is_paused():
            return True
        body = {"model": model, "token_ids": [1], "sampling_params": {"max_tokens": 1}, "stream": False}
        try:
            answer = await self._call("POST", VllmGenerate.path, body, PROBE_SECONDS)
            return bool(answer["choices"][0]["weight_versions"])
        except (NoSuchCall, KeyError, IndexError, TypeError):
            return False

    async def prompt_logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities (in nats) of `ids[1:]`.

        They come from `prompt_logprobs` of `/v1/completions`.
        """
        options = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "stream": False}
        body = {"model": model, "prompt": list(ids), **options}
        answer = await self._call("POST", "/v1/completions", body, COMPARE_SECONDS, known=True)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            if len(entries) != len(ids):
                raise ValueError(f"{len(entries)} entries for {len(ids)} tokens")
            return [
                float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], entries[1:], strict=True)
            ]
        except (ValueError, LookupError, TypeError) as error:
            raise BackendMismatch(
                f"POST {self._base}/v1/completions gave no prompt_logprobs of the prompt: {error!r}"
            ) from error

    async def _cards(self) -> list[dict[str, Any]]:
        answer = await self._call("GET", "/v1/models", known=True)
        cards = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
            raise BackendMismatch(f"GET {self._base}/v1/models gave no list of models")
        return cards


class SglangWeights(ControlCalls):
    """The weight calls of one SGLang server. See `WeightControl`.

    Args:
        transport: Sends the requests.
        url: The base URL of the server.
        limits: The time limits of the calls.
        info_path: The path at which the server describes itself: `/model_info`, or the older
            `/get_model_info`.
    """

    pause_modes: Final[frozenset[PauseMode]] = frozenset(_MODES)

    def __init__(self, transport: Transport, url: str, limits: WeightCallLimits, info_path: str) -> None:
        super().__init__(transport, url, limits)
        self._info_path = info_path

    async def label(self) -> str:
        """Return the label of the server's weights."""
        info = await self._call("GET", self._info_path)
        if not isinstance(info, dict):
            raise BackendMismatch(f"GET {self._base}{self._info_path} gave no JSON object")
        if not isinstance(info.get("weight_version"), str):
            raise NoSuchCall(f"GET {self._base}{self._info_path} gave no weight_version: SGLang is too old")
        version: str = info["weight_version"]
        return version

    async def set_label(self, version: str) -> None:
        """Set the label of the weights, which all tokens sampled from now on carry."""
        # Without this field, SGLang would abort every request in flight.
        body = {"new_version": version, "abort_all_requests": False}
        await self._call("POST", "/update_weight_version", body)

    async def is_paused(self) -> bool:
        """Return False, because SGLang does not report it and pausing it twice does no harm."""
        return False

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. The mode says what happens to the requests in flight."""
        if mode not in _MODES:
            raise NoSuchCall(
                f"{self._base}: SGLang has no pause that waits for the requests in flight: "
                "use mode 'abort' or 'keep'"
            )
        await self._call("POST", "/pause_generation", {"mode": _MODES[mode]}, self._limits.pause)

    async def resume(self) -> None:
        """Continue sampling."""
        await self._call("POST", "/continue_generation", {})

    async def reset_prefix_cache(self) -> None:
        """Discard what earlier weights have computed.

        This includes the caches of requests that mode `keep` holds.
        """
        try:
            await self._call("POST", f"/flush_cache?timeout={_FLUSH_SECONDS:g}")
        except BackendRefused as error:
            raise ServerFailed(f"{error}: its cache is in use") from error

    async def load(self, source: WeightSource) -> None:
        """Load a checkpoint or an adapter.

        Weights that the trainer has pushed are in place already, so nothing is loaded for them.
        """
        if source.checkpoint is not None:
            await self.reload(source.checkpoint.path)
        elif source.lora is not None:
            name = source.lora.name
            if name in await self._models():
                await self._load("/unload_lora_adapter", {"lora_name": name})
            await self._load("/load_lora_adapter", {"lora_name": name, "lora_path": source.lora.path})

    async def reload(self, path: str) -> None:
        """Load a checkpoint folder into the running model."""
        # The cache is flushed by a separate call, after the label was set.
        await self._load("/update_weights_from_disk", {"model_path": path, "flush_cache": False})

    async def folder(self) -> str | None:
        """Return None, because after an update SGLang reports the folder of that update."""
        return None

    async def dtype(self) -> str | None:
        """Return None, because SGLang does not report it."""
        return None

    async def reports_versions_of_tokens(self, model: str) -> bool:
        """Return whether an answer says which weights sampled which tokens."""
        params = {"max_new_tokens": 1}
        body = {"input_ids": [1], "sampling_params": params, "return_logprob": True, "stream": False}
        try:
            answer = await self._call("POST", SglangGenerate.path, body, PROBE_SECONDS)
            return bool(answer["meta_info"]["weight_versions"])
        except (NoSuchCall, KeyError, IndexError, TypeError):
            return False

    async def prompt_logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities (in nats) of `ids[1:]`.

        They come from `logprob_start_len` of `/generate`.
        """
        body: dict[str, Any] = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
        }
        served = (await self._models()).get(model)
        if served is not None and served.parent is not None:
            body["lora_path"] = model
        answer = await self._call("POST", SglangGenerate.path, body, COMPARE_SECONDS, known=True)
        try:
            entries = answer["meta_info"]["input_token_logprobs"]
            if [entry[1] for entry in entries] != list(ids):
                raise ValueError(f"{len(entries)} entries that are not of the prompt's {len(ids)} tokens")
            return [float(entry[0]) for entry in entries[1:]]
        except (ValueError, LookupError, TypeError) as error:
            raise BackendMismatch(
                f"POST {self._base}/generate gave no input_token_logprobs of the prompt: {error!r}"
            ) from error

    async def _load(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._call("POST", path, body, self._limits.load)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise BackendRefused(f"POST {self._base}{path} answered success: false: {answer.get('message')}")

    async def _models(self) -> dict[str, ServedModel]:
        return await served_models(self._transport, self._base, self._limits.call) or {}
