"""What a call can raise; every exception has a stable `reason`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class RollyardError(Exception):
    """Root of the package's exceptions.

    Attributes:
        reason: CamelCase, stable; the server's where it gave one.
        status: the HTTP status, None where none came.
        errors: one line per wrong field, where the server named them.
    """

    reason = "Error"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        status: int | None = None,
        errors: Sequence[str] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason
        self.status = status
        self.errors = list(errors)
        self.retry_after = retry_after


class NotFound(RollyardError):
    """No such job, pool, rollout or claim."""

    reason = "NotFound"


class Conflict(RollyardError):
    """A job of this name has another spec, a stream is closed, a lease is lost."""

    reason = "Conflict"


class CursorGone(RollyardError):
    """The cursor belongs to a job that was deleted, and another job has its name now.

    Nothing of that other job was read: begin without a cursor to read it.
    """

    reason = "CursorGone"


class CursorBeyondEnd(Conflict):
    """The cursor has more results behind it than the job has, so it is not one of this job."""

    reason = "CursorBeyondEnd"


class JobReplaced(RollyardError):
    """While a job was waited for, it was deleted, and another one was submitted under its name."""

    reason = "JobReplaced"


class Invalid(RollyardError):
    """The server refused the request; `errors` names each wrong field."""

    reason = "Invalid"


class Unauthorized(RollyardError):
    """No token, an unknown one, or one whose role may not make this call."""

    reason = "Unauthorized"


class TooMany(RollyardError):
    """The queues are full; ask again after `retry_after` seconds."""

    reason = "QueueFull"


class StorageFull(RollyardError):
    """The server has no space left; nothing of the request was kept."""

    reason = "StorageFull"


class ServerUnavailable(RollyardError):
    """No server answers, or it cannot serve now."""

    reason = "ServerUnavailable"


class WaitTimeout(RollyardError):
    """What was waited for did not come in time."""

    reason = "WaitTimeout"


class ContextError(RollyardError):
    """No server's address or token was given, or the context file cannot be read."""

    reason = "NoContext"


_BY_STATUS: dict[int, type[RollyardError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    409: Conflict,
    413: Invalid,
    422: Invalid,
    429: TooMany,
    502: ServerUnavailable,
    503: ServerUnavailable,
    504: ServerUnavailable,
    507: StorageFull,
}


_BY_REASON: dict[str, type[RollyardError]] = {one.reason: one for one in (CursorGone, CursorBeyondEnd)}


def from_answer(status: int, problem: Any, retry_after: str | None) -> RollyardError:
    """The exception of an HTTP answer; `problem` is its decoded body, or its text."""
    document = problem if isinstance(problem, dict) else {}
    kind = _BY_REASON.get(str(document.get("reason"))) or _BY_STATUS.get(status, RollyardError)
    message = str(document.get("detail") or problem or f"the server answered {status}")
    seconds = float(retry_after) if retry_after is not None and retry_after.isdigit() else None
    return kind(
        message,
        reason=document.get("reason"),
        status=status,
        errors=document.get("errors", ()),
        retry_after=seconds,
    )


def unreachable(url: str, error: Exception) -> ServerUnavailable:
    """Nobody answers at this address."""
    return ServerUnavailable(
        f"no server at {url}; start one with `rollyard up` ({type(error).__name__}: {error})".replace(
            ": )", ")"
        )
    )
