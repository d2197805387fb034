"""The errors of calls to the Kubernetes API."""

from __future__ import annotations

import orjson

from rollyard_operator.errors import OperatorError


class KubeError(OperatorError):
    """The API server refused a call or did not answer after several attempts.

    Attributes:
        status: The HTTP status, or 0 if there was no answer.
        reason: The reason as Kubernetes names it, such as `Forbidden` or `Invalid`, or `Unreachable` if there
            was no answer.
        retry_after: The number of seconds that the server asked the client to wait, or None.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class KubeConflict(KubeError):
    """The HTTP status was 409: the name is taken, or the object has another uid or version than expected."""


def refusal(status: int, content: bytes, retry_after: str | None = None) -> KubeError:
    """Return the error for an answer whose status is not 2xx."""
    try:
        document = orjson.loads(content)
    except ValueError:
        document = None
    answer = document if isinstance(document, dict) else {}
    message = str(answer.get("message") or content[:500].decode(errors="replace") or f"HTTP {status}")
    reason = str(answer.get("reason") or f"Http{status}")
    seconds = (answer.get("details") or {}).get("retryAfterSeconds")
    if retry_after is not None and retry_after.isdigit():
        seconds = float(retry_after)
    kind = KubeConflict if status == 409 else KubeError
    return kind(status, reason, message, None if seconds is None else float(seconds))
