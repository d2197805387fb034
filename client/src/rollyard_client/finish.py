"""Functions that decide how a job has ended, or what it waits for, by what its driver and its server say."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NoReturn

from rollyard_crds.fields.annotations import CANCEL_REASON

from rollyard_client.call import Steps
from rollyard_client.errors import (
    JobFailed,
    JobReplaced,
    NotFound,
    RollyardError,
    ServerUnavailable,
    WaitTimeout,
)
from rollyard_client.requests import jobs, views

if TYPE_CHECKING:
    from rollyard_crds.rolloutjob import RolloutJob
    from rollyard_crds.weights import WeightUpdate

POLL_SECONDS: Final = 0.5
WAIT_SECONDS: Final = 20.0
VERDICT_SECONDS: Final = 5.0
"""How long a driver's verdict on a job that has just ended is waited for."""
FOLLOW_SECONDS: Final = 3600.0
"""How long an iterator waits for the next result by default."""
_SHOWN_ADVICE: Final = 2
_DELETED, _TARGET_MET = "Deleted", "TargetMet"
_REASONS: Final = {"Cancelled": "JobCancelled", _DELETED: "JobDeleted"}
_WORDS: Final = {"JobCancelled": "was cancelled", "JobDeleted": "was deleted", "JobFailed": "has failed"}


def finished(job: RolloutJob) -> bool:
    """Return whether the condition `Finished` of the job is True."""
    return any(c.type == "Finished" and c.status == "True" for c in job.status.conditions)


def check_same(job: RolloutJob, uid: str | None) -> None:
    """Check that the awaited job still has this uid, which is None before the job was first seen.

    Raises:
        JobReplaced: Another job has its name now.
    """
    if uid is not None and job.metadata.uid != uid:
        name = job.metadata.name
        raise JobReplaced(
            f"RolloutJob {name!r} was deleted while it was waited for, and another one was submitted under "
            "its name"
        )


def deleted(name: str) -> JobFailed:
    """Return the error for a job that is gone, although it was there before."""
    return JobFailed(f"RolloutJob {name!r} was deleted while it was waited for", reason="JobDeleted")


def failure(job: RolloutJob) -> JobFailed | None:
    """Return the error for a job that has ended without success, or None for any other job."""
    failed = next((c for c in job.status.conditions if c.type == "Failed" and c.status == "True"), None)
    cancelled = job.metadata.annotations.get(CANCEL_REASON)
    if failed is None and cancelled in (None, _TARGET_MET):
        return None
    why = cancelled or "" if failed is None else failed.reason
    reason = _REASONS.get(cancelled if cancelled == _DELETED else why, "JobFailed")
    details = [why] if reason == "JobFailed" else []
    details += [failed.message] if failed is not None and failed.message else []
    text = f"RolloutJob {job.metadata.name!r} {_WORDS[reason]}"
    return JobFailed(": ".join((text, *details)), reason=reason)


def check_success(name: str, namespace: str) -> Steps[None]:
    """Yield the calls that find out how a job without further results has ended.

    The rollouts of a job may have ended a moment before its driver says whether the job has failed.

    Raises:
        JobFailed: It has failed, or it was cancelled or deleted.
    """
    end = time.monotonic() + VERDICT_SECONDS
    while True:
        try:
            job: RolloutJob = yield jobs.job(name, namespace)
        except NotFound as error:
            raise deleted(name) from error
        doubtful = job.status.counts.failed or CANCEL_REASON in job.metadata.annotations
        has_driver = bool(job.status.conditions)
        if finished(job) or not doubtful or not has_driver or time.monotonic() > end:
            break
        yield POLL_SECONDS
    failed = failure(job)
    if failed is not None:
        raise failed


def late(text: str, name: str, namespace: str, *, end: str = "") -> Steps[NoReturn]:
    """Yield the calls that find out what a job waits for, and raise WaitTimeout.

    Args:
        text: What has not come in time.
        end: What follows the reason in the message.
    """
    try:
        waits: views.JobWaiting | None = yield views.waiting(name, namespace)
    except RollyardError:
        waits = None  # What the job itself says is enough.
    try:
        job: RolloutJob = yield jobs.job(name, namespace)
    except NotFound as error:
        raise deleted(name) from error
    messages = dict.fromkeys(("" if waits is None else waits.message, job.status.message))
    messages.pop("", None)
    says = f"; it says: {'; '.join(messages)}" if messages else ""
    advice = "".join(f"; advice: {each.message}" for each in job.status.advice[:_SHOWN_ADVICE])
    raise WaitTimeout(f"{text}{says}{advice}{end}", reason=None if waits is None else waits.reason)


def stream_cut(name: str, namespace: str) -> Steps[NoReturn]:
    """Yield the calls that find out why a stream of events has broken off, and raise the error.

    Raises:
        JobFailed: The job was deleted.
        ServerUnavailable: The server has closed the stream.
    """
    try:
        yield jobs.job(name, namespace)
    except NotFound as error:
        raise deleted(name) from error
    raise ServerUnavailable(
        f"the control plane has closed the stream of events of RolloutJob {name!r}; to continue, give the "
        "last event's id as last_id"
    )


def not_ended(job: RolloutJob, seconds: float) -> str:
    """Return the message about a job that has not ended in time, without what it waits for."""
    counts = job.status.counts
    ended = counts.succeeded + counts.failed + counts.cancelled
    return (
        f"RolloutJob {job.metadata.name!r} has not ended within {seconds:g} s: phase {job.status.phase}, "
        f"{ended} of {counts.total} rollouts ended"
    )


def update_timed_out(update: WeightUpdate, pool: str, seconds: float) -> str:
    """Return the message about a weight update that has not ended in time."""
    behind = ", ".join(part.url for part in update.backends if part.step != "Done")
    return (
        f"weight update {update.id} ({update.policy_version}) of BackendPool {pool!r} has not ended within "
        f"{seconds:g} s; {f'not done: {behind}' if behind else update.message or 'all backends are done'}"
    )
