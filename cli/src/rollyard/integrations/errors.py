"""Errors of the integrations. Each has one line that says what is wrong and what to do."""

from __future__ import annotations

from rollyard.errors import CliError


class IntegrationError(CliError):
    """The base class of errors between Rollyard and a trainer."""

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class TrainerMismatch(IntegrationError, ValueError):
    """Raised if the trainer, its settings or its rows do not fit the job and its rollouts.

    `reason` is `SegmentsRefused` for a rollout of several segments where the trainer takes one sequence, and
    `RolloutUnscored` for a rollout without a reward where the trainer needs one.
    """

    reason = "TrainerMismatch"


class RolloutsLate(IntegrationError, TimeoutError):
    """Raised if rollouts have not ended within the time that the trainer gave them."""

    reason = "RolloutsLate"


class StreamEnded(IntegrationError):
    """Raised if the stream has ended while the trainer still waited for rollouts."""

    reason = "StreamEnded"


class WeightsRefused(IntegrationError):
    """Raised if new weights did not reach every backend of the pool."""

    reason = "WeightsRefused"
