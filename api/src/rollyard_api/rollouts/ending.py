"""Rollouts end only here: a rollout gets its result, and complete groups and jobs are ended with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from rollyard_crds.fields.dynamic_sampling import TARGET_MET
from rollyard_crds.fields.signals import has_signal
from sqlalchemy import bindparam

from rollyard_api.core.wakeups import CLAIMS, QUEUE, UNFINISHED, job_topic
from rollyard_api.machine.limits import Limits, SamplingRules
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import dynamic_sampling
from rollyard_api.rollouts.dynamic_sampling import Tally
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import UnfinishedRollout
from rollyard_api.storage.schema import groups, jobs, rollouts
from rollyard_api.trajectories import spans


@dataclass(frozen=True, slots=True)
class Ending:
    """The way in which one rollout ends. `reward` is a number if and only if `state` is SUCCEEDED."""

    rollout: str
    job_id: int
    group_no: int
    state: RolloutState
    stage: str
    reward: float | None = None
    components: bytes | None = None
    reward_reason: str | None = None
    reward_output: str | None = None
    reason: str | None = None
    message: str | None = None
    timings: str = "{}"
    settled: str = ""
    last: UnfinishedRollout | None = None
    """The rollout in its last state, if `timings` lacks the time in it."""


_COUNT = (
    sa.update(jobs)
    .where(jobs.c.id == bindparam("b_job"))
    .values(
        ended=jobs.c.ended + bindparam("b_ended"),
        succeeded=jobs.c.succeeded + bindparam("b_succeeded"),
        failed=jobs.c.failed + bindparam("b_failed"),
        cancelled=jobs.c.cancelled + bindparam("b_cancelled"),
        reward_sum=jobs.c.reward_sum + bindparam("b_reward"),
    )
    .returning(jobs.c.ended, jobs.c.total, jobs.c.closed, jobs.c.limits, jobs.c.name, jobs.c.namespace)
)
_END = (
    sa.update(rollouts)
    .where(rollouts.c.id == bindparam("b_id"))
    .values(
        state=bindparam("b_state"),
        node="",
        lease_expires=None,
        since=bindparam("b_now"),
        sandbox_id=None,
        reward=bindparam("b_reward"),
        components=bindparam("b_components"),
        reward_reason=bindparam("b_reward_reason"),
        reward_output=bindparam("b_reward_output"),
        reason=bindparam("b_reason"),
        message=bindparam("b_message"),
        timings=bindparam("b_timings"),
        settled=bindparam("b_settled"),
        end_seq=bindparam("b_seq"),
        pending=1,
    )
)
_LEAVE = (
    sa.update(groups)
    .where(groups.c.job_id == bindparam("b_job"), groups.c.no == bindparam("b_no"))
    .values(remaining=groups.c.remaining - bindparam("b_count"))
    .returning(groups.c.remaining)
)
_NEXT_GROUP = (
    sa.update(jobs)
    .where(jobs.c.id == bindparam("b_job"))
    .values(groups_ended=jobs.c.groups_ended + 1)
    .returning(jobs.c.groups_ended)
)
_GROUP_END = (
    sa.update(groups)
    .where(groups.c.job_id == bindparam("b_job"), groups.c.no == bindparam("b_no"))
    .values(
        seq=bindparam("b_seq"),
        delivered=bindparam("b_delivered"),
        informative=bindparam("b_informative"),
        reason=bindparam("b_reason"),
    )
)
_REWARDS = sa.select(rollouts.c.state, rollouts.c.reward).where(
    rollouts.c.job_id == bindparam("b_job"), rollouts.c.group_no == bindparam("b_no")
)
_FINISH = (
    sa.update(jobs)
    .where(jobs.c.id == bindparam("b_job"), jobs.c.finished_at.is_(None))
    .values(finished_at=bindparam("b_now"))
)
_CLOSE = (
    sa.update(jobs)
    .where(jobs.c.id == bindparam("b_job"), jobs.c.cancel_reason.is_(None), jobs.c.finished_at.is_(None))
    .values(cancel_reason=bindparam("b_reason"), closed=True)
)
_IS_OVER = sa.select(jobs.c.id).where(
    jobs.c.id == bindparam("b_job"), jobs.c.cancel_reason.is_not(None), jobs.c.ended == jobs.c.total
)

METRIC_COMPLETIONS: Final = "completions"
METRIC_REWARD: Final = "reward"


def end(tx: Transaction, endings: Sequence[Ending]) -> None:
    """Give each rollout its result, in the order of the list, and end the groups and jobs that are complete.

    The update locks the job's row until the commit. The positions (`end_seq`) of a job's results are
    therefore in the order of the commits, and a reader's cursor skips nothing.
    """
    by_job: defaultdict[int, list[Ending]] = defaultdict(list)
    for ending in endings:
        by_job[ending.job_id].append(ending)
    for job_id in sorted(by_job):
        _end_of_job(tx, job_id, by_job[job_id])
    if any(ending.state != RolloutState.SUCCEEDED for ending in endings):
        # Such a rollout may have had a place at a backend. One that was evaluated had none any more.
        tx.wake(QUEUE)


def _end_of_job(tx: Transaction, job_id: int, endings: list[Ending]) -> None:
    row = tx.conn.execute(
        _COUNT,
        {
            "b_job": job_id,
            "b_ended": len(endings),
            "b_succeeded": sum(e.state == RolloutState.SUCCEEDED for e in endings),
            "b_failed": sum(e.state == RolloutState.FAILED for e in endings),
            "b_cancelled": sum(e.state == RolloutState.CANCELLED for e in endings),
            "b_reward": sum(e.reward for e in endings if e.reward is not None),
        },
    ).one()
    first = row.ended - len(endings) + 1
    tx.conn.execute(
        _END,
        [
            {
                "b_id": e.rollout,
                "b_state": e.state,
                "b_now": tx.now,
                "b_reward": e.reward,
                "b_components": e.components,
                "b_reward_reason": e.reward_reason,
                "b_reward_output": e.reward_output,
                "b_reason": e.reason,
                "b_message": e.message,
                "b_timings": e.timings,
                "b_settled": e.settled,
                "b_seq": first + i,
            }
            for i, e in enumerate(endings)
        ],
    )
    left: defaultdict[int, int] = defaultdict(int)
    for e in endings:
        left[e.group_no] += 1
        status = e.state.status
        tx.count(METRIC_COMPLETIONS, row.namespace, row.name, status, e.reason or "")
        if e.reward is not None:
            tx.count(METRIC_REWARD, row.namespace, row.name, value=e.reward)
        tx.emit(
            job_id, rollout=e.rollout, stage=e.stage, status=status, reward=e.reward, reason=e.reason or ""
        )
        _trace(tx, e, row.namespace, row.name)
    limits: Limits = row.limits
    rules = limits.sampling
    tally = Tally(surplus_rollouts=sum(e.reason == TARGET_MET for e in endings))
    for no in sorted(left):
        remaining = tx.conn.execute(_LEAVE, {"b_job": job_id, "b_no": no, "b_count": left[no]}).scalar_one()
        if remaining == 0:
            _end_group(tx, job_id, no, limits.min_group_size, rules, tally)
    if rules is not None:
        dynamic_sampling.count(tx, job_id, tally)
        advance(tx, job_id)
    elif row.closed and row.ended == row.total:
        finish(tx, job_id)
    tx.wake(job_topic(job_id))


def _trace(tx: Transaction, ending: Ending, namespace: str, job: str) -> None:
    """Add the span of the rollout, and that of its last state if it is cut off here."""
    last, reason = ending.last, ending.reason or ""
    if last is not None and last.state.is_leased:
        spans.worked(tx, last.id, ending.stage, last.token, last.since, error=reason)
    elif last is not None:
        spans.waited(tx, last.id, ending.stage, last.since, reason=reason)
    spans.ended(
        tx,
        ending.rollout,
        namespace=namespace,
        job=job,
        status=ending.state.status,
        timings=ending.timings,
        uncounted=0.0 if last is None else max(0.0, tx.now - last.since),
        reward=ending.reward,
        reason=reason,
    )


def _end_group(
    tx: Transaction, job_id: int, no: int, min_group: int, rules: SamplingRules | None, tally: Tally
) -> None:
    if rules is None:
        delivered, informative, reason = _whole_group(tx, job_id, no, min_group)
    else:
        result = dynamic_sampling.result_of(tx, job_id, no, min_group, rules)
        tally.add(result)
        delivered, informative, reason = result.delivered, result.informative, result.reason
    seq = tx.conn.execute(_NEXT_GROUP, {"b_job": job_id}).scalar_one()
    tx.conn.execute(
        _GROUP_END,
        {
            "b_job": job_id,
            "b_no": no,
            "b_seq": seq,
            "b_delivered": delivered,
            "b_informative": informative,
            "b_reason": reason,
        },
    )


def _whole_group(tx: Transaction, job_id: int, no: int, min_group: int) -> tuple[bool, bool, str | None]:
    """Return whether a group is delivered, whether it is informative, and why it is not delivered."""
    members: list[Any] = list(tx.conn.execute(_REWARDS, {"b_job": job_id, "b_no": no}))
    rewards = [m.reward for m in members if m.state == RolloutState.SUCCEEDED]
    if len(rewards) >= min(min_group, len(members)):
        return True, has_signal(rewards), None
    all_cancelled = all(m.state == RolloutState.CANCELLED for m in members)
    return False, False, "Cancelled" if all_cancelled else "TooFewRewards"


def advance(tx: Transaction, job_id: int) -> None:
    """Take the next step of a job with dynamic sampling: start groups, or end what is not needed any more.

    The transaction must have locked the row of the job. See `dynamic_sampling.advance`.
    """
    surplus = dynamic_sampling.advance(tx, job_id)
    if surplus:
        end(tx, [cancelled(row, TARGET_MET) for row in surplus])
    elif tx.conn.execute(_IS_OVER, {"b_job": job_id}).first() is not None:
        finish(tx, job_id)


def cancelled(row: UnfinishedRollout, reason: str) -> Ending:
    """Return the ending of an unfinished rollout that is cancelled."""
    return Ending(
        rollout=row.id,
        job_id=row.job_id,
        group_no=row.group_no,
        state=RolloutState.CANCELLED,
        stage=row.state.stage or "",
        reason=reason,
        timings=row.timings,
        settled=row.settled,
        last=row,
    )


def close(tx: Transaction, job_id: int, reason: str) -> None:
    """Remove a job from all queues for a reason. Those of its rollouts that have begun end soon after."""
    tx.conn.execute(_CLOSE, {"b_job": job_id, "b_reason": reason})
    if tx.conn.execute(_IS_OVER, {"b_job": job_id}).first() is not None:
        finish(tx, job_id)
    for topic in (job_topic(job_id), QUEUE, CLAIMS, UNFINISHED):
        tx.wake(topic)


def finish(tx: Transaction, job_id: int) -> None:
    """Mark a closed job as finished. This is called when every rollout of the job has ended."""
    tx.conn.execute(_FINISH, {"b_job": job_id, "b_now": tx.now})
    for topic in (job_topic(job_id), QUEUE, CLAIMS, UNFINISHED):
        tx.wake(topic)
