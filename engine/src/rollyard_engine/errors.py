"""The exceptions of the engine, each with a stable ``reason`` and its HTTP status.

The HTTP form is that of vLLM: ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

from typing import Final

_FORMS: Final = {
    "InvalidRequest": (400, "BadRequestError"),
    "ModelFolderInvalid": (400, "BadRequestError"),
    "MalformedRequest": (400, "Bad Request"),
    "ModelNotServed": (404, "NotFoundError"),
    "BodyTooLarge": (413, "Request Entity Too Large"),
    "QueueFull": (503, "ServiceUnavailableError"),
    "EngineStopped": (503, "ServiceUnavailableError"),
}
"""The HTTP status and vLLM's word for each reason that is not an internal error."""


class EngineError(Exception):
    """The base class of the package's exceptions.

    The reason is MalformedRequest (the body is not JSON of the right shape, as vLLM's handler of
    ``RequestValidationError`` says it), BodyTooLarge, ModelNotServed, QueueFull (as many requests wait as the
    server accepts), ModelFolderInvalid (a model folder is missing, is incomplete, or does not fit the model
    that is being served), GenerationFailed (the runtime failed on this request; other requests are not
    affected), or StartupFailed (the server cannot start with these arguments, such as a port in use or too
    little cache memory).

    Args:
        message: What has happened, for people.
        reason: A stable CamelCase word for programs; that of the class if it is None.
        param: The request field at fault, if there is one.
        retry_after: The number of seconds after which the client can try again, if it can.

    Attributes:
        status: The HTTP status.
        kind: vLLM's word for ``error.type``.
    """

    reason = "EngineError"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.reason
        self.param = param
        self.retry_after = retry_after
        self.status, self.kind = _FORMS.get(self.reason, (500, "InternalServerError"))


class InvalidRequest(EngineError):
    """A request field has a value that cannot be served.

    It corresponds to vLLM's ``VLLMValidationError``.
    """

    reason = "InvalidRequest"

    def __init__(self, message: str, *, param: str | None = None, value: object = None) -> None:
        extras = [
            f"{name}={item}" for name, item in (("parameter", param), ("value", value)) if item is not None
        ]
        super().__init__(f"{message} ({', '.join(extras)})" if extras else message, param=param)


class EngineStopped(EngineError):
    """The engine thread has ended, so ``/health`` answers 503."""

    reason = "EngineStopped"
