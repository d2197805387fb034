"""vLLM's weight calls, which the embedded engine has as well.

vLLM has them only with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from rollyard_inference.errors import BackendError, BackendMismatch, NoSuchCall, ServerFailed
from rollyard_inference.sampling.vllm import VllmGenerate
from rollyard_inference.transports.interface import Transport
from rollyard_inference.weights.control import (
    COMPARE_SECONDS,
    PROBE_SECONDS,
    ControlCalls,
    WeightCallLimits,
)

if TYPE_CHECKING:
    from rollyard_crds.weights import PauseMode, WeightSource


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
            await self._call("POST", "/v1/load_lora_adapter", body, self._limits.load)

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
