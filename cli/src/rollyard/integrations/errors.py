"""Errors of the integrations. Each has one line that says what is wrong and what to do."""

from __future__ import annotations

from rollyard.errors import CliError


class IntegrationError(CliError):
    """The base class of errors between Rollyard and a trainer."""


class SegmentsRefused(IntegrationError, ValueError):
    """Raised if a rollout has several segments, and the trainer takes one sequence of each rollout."""

    reason = "SegmentsRefused"


class TrainerMismatch(IntegrationError, ValueError):
    """Raised if the trainer's settings or rows do not fit the job, or the installed framework does not."""

    reason = "TrainerMismatch"


class RolloutUnscored(IntegrationError, ValueError):
    """Raised if a rollout has no reward, because its infrastructure failed, and the trainer needs one."""

    reason = "RolloutUnscored"


class RolloutsLate(IntegrationError, TimeoutError):
    """Raised if rollouts have not ended within the time that the trainer gave them."""

    reason = "RolloutsLate"


class StreamEnded(IntegrationError):
    """Raised if the stream has ended while the trainer still waited for rollouts."""

    reason = "StreamEnded"


class WeightsRefused(IntegrationError):
    """Raised if new weights did not reach every backend of the pool."""

    reason = "WeightsRefused"
