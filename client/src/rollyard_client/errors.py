"""The exceptions that a call can raise. Every exception has a stable `reason`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final


class RollyardError(Exception):
    """The base class of the package's exceptions.

    Attributes:
        reason: A stable word in CamelCase. It is the server's reason if the server gave one, and
            MissingLibrary if a library is needed that the light client does without. The message then names
            the extra that has it.
        status: The HTTP status, or None if there was no answer.
        errors: One line for each wrong field, if the server named them.
        retry_after: The seconds after which the server asks to repeat the call, or None.
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
    """Raised if there is no such job, pool, rollout or claim."""

    reason = "NotFound"


class Conflict(RollyardError):
    """Raised if a job with this name has another spec, a stream is closed, or a lease is lost."""

    reason = "Conflict"


class JobReplaced(RollyardError):
    """Raised if the job that the caller follows was deleted, and another job has its name now.

    Nothing of that other job is returned. The reason is JobReplaced if this happened while the caller waited.
    It is CursorGone if a cursor belongs to the deleted job, and CursorBeyondEnd if a cursor comes after more
    results than the job has. To read the other job, begin without a cursor.
    """

    reason = "JobReplaced"


class Invalid(RollyardError):
    """Raised if the server refused the request. `errors` names each wrong field."""

    reason = "Invalid"


class Unauthorized(RollyardError):
    """Raised if the token is missing or unknown, or if its role may not make this call."""

    reason = "Unauthorized"


class TooMany(RollyardError):
    """Raised if the queues are full. The call can be repeated after `retry_after` seconds."""

    reason = "QueueFull"


class StorageFull(RollyardError):
    """Raised if the server has no space left. It has kept nothing of the request."""

    reason = "StorageFull"


class ServerUnavailable(RollyardError):
    """Raised if no server answers, or if the server cannot serve now."""

    reason = "ServerUnavailable"


class AnswerInvalid(RollyardError):
    """Raised if an answer of the server does not have the form that its media type says."""

    reason = "AnswerInvalid"


class WaitTimeout(RollyardError):
    """Raised if what was waited for did not come in time.

    `reason` says what a job waits for: `Suspended`, `NoBackendReady`, `NoTasks` (its stream is open, and
    nothing is left of what was pushed), `NoDriver`, `NoWorker`, or the reason of its condition `Admitted` or
    `Running`. It is WaitTimeout if the job works, and for weight updates.
    """

    reason = "WaitTimeout"


class JobFailed(RollyardError):
    """Raised if a job that is followed has ended without success, so that no result will follow.

    The reason is JobFailed, JobCancelled or JobDeleted. The message says why. All results from before the end
    have been returned.
    """

    reason = "JobFailed"


class ContextError(RollyardError):
    """Raised if no address or token of a server was given, or the context file cannot be read."""

    reason = "NoContext"


class TokenizerDiffers(RollyardError):
    """Raised if a trainer's token ids mean something else than those of the pool that samples for it."""

    reason = "TokenizerDiffers"


_BY_STATUS: Final[dict[int, type[RollyardError]]] = {
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


_BY_REASON: Final[dict[str, type[RollyardError]]] = {
    "CursorGone": JobReplaced,
    "CursorBeyondEnd": JobReplaced,
}


def from_answer(status: int, problem: Any, retry_after: str | None) -> RollyardError:
    """Return the exception for an HTTP answer.

    Args:
        status: The HTTP status.
        problem: The decoded JSON body, or the text of a body that is not JSON.
        retry_after: The header Retry-After. Only a number of seconds is understood, not a date.
    """
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
    """Return the exception for an address at which no server answers."""
    return ServerUnavailable(
        f"no server at {url}; start one with `rollyard up` ({type(error).__name__}: {error})".replace(
            ": )", ")"
        )
    )
