"""The interface of a server's weight calls, and how one request of them is made and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from rollyard_inference.replies import json_or_none, require_call, require_ok
from rollyard_inference.transports.interface import Transport, base_url

if TYPE_CHECKING:
    from rollyard_crds.weights import PauseMode, WeightSource

PROBE_SECONDS: Final = 10.0
COMPARE_SECONDS: Final = 60.0  # for the log-probabilities of a fixed prompt
_MAX_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class WeightCallLimits:
    """Seconds within which a server must have done a step."""

    call: float = 20.0
    pause: float = 300.0
    """Mode `wait` lets every request in flight end."""
    load: float = 1800.0


class WeightControl(Protocol):
    """The weight calls of one server.

    Every method raises `NoSuchCall` where the server does not have the call, `BackendUnavailable` where it
    does not answer or fails (another try may succeed), and `BackendRefused` where the request is wrong.
    """

    @property
    def pause_modes(self) -> frozenset[PauseMode]:
        """What `pause` can be asked for."""

    async def label(self) -> str:
        """What the server calls its weights."""

    async def set_label(self, version: str) -> None:
        """Give the weights a label, which the tokens sampled from now on carry."""

    async def is_paused(self) -> bool:
        """Whether the server says that it samples nothing."""

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing more; `mode` says what happens to requests in flight."""

    async def resume(self) -> None:
        """Sample again."""

    async def reset_prefix_cache(self) -> None:
        """Forget what earlier weights have computed, also for requests that are held over the update."""

    async def load(self, source: WeightSource) -> None:
        """Load a checkpoint or an adapter; weights that the trainer has pushed are there already."""

    async def reload(self, path: str) -> None:
        """Load a checkpoint folder into the running model."""

    async def folder(self) -> str | None:
        """The model folder that the server was started on; None where the server does not say."""

    async def reports_versions_of_tokens(self, model: str) -> bool:
        """Whether an answer says which weights sampled which tokens."""

    async def prompt_logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        """Log-probabilities (nats) of `ids[1:]` in a prompt of `ids`: n - 1 numbers.

        Raises:
            BackendMismatch: the answer does not hold them.
        """


class ControlCalls:
    """Requests to one server's control calls.

    Args:
        hint: added to the message where the server does not have a call.
    """

    def __init__(self, transport: Transport, url: str, limits: WeightCallLimits, hint: str = "") -> None:
        self._transport = transport
        self._base = base_url(url)
        self._limits = limits
        self._hint = hint

    async def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        seconds: float | None = None,
        *,
        known: bool = False,
    ) -> Any:
        """The decoded answer; None where it is not JSON.

        Args:
            known: every server has the call, so that a 404 is about what was asked for.
        """
        call = f"{method} {self._base}{path}"
        reply = await self._transport.request(
            method, self._base + path, body, seconds=seconds or self._limits.call, limit=_MAX_BYTES
        )
        if not known:
            require_call(call, reply, self._hint)
        require_ok(call, reply)
        return json_or_none(reply)
