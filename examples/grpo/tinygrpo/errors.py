"""The errors of the trainer. Each of them ends the training, and its message says what to do."""

from __future__ import annotations

from typing import ClassVar


class TrainingError(RuntimeError):
    """The training cannot continue. `reason` is stable, for programs."""

    reason: ClassVar[str] = "TrainingFailed"


class PolicyMismatch(TrainingError):
    """Tokens were not sampled by the weights whose version they carry, or carry an unknown version."""

    reason: ClassVar[str] = "PolicyMismatch"


class RolloutsEnded(TrainingError):
    """The job ended before the trainer had the groups that it needs."""

    reason: ClassVar[str] = "RolloutsEnded"


class PoolNotReady(TrainingError):
    """The pool has no server that is ready."""

    reason: ClassVar[str] = "PoolNotReady"


class UpdateFailed(TrainingError):
    """The pool did not take the new weights."""

    reason: ClassVar[str] = "UpdateFailed"


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, read, or exported for the embedded engine."""

    reason: ClassVar[str] = "CheckpointUnusable"


class CheckpointLost(TrainingError):
    """The control plane knows that the run used rollouts of which its newest checkpoint knows nothing."""

    reason: ClassVar[str] = "CheckpointLost"


class RunTaken(TrainingError):
    """Another trainer works on the same run."""

    reason: ClassVar[str] = "RunTaken"
