"""The interface of a server's weight calls, and how one of their requests is sent and its answer read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from rollyard_inference.replies import json_or_none, require_call, require_ok
from rollyard_inference.transports.interface import Transport, base_url

if TYPE_CHECKING:
    from rollyard_crds.weights import PauseMode, WeightSource

PROBE_SECONDS: Final = 10.0
COMPARE_SECONDS: Final = 60.0  # This limit is for the log-probabilities of a fixed prompt.
_MAX_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class WeightCallLimits:
    """The seconds within which a server must have completed a step."""

    call: float = 20.0
    pause: float = 300.0
    """This is long because mode `wait` lets every request in flight end."""
    load: float = 1800.0


class WeightControl(Protocol):
    """The weight calls of one server.

    Every method raises `NoSuchCall` if the server does not have the call, `BackendUnavailable` if it does not
    answer or fails (another attempt may succeed), and `BackendRefused` if the request is wrong.
    """

    @property
    def pause_modes(self) -> frozenset[PauseMode]:
        """The modes that `pause` accepts."""

    async def label(self) -> str:
        """Return the label of the server's weights."""

    async def set_label(self, version: str) -> None:
        """Set the label of the weights, which all tokens sampled from now on carry."""

    async def is_paused(self) -> bool:
        """Return whether the server reports that it samples nothing."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. The mode says what happens to the requests in flight."""

    async def resume(self) -> None:
        """Continue sampling."""

    async def reset_prefix_cache(self) -> None:
        """Discard what earlier weights have computed.

        This includes the caches of requests that are held during the update.
        """

    async def load(self, source: WeightSource) -> None:
        """Load a checkpoint or an adapter.

        Weights that the trainer has pushed are in place already, so nothing is loaded for them.
        """

    async def reload(self, path: str) -> None:
        """Load a checkpoint folder into the running model."""

    async def folder(self) -> str | None:
        """Return the model folder that the server was started on, or None if the server does not say."""

    async def dtype(self) -> str | None:
        """Return the data type in which the server computes, such as `bfloat16`, or None if unknown."""

    async def reports_versions_of_tokens(self, model: str) -> bool:
        """Return whether an answer says which weights sampled which tokens."""

    async def prompt_logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities (in nats) of `ids[1:]` in a prompt of `ids`, which are n - 1 numbers.

        Raises:
            BackendMismatch: The answer does not contain them.
        """


class ControlCalls:
    """The requests to one server's control calls.

    Args:
        transport: Sends the requests.
        url: The base URL of the server.
        limits: The time limits of the calls.
        hint: A text that is added to the message if the server does not have a call.
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
        """Return the decoded answer of a call, or None if the answer is not JSON.

        Args:
            method: The HTTP method.
            path: The path of the call, after the base URL.
            body: The object to send as JSON.
            seconds: The time limit. The default is `limits.call`.
            known: Whether every server has the call. A 404 then concerns the thing that was requested.
        """
        call = f"{method} {self._base}{path}"
        reply = await self._transport.request(
            method, self._base + path, body, seconds=seconds or self._limits.call, limit=_MAX_BYTES
        )
        if not known:
            require_call(call, reply, self._hint)
        require_ok(call, reply)
        return json_or_none(reply)
