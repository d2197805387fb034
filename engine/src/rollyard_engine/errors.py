"""The exceptions of the engine, each with a stable ``reason`` and its HTTP status.

The HTTP form is that of vLLM: ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

from typing import Final


class EngineError(Exception):
    """The base class of the package's exceptions.

    ``reason`` is a stable CamelCase word for programs, ``status`` is the HTTP status, and ``kind`` is vLLM's
    word for ``error.type``. ``param`` names the request field at fault, if there is one. ``retry_after`` is
    the number of seconds after which the client can try again, if it can.
    """

    reason = "EngineError"
    status = 500
    kind = "InternalServerError"
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(EngineError):
    """A request field has a value that cannot be served.

    It corresponds to vLLM's ``VLLMValidationError``.
    """

    reason = "InvalidRequest"
    status = 400
    kind = "BadRequestError"

    def __init__(self, message: str, *, param: str | None = None, value: object = None) -> None:
        extras = [
            f"{name}={item}" for name, item in (("parameter", param), ("value", value)) if item is not None
        ]
        super().__init__(f"{message} ({', '.join(extras)})" if extras else message, param=param)


_REFUSALS: Final = {
    "MalformedRequest": (400, "Bad Request"),
    "BodyTooLarge": (413, "Request Entity Too Large"),
    "ModelNotServed": (404, "NotFoundError"),
    "QueueFull": (503, "ServiceUnavailableError"),
}
"""The HTTP status and vLLM's word for each reason of a refusal."""


class RequestRefused(EngineError):
    """A request is refused, whatever its fields say about sampling.

    The reason is MalformedRequest (the body is not JSON of the right shape, as vLLM's handler of
    ``RequestValidationError`` says it), BodyTooLarge, ModelNotServed, or QueueFull (as many requests wait as
    the server accepts).
    """

    def __init__(
        self, message: str, *, reason: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.reason = reason
        self.retry_after = retry_after
        self.status, self.kind = _REFUSALS[reason]


class GenerationFailed(EngineError):
    """The runtime failed on this request; other requests are not affected."""

    reason = "GenerationFailed"


class EngineStopped(EngineError):
    """The engine thread has ended, so ``/health`` answers 503."""

    reason = "EngineStopped"
    status = 503
    kind = "ServiceUnavailableError"


class ModelFolderInvalid(EngineError):
    """A model folder is missing, is incomplete, or does not fit the model that is being served."""

    reason = "ModelFolderInvalid"
    status = 400
    kind = "BadRequestError"


class StartupFailed(EngineError):
    """The server cannot start with these arguments, such as a port in use or too little cache memory."""

    reason = "StartupFailed"
