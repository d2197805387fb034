"""The errors that a harness gets. Each protocol writes them in its own form."""

from __future__ import annotations

from typing import Final, Literal

from rollyard_pipeline.errors import WorkerError

CallProblem = Literal[
    "invalid",
    "unauthorized",
    "not_found",
    "too_large",
    "context",
    "limit",
    "busy",
    "unavailable",
    "failed",
    "ended",
]

STATUS: Final[dict[CallProblem, int]] = {
    "invalid": 400,
    "unauthorized": 401,
    "not_found": 404,
    "too_large": 413,
    "context": 400,
    "limit": 400,
    "busy": 429,
    "unavailable": 503,
    "failed": 500,
    "ended": 400,
}
"""The HTTP status of each problem. Harnesses repeat a call after 429 and 5xx, and not after 400."""


class CallError(WorkerError):
    """A call that is refused or has failed.

    Args:
        problem: `invalid`: the call itself is wrong. `context`: the prompt leaves no room in the context.
            `limit`: the rollout has used up its turns, tokens or time. `ended`: the harness has ended.
            `busy`: the rollout has too many calls at once. `unavailable`: no backend answers.
            `failed`: the gateway has an error of its own.
        message: What is wrong, and what would be right.
        param: The field of the request that is wrong, as the protocol spells it.
        tokens: For `context`, the number of tokens of the prompt, and the limit.
        retry_after: When another try may succeed, in seconds.
    """

    reason = "CallRefused"

    def __init__(
        self,
        problem: CallProblem,
        message: str,
        *,
        param: str | None = None,
        tokens: tuple[int, int] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.problem: CallProblem = problem
        self.message = message
        self.param = param
        self.tokens = tokens
        self.retry_after = retry_after

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.problem]
