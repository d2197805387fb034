"""A trainer opens the steps of a stream with dynamic sampling; each step adds to the job's target."""

from __future__ import annotations

from typing import Any, Final

from rollyard_api.core.codec import loads
from rollyard_api.core.problems import Conflict
from rollyard_api.rollouts.transitions import advance
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.jobs import SamplingStep
from rollyard_api.trajectories import unread

MAX_STEPS: Final = 100_000
"""The most steps of one job, which bounds what their ids take in the database."""


def open_step(
    tx: Transaction, namespace: str, name: str, step: str, groups: int | None, max_unread: int
) -> dict[str, Any]:
    """Open a step, which wants `groups` more groups with a signal; opening it again changes nothing.

    Args:
        tx: The transaction.
        namespace: The namespace of the job.
        name: The name of the job, which must be a stream with dynamic sampling.
        step: The id of the step.
        groups: The target of the step; None stands for the job's `targetGroups`.
        max_unread: The number of unread results with which no further step is opened.

    Returns:
        The step: its id, its groups, the job's number of informative groups with which it is met (`goal`),
        whether it is met, and whether it was opened by this call.

    Raises:
        NotFound: There is no such job.
        Conflict: The job is no open stream with dynamic sampling, the step was opened with another number of
            groups, the job has MAX_STEPS steps, or too many of its results are unread.
    """
    job = job_rows.find_locked(tx, namespace, name)
    rules = job.limits.sampling
    if rules is None:
        raise Conflict(
            f"RolloutJob {name!r} has no spec.dynamicSampling, so it has no targets",
            reason="NoDynamicSampling",
        )
    wanted = rules.target_groups if groups is None else groups
    known = job_rows.step(tx.conn, job.id, step)
    if known is not None:
        if known.groups != wanted:
            raise Conflict(
                f"groups: the step {step!r} of RolloutJob {name!r} was opened with {known.groups}, "
                f"not {wanted}",
                reason="TargetDiffers",
            )
        return _described(tx, job.id, step, known, opened=False)
    if not loads(job.spec)["tasks"].get("stream"):
        raise Conflict(
            f"RolloutJob {name!r} is no stream: its only target is spec.dynamicSampling.targetGroups",
            reason="NotAStream",
        )
    if job.cancel_reason is not None:
        raise Conflict(
            f"RolloutJob {name!r} has ended or is ending ({job.cancel_reason}) and takes no more targets",
            reason="JobCancelled",
        )
    if job.closed:
        raise Conflict(f"RolloutJob {name!r} is closed and takes no more targets", reason="JobClosed")
    unread.check(job, max_unread)
    if job_rows.steps(tx.conn, job.id) >= MAX_STEPS:
        raise Conflict(
            f"RolloutJob {name!r} has {MAX_STEPS} steps, which is the most", reason="TooManyTargets"
        )
    made = job_rows.open_step(tx, job.id, step, wanted)
    advance(tx, job.id)
    return _described(tx, job.id, step, made, opened=True)


def _described(
    tx: Transaction, job_id: int, name: str, step: SamplingStep, *, opened: bool
) -> dict[str, Any]:
    met = job_rows.sampling(tx.conn, job_id).informative >= step.goal
    return {"id": name, "groups": step.groups, "goal": step.goal, "met": met, "opened": opened}
