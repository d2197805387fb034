"""A trainer opens the steps of a stream with dynamic sampling; each step adds to the job's target."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollyard_api.core.codec import loads
from rollyard_api.core.problems import Conflict
from rollyard_api.jobs.jobs import find_locked
from rollyard_api.rollouts.dynamic_sampling import rules_of
from rollyard_api.rollouts.ending import advance
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import dynamic_sampling, sampling_targets
from rollyard_api.trajectories import unread

MAX_STEPS: Final = 100_000
"""The most steps of one job, which bounds what their ids take in the database."""
_STEP = sa.select(sampling_targets).where(
    sampling_targets.c.job_id == bindparam("b_job"), sampling_targets.c.id == bindparam("b_id")
)
_STEPS = sa.select(sa.func.count()).where(sampling_targets.c.job_id == bindparam("b_job"))
_RAISE = (
    sa.update(dynamic_sampling)
    .where(dynamic_sampling.c.job_id == bindparam("b_job"))
    .values(target=dynamic_sampling.c.target + bindparam("b_groups"))
    .returning(dynamic_sampling.c.target)
)
_INFORMATIVE = sa.select(dynamic_sampling.c.informative).where(
    dynamic_sampling.c.job_id == bindparam("b_job")
)


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
    job = find_locked(tx, namespace, name)
    rules = rules_of(loads(job.limits))
    if rules is None:
        raise Conflict(
            f"RolloutJob {name!r} has no spec.dynamicSampling, so it has no targets",
            reason="NoDynamicSampling",
        )
    wanted = rules["target"] if groups is None else groups
    known = tx.conn.execute(_STEP, {"b_job": job.id, "b_id": step}).one_or_none()
    if known is not None:
        if known.groups != wanted:
            raise Conflict(
                f"groups: the step {step!r} of RolloutJob {name!r} was opened with {known.groups}, "
                f"not {wanted}",
                reason="TargetDiffers",
            )
        return _described(tx, job.id, step, wanted, known.goal, opened=False)
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
    unread.check(job, loads(job.limits)["samples"], max_unread)
    if tx.conn.execute(_STEPS, {"b_job": job.id}).scalar_one() >= MAX_STEPS:
        raise Conflict(
            f"RolloutJob {name!r} has {MAX_STEPS} steps, which is the most", reason="TooManyTargets"
        )
    goal = tx.conn.execute(_RAISE, {"b_job": job.id, "b_groups": wanted}).scalar_one()
    tx.conn.execute(
        sa.insert(sampling_targets).values(job_id=job.id, id=step, groups=wanted, goal=goal, opened_at=tx.now)
    )
    advance(tx, job.id)
    return _described(tx, job.id, step, wanted, goal, opened=True)


def _described(
    tx: Transaction, job_id: int, step: str, groups: int, goal: int, *, opened: bool
) -> dict[str, Any]:
    informative = tx.conn.execute(_INFORMATIVE, {"b_job": job_id}).scalar_one()
    return {"id": step, "groups": groups, "goal": goal, "met": informative >= goal, "opened": opened}
