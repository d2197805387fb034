"""What the HTTP side of the gateway needs of one rollout, and nothing else of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from rollyard_pipeline.gateway.calls import Delta, ModelCall, ModelReply, Opening


class PendingReply(Protocol):
    """A reply that is being sampled, or that was. Calls that repeat each other share one."""

    @property
    def opening(self) -> Opening:
        """What is known of it now."""

    async def started(self) -> None:
        """Wait until the first token has come, or the whole reply.

        The first piece may come much later, as the pieces of a call come at the end.

        Raises:
            CallError: There is no reply.
        """

    def deltas(self) -> AsyncIterator[Delta]:
        """Yield the pieces of the reply from the first one, whenever this is called.

        Ending the iteration early, because the client has hung up, does not end the sampling.

        Raises:
            CallError: The reply cannot be completed.
        """

    async def reply(self) -> ModelReply:
        """Wait for the whole reply.

        Raises:
            CallError: The reply cannot be completed.
        """


class RolloutGateway(Protocol):
    """One rollout as its harness calls it."""

    @property
    def key(self) -> str:
        """The key that its calls show. It is worth nothing in any other rollout."""

    @property
    def model(self) -> str:
        """The name of the model, for lists of models."""

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its reply together."""

    async def answer(self, call: ModelCall, protocol: str) -> PendingReply:
        """Match a call with what was sampled, and begin to sample its reply, unless it repeats a call.

        Args:
            protocol: The name of the protocol, for metrics and spans.

        Raises:
            CallError: The call is refused. Nothing was sampled for it.
        """

    async def count_tokens(self, call: ModelCall) -> int:
        """Return the number of tokens of the prompt that a call would make, without any effect.

        Raises:
            CallError: The call is refused.
        """
