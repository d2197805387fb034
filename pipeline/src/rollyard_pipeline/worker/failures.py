"""Translation of exceptions into the failures that are reported to the queue."""

from __future__ import annotations

from rollyard_crds.lease import Lease, StageFailure, StageTimes
from rollyard_crds.rolloutjob import StageName
from rollyard_crds.trajectory import TokensMissing
from rollyard_inference.errors import BackendError
from rollyard_sandbox.errors import SandboxError as ExecError

from rollyard_pipeline.errors import PipelineError
from rollyard_pipeline.handlers.isolated.places import message_of
from rollyard_pipeline.trajectories.sanitize import clean_text

_MESSAGE_LIMIT = 4096  # StageFailure has the same limit.


def stage_failure(lease: Lease, error: Exception, times: StageTimes) -> StageFailure:
    """Return the failure to report for `error`. An unforeseen error is an `InternalError` and is retried."""
    retryable, return_to, counts = True, _same_stage(lease), True
    match error:
        case PipelineError():
            reason, retryable, counts = error.reason, error.retryable, error.counts
            if error.return_to is not None and (error.return_to != "init" or lease.stage != "init"):
                return_to = error.return_to
            message = str(error)
        case BackendError() | TokensMissing():
            reason, retryable, message = error.reason, error.retryable, str(error)
        case ExecError():
            # A fresh sandbox may succeed where the exec server failed.
            reason, return_to, message = error.reason, "init", str(error)
        case _:
            reason, message = "InternalError", message_of(error)
    return StageFailure(
        rollout=lease.rollout,
        token=lease.token,
        stage=lease.stage,
        reason=reason[:128],
        message=clean_text(message, _MESSAGE_LIMIT),
        retryable=retryable,
        return_to=return_to,
        counts=counts,
        times=times,
    )


def hand_over(lease: Lease, times: StageTimes) -> StageFailure:
    """Return the report that passes the rollout to another worker. It does not count as a failure."""
    return StageFailure(
        rollout=lease.rollout,
        token=lease.token,
        stage=lease.stage,
        reason="WorkerDrained",
        message="the worker stopped before the stage was done",
        return_to=_same_stage(lease),
        counts=False,
        times=times,
    )


def _same_stage(lease: Lease) -> StageName | None:
    """Return where the next attempt starts. A Run that used its sandbox starts again from a fresh one."""
    return "init" if lease.stage == "run" and lease.sandbox is not None else None
