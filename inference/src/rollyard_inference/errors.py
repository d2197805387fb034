"""The exceptions of this package. They form one tree, and each class has a stable `reason`.

All of them are failures of the infrastructure, except `ContextOverflow`: after its first turn, the policy
itself causes a prompt that is too long.
"""

from __future__ import annotations

from typing import ClassVar


class BackendError(Exception):
    """The base class of everything that can go wrong with an inference server."""

    reason: ClassVar[str] = "BackendError"
    """A stable word in CamelCase, which becomes the reason of a failure or of a condition."""
    retryable: ClassVar[bool] = True
    """Whether the same request may succeed later, or on another server."""


class BackendUnavailable(BackendError):
    """The server cannot be reached, did not answer in time, or answered that it failed."""

    reason = "BackendUnavailable"

    def __init__(
        self,
        message: str,
        *,
        overloaded: bool = False,
        hung: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.hung = hung
        """Whether the server took the request and then showed no sign of life, so that waiting for it again
        would take as long."""
        self.overloaded = overloaded
        """Whether the server answered that it has too much to do. This does not indicate that the server is
        broken."""
        self.retry_after = retry_after
        """The seconds to wait before the next attempt, or None if the server did not say."""


class NotListening(BackendUnavailable):
    """No connection to the server can be made.

    Either nothing listens at its address, or the address cannot be reached.
    """


class ServerFailed(BackendUnavailable):
    """The server answered that it failed, with status 5xx, 408, 409, 425 or 429."""


class BackendMismatch(BackendError):
    """An answer contradicts the request or itself.

    Examples are other prompt ids, unequal lengths and impossible log-probabilities.
    """

    reason = "BackendMismatch"


class ModelNotServed(BackendMismatch):
    """The server serves another model. The message names both."""

    reason = "ModelNotServed"


class BackendRefused(BackendError):
    """The server understood the request and refused it (a 4xx other than 408, 409, 425 and 429)."""

    reason = "BackendRefused"
    retryable = False


class NoSuchCall(BackendError):
    """The server does not have this call. vLLM has some calls only with VLLM_SERVER_DEV_MODE=1."""

    reason = "NoSuchCall"


class ContextOverflow(BackendRefused):
    """The prompt is longer than the model's context."""

    reason = "ContextOverflow"

    def __init__(self, message: str, limit: int | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        """The maximum number of prompt and answer tokens together, or None if the server did not say."""


class WeightsChanged(BackendError):
    """The weights changed during a request.

    The answer does not say which tokens were sampled before the change.
    """

    reason = "WeightsChanged"

    def __init__(self, message: str, discarded: int) -> None:
        super().__init__(message)
        self.discarded = discarded
        """The number of sampled tokens that were discarded."""
