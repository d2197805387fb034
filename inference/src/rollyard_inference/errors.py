"""The exceptions of this package: one tree, each class with a stable `reason`.

All of them are failures of the infrastructure, except `ContextOverflow`: a prompt that is too long is the
policy's own doing.
"""

from __future__ import annotations

from typing import ClassVar


class BackendError(Exception):
    """Base of everything that can go wrong with an inference server."""

    reason: ClassVar[str] = "BackendError"
    """CamelCase, stable: it becomes a failure's or a condition's reason."""
    retryable: ClassVar[bool] = True
    """Whether the same request may succeed later, or on another server."""


class BackendUnavailable(BackendError):
    """The server cannot be reached, or gave no answer in time, or answered that it failed."""

    reason = "BackendUnavailable"

    def __init__(self, message: str, *, overloaded: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.overloaded = overloaded
        """The server answered that it has too much to do, which is no sign of a broken server."""
        self.retry_after = retry_after
        """Seconds to wait, where the server says how many."""


class NotListening(BackendUnavailable):
    """No connection to the server can be made: nothing listens at its address, or nothing can reach it."""


class ServerFailed(BackendUnavailable):
    """The server answered that it failed: 5xx, 408, 409, 425 or 429."""


class BackendMismatch(BackendError):
    """An answer contradicts the request or itself: other prompt ids, unequal lengths, impossible logprobs."""

    reason = "BackendMismatch"


class ModelNotServed(BackendMismatch):
    """The server serves another model; the message names both."""

    reason = "ModelNotServed"


class BackendRefused(BackendError):
    """The server understood the request and refused it (a 4xx other than 408, 409, 425 and 429)."""

    reason = "BackendRefused"
    retryable = False


class NoSuchCall(BackendError):
    """The server does not have this call (vLLM has some only with VLLM_SERVER_DEV_MODE=1)."""

    reason = "NoSuchCall"


class ContextOverflow(BackendRefused):
    """The prompt is longer than the model's context."""

    reason = "ContextOverflow"

    def __init__(self, message: str, limit: int | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        """Tokens of prompt and answer together, where the server says so."""


class WeightsChanged(BackendError):
    """The weights changed during a request whose answer does not say which tokens came before."""

    reason = "WeightsChanged"

    def __init__(self, message: str, discarded: int) -> None:
        super().__init__(message)
        self.discarded = discarded
        """Number of sampled tokens that were thrown away."""
