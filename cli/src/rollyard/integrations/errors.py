"""Errors of the integrations. Each has one line that says what is wrong and what to do."""

from __future__ import annotations

from rollyard.errors import CliError


class TrainerMismatch(CliError, ValueError):
    """Raised if the trainer, its settings or its rows do not fit the job and its rollouts.

    `reason` is `SegmentsRefused` for a rollout of several segments where the trainer takes one sequence,
    `RolloutUnscored` for a rollout without a reward where the trainer needs one, and `AdapterMismatch` where
    the trainer trains an adapter and the pool would get a whole model, or the other way round.
    """

    reason = "TrainerMismatch"


class RolloutsLate(CliError, TimeoutError):
    """Raised if rollouts have not ended within the time that the trainer gave them."""

    reason = "RolloutsLate"


class StreamEnded(CliError):
    """Raised if the stream has ended, or takes no more tasks, and the trainer still needs rollouts of it."""

    reason = "StreamEnded"
