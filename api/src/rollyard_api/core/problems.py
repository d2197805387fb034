"""The errors that answer requests, as problem+json (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Self

import orjson
from rollyard_crds.reasons import link
from starlette.responses import Response

from rollyard_api.core.errors import ControlPlaneError

MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER: Final = {"Retry-After": "2"}
"""The header of refusals that are over soon."""


class ApiError(ControlPlaneError):
    """The root of the errors that answer requests, with an HTTP status, a reason and advice."""

    status: int = 500
    reason: str = "InternalError"

    def __init__(
        self,
        detail: str,
        *,
        status: int | None = None,
        reason: str | None = None,
        errors: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail, reason=reason)
        self.detail = detail
        self.errors = list(errors)
        self.headers = dict(headers or {})
        if status is not None:
            self.status = status

    @classmethod
    def of(cls, *problems: str, reason: str | None = None) -> Self:
        """Return the error with these problems, the first of which is also its detail."""
        return cls(problems[0], reason=reason, errors=problems)


class Malformed(ApiError):
    """A parameter of the request is wrong (`errors` names it), or its body is not what it claims to be."""

    status = 400
    reason = "BadRequest"


class Unauthorized(ApiError):
    """The request has no bearer token, or an unknown one."""

    status = 401


class Forbidden(ApiError):
    """The role of the token may not make this call."""

    status = 403


class NotFound(ApiError):
    """The resource does not exist, or not in this namespace."""

    status = 404


class Conflict(ApiError):
    """The state of the resource does not permit the request."""

    status = 409


class Gone(ApiError):
    """What the request refers to is gone for ever."""

    status = 410


class TooLarge(ApiError):
    """The request or its answer is larger than permitted."""

    status = 413
    reason = "BodyTooLarge"


class Invalid(ApiError):
    """The body was understood, but some of its fields are wrong; `errors` names each of them."""

    status = 422


class LimitReached(ApiError):
    """A bounded queue has no room, or a limit is reached; retry after Retry-After seconds."""

    status = 429
    reason = "QueueFull"


class Unavailable(ApiError):
    """The server is shutting down, or the database or a store cannot be reached."""

    status = 503


class TimedOut(ApiError):
    """A service behind the control plane, such as a store, did not answer in time."""

    status = 504


class StorageFull(ApiError):
    """There is no space for the database or the trajectories. Nothing of the request was kept."""

    status = 507


def response(error: ApiError) -> Response:
    """Return the HTTP response of an error, whose body is its problem document.

    The `type` leads to what the documentation says about the reason.
    """
    document: dict[str, Any] = {
        "type": link(error.reason),
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": error.detail,
        "reason": error.reason,
    }
    if error.errors:
        document["errors"] = error.errors
    return Response(orjson.dumps(document), error.status, error.headers, MEDIA_TYPE)
