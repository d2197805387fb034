"""The calls that change a server's weights, each bounded in time and told apart by what its failure means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import httpx
import orjson
from rollyard_crds.weights import PauseMode, WeightSource

from rollyard_api.backends.fetch import NO_SUCH_CALL, Unanswered, base_of, fetch

PROBE_SECONDS: Final = 10.0
_MAX_BYTES: Final = 1 << 20
_SAID: Final = 400  # characters of an error answer that are worth repeating


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds within which a server must have done a step (another try follows), and between looks."""

    call: float = 20.0
    pause: float = 300.0
    """Mode `wait` lets every request in flight end."""
    load: float = 1800.0
    look: float = 5.0
    """Between two looks at the label of a server that should be as it is, or that waits for its restart."""


class StepFailed(Exception):
    """A server did not do a step; another try may succeed."""


class ServerError(StepFailed):
    """The server answered that it failed."""


class Refused(ServerError):
    """The server says that the request itself is wrong: another try gives the same."""


class NoSuchCall(StepFailed):
    """The server does not have this call (vLLM: only with VLLM_SERVER_DEV_MODE=1)."""


class Server:
    """One backend's control calls."""

    def __init__(self, client: httpx.AsyncClient, url: str, limits: Limits) -> None:
        self._client = client
        self._limits = limits
        self.url = url
        self._base = base_of(url)

    async def _call(
        self, method: str, path: str, body: Any = None, seconds: float | None = None, *, known: bool = False
    ) -> Any:
        """The decoded answer.

        Args:
            known: a 404 is about what was asked for, the call itself every server has.
        """
        address = f"{self._base}{path}"
        try:
            status, answer = await fetch(
                self._client,
                method,
                address,
                json=body,
                seconds=seconds or self._limits.call,
                limit=_MAX_BYTES,
            )
        except Unanswered as error:
            raise StepFailed(str(error)) from error
        if status in NO_SUCH_CALL and not known:
            raise NoSuchCall(
                f"{method} {address} answered {status}: the server has no such call; "
                "vLLM has it with VLLM_SERVER_DEV_MODE=1"
            )
        if status != httpx.codes.OK:
            kind = Refused if 400 <= status < 500 and status not in (408, 409, 429) else ServerError
            raise kind(f"{method} {address} answered {status}: {answer[:_SAID].decode(errors='replace')}")
        try:
            return orjson.loads(answer or b"null")
        except ValueError:
            return None

    async def label(self) -> str:
        """What the server calls its weights."""
        found = await self._call("GET", "/weight_info")
        if not isinstance(found, dict) or not isinstance(found.get("weight_version"), str):
            raise StepFailed(f"GET {self._base}/weight_info told no weight_version")
        version: str = found["weight_version"]
        return version

    async def set_label(self, version: str) -> None:
        """Tokens sampled from now on carry this label."""
        await self._call("POST", "/update_weight_version", {"new_version": version})

    async def is_paused(self) -> bool:
        """Whether it samples nothing."""
        found = await self._call("GET", "/is_paused")
        return isinstance(found, dict) and found.get("is_paused") is True

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing more; what happens to requests in flight says `mode`."""
        await self._call("POST", f"/pause?mode={mode}", seconds=self._limits.pause)

    async def resume(self) -> None:
        """Sample again."""
        await self._call("POST", "/resume")

    async def reset_prefix_cache(self) -> None:
        """Forget what the weights before have computed, also for requests that `keep` holds.

        Those are computed anew from their ids. Otherwise vLLM forgets nothing while there are any (it
        answers 200 with `success: false`), and every later request with the same beginning would go on
        from the old weights' cache.
        """
        found = await self._call("POST", "/reset_prefix_cache?reset_running_requests=true")
        if isinstance(found, dict) and found.get("success") is False:
            raise StepFailed(f"POST {self._base}/reset_prefix_cache told success: false")

    async def load(self, source: WeightSource) -> None:
        """Load a checkpoint or an adapter; nothing for what the trainer has pushed."""
        if source.checkpoint is not None:
            await self.reload(source.checkpoint.path)
        elif source.lora is not None:
            body = {
                "lora_name": source.lora.name,
                "lora_path": source.lora.path,
                "load_inplace": await self._serves(source.lora.name),
            }
            await self._call("POST", "/v1/load_lora_adapter", body, self._limits.load)

    async def reload(self, path: str) -> None:
        """Load a checkpoint folder into the running model."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._call("POST", "/collective_rpc", body, self._limits.load)

    async def folder(self) -> str | None:
        """The model folder that the server was started on; None where it does not tell (vLLM: `root`)."""
        for card in await self._models():
            root = card.get("root")
            if card.get("parent") is None and isinstance(root, str) and root:
                return root
        return None

    async def _serves(self, name: str) -> bool:
        return any(card.get("id") == name for card in await self._models())

    async def _models(self) -> list[dict[str, Any]]:
        found = await self._call("GET", "/v1/models", known=True)
        cards = found.get("data") if isinstance(found, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
            raise StepFailed(f"GET {self._base}/v1/models told no list of models")
        return cards

    async def tells_versions_of_tokens(self, model: str) -> bool:
        """Whether `/inference/v1/generate` says which weights sampled which tokens.

        A paused server answers no request: of one that has the call, it is assumed then.
        """
        if await self.is_paused():
            return True
        body = {"model": model, "token_ids": [1], "sampling_params": {"max_tokens": 1}, "stream": False}
        try:
            found = await self._call("POST", "/inference/v1/generate", body, PROBE_SECONDS)
            return bool(found["choices"][0]["weight_versions"])
        except (NoSuchCall, KeyError, IndexError, TypeError):
            return False
