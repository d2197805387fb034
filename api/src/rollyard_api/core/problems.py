"""What the control plane answers when it cannot do what was asked: problem+json (RFC 9457)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar

import orjson
from starlette.responses import Response

from rollyard_api.core.errors import ControlPlaneError

TYPE_BASE = "https://rollyard.dev/problems/"
MEDIA_TYPE = "application/problem+json"


class ApiError(ControlPlaneError):
    """The root of what requests are answered with: an HTTP status, a reason and what would be right."""

    status: ClassVar[int] = 500
    reason: str = "InternalError"

    def __init__(
        self,
        detail: str,
        *,
        reason: str | None = None,
        errors: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = list(errors)
        self.headers = dict(headers or {})
        if reason is not None:
            self.reason = reason


class Malformed(ApiError):
    """The body is no JSON (or no msgpack) at all."""

    status = 400
    reason = "MalformedBody"


class BadRequest(ApiError):
    """A parameter of the request is not what it should be; `errors` names it."""

    status = 400
    reason = "BadRequest"


class Unauthorized(ApiError):
    """No bearer token, or one that nobody has."""

    status = 401
    reason = "Unauthorized"


class Forbidden(ApiError):
    """The token's role may not make this call."""

    status = 403
    reason = "Forbidden"


class NotFound(ApiError):
    status = 404
    reason = "NotFound"


class MethodNotAllowed(ApiError):
    """The path is known, and takes other methods."""

    status = 405
    reason = "MethodNotAllowed"


class Conflict(ApiError):
    status = 409
    reason = "Conflict"


class Gone(ApiError):
    """What the request refers to is no longer there, and never will be again."""

    status = 410
    reason = "Gone"


class TooLarge(ApiError):
    status = 413
    reason = "BodyTooLarge"


class Invalid(ApiError):
    """The body was understood and a field of it is wrong; `errors` names each."""

    status = 422
    reason = "Invalid"


class QueueFull(ApiError):
    """The bounded queue has no room; ask again after Retry-After seconds."""

    status = 429
    reason = "QueueFull"


class TooManyWaits(ApiError):
    """As many long polls or event streams stand open as may; ask again after Retry-After seconds."""

    status = 429
    reason = "TooManyWaits"


class Unavailable(ApiError):
    """Shutting down, or the database or a store cannot be reached."""

    status = 503
    reason = "Unavailable"


class TimedOut(ApiError):
    """Something behind the control plane, a store for one, did not answer in time."""

    status = 504
    reason = "TimedOut"


class StorageFull(ApiError):
    """No space for the database or the trajectories; nothing of the request was kept."""

    status = 507
    reason = "StorageFull"


def problem(error: ApiError) -> dict[str, Any]:
    """The problem document of an error."""
    kebab = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", error.reason).lower()
    document: dict[str, Any] = {
        "type": TYPE_BASE + kebab,
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": error.detail,
        "reason": error.reason,
    }
    if error.errors:
        document["errors"] = error.errors
    return document


def response(error: ApiError) -> Response:
    """The HTTP answer of an error."""
    return Response(
        orjson.dumps(problem(error)), status_code=error.status, media_type=MEDIA_TYPE, headers=error.headers
    )
