"""The interface of a provider's protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from rollyard_pipeline.gateway.calls import Delta, ModelCall, ModelReply, Opening
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.interface import RolloutGateway

ERROR_FIELD: Final = "rollyard_error"
"""The field of a tool call which says why the model's text is no call. No provider has such a field.

The call has the text as the model wrote it for arguments, which no harness can parse. One that knows the
field can show the model the same error as Rollyard's own agents do.
"""


class EventWriter(ABC):
    """Writes the events of one streamed reply as bytes of `text/event-stream`.

    The methods are called in this order: `begin`, `delta` for each piece, then `end` or `fail`.
    """

    content_type: ClassVar[str] = "text/event-stream"
    """The media type of the stream."""

    @abstractmethod
    def begin(self) -> bytes:
        """Return the events with which the stream begins, once the first token has come."""

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """Return the events of a piece of the reply."""

    def idle(self) -> bytes:
        """Return what keeps a client from giving up while no piece comes. It may be called after `begin`."""
        return b""

    @abstractmethod
    def end(self, reply: ModelReply) -> bytes:
        """Return the events with which the stream ends."""

    @abstractmethod
    def fail(self, error: CallError) -> bytes:
        """Return the events of a stream that has begun and cannot be continued."""


class ProviderProtocol(ABC):
    """One call of a provider's protocol, its errors, and the provider's list of models. It has no state."""

    name: ClassVar[str]
    """The name in metrics and spans, such as `anthropic-messages`."""

    @abstractmethod
    def read(self, body: Mapping[str, Any], headers: Mapping[str, str], path: Mapping[str, str]) -> ModelCall:
        """Return the call that a request makes.

        Args:
            body: The parsed body, which is a JSON object.
            headers: The headers by their names in lower case.
            path: What the path says, such as `model` and `method` of Google's paths, and the `query`.

        Raises:
            CallError: A field is wrong, or asks for what cannot be had. Unknown fields are refused or
                ignored as the real service does.
        """

    @abstractmethod
    def answer(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """Return the body of the answer to a call that does not stream."""

    @abstractmethod
    def events(self, call: ModelCall, opening: Opening) -> EventWriter:
        """Return what writes the events of the answer to a call that streams."""

    @abstractmethod
    def error(self, error: CallError) -> dict[str, Any]:
        """Return the body of an answer with an error. Its status is `error.status`."""

    @abstractmethod
    def models(self, gateway: RolloutGateway, path: Mapping[str, str]) -> dict[str, Any]:
        """Return the list of models, which has the one of the rollout, or one if the path has a `model`.

        Raises:
            CallError: There is no such model.
        """

    def counted(self, tokens: int) -> dict[str, Any]:
        """Return the body of the answer to a call that counts tokens.

        Raises:
            CallError: The protocol has no such calls.
        """
        raise CallError("not_found", "this protocol has no calls that count tokens")
