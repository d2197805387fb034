"""Dynamic sampling: groups without a signal are filtered, and others are started until the target is met.

The rollouts of a group are made when the group starts. While the target is not met, as many groups as the job
allows are in flight: any of them may prove to be without a signal, so each of them may still be needed. A
group that ends makes room for the next one in the same transaction. All decisions about a job are made under
the lock of its row, which every ending takes, and replicas therefore make them one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa
from rollyard_crds.fields.dynamic_sampling import REWARD, TARGET_MET, TARGET_NOT_MET
from rollyard_crds.fields.signals import has_signal
from sqlalchemy import bindparam

from rollyard_api.core.codec import loads
from rollyard_api.core.wakeups import CLAIMS, QUEUE, UNFINISHED, job_topic
from rollyard_api.machine.limits import Limits, SamplingRules
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import admission
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import SamplingRow, UnfinishedRollout, columns, read_all
from rollyard_api.storage.schema import dynamic_sampling, jobs, rollouts

CANCEL_BATCH = 2000
"""The most rollouts that are cancelled in the transaction that meets a target. The sweep ends the rest, which
nobody can lease any more."""

_MEMBERS = sa.select(
    rollouts.c.state, rollouts.c.reward, rollouts.c.components, rollouts.c.reason, rollouts.c.sampled_tokens
).where(rollouts.c.job_id == bindparam("b_job"), rollouts.c.group_no == bindparam("b_no"))
_COUNTERS = ("informative", "uninformative", "dropped", "surplus", "surplus_rollouts", "discarded_tokens")
_TALLY = (
    sa.update(dynamic_sampling)
    .where(dynamic_sampling.c.job_id == bindparam("b_job"))
    .values({name: dynamic_sampling.c[name] + bindparam(f"b_{name}") for name in _COUNTERS})
)
_STANDING = (
    sa.select(
        *columns(SamplingRow, dynamic_sampling),
        *(jobs.c[name] for name in ("name", "uid", "limits", "groups", "groups_ended", "closed", "holding")),
    )
    .join_from(dynamic_sampling, jobs, jobs.c.id == dynamic_sampling.c.job_id)
    .where(dynamic_sampling.c.job_id == bindparam("b_job"), jobs.c.cancel_reason.is_(None))
)
_STARTED = (
    sa.update(dynamic_sampling)
    .where(dynamic_sampling.c.job_id == bindparam("b_job"))
    .values(started=dynamic_sampling.c.started + bindparam("b_count"))
)
_HOLD = sa.update(jobs).where(jobs.c.id == bindparam("b_job")).values(holding=bindparam("b_holding"))
_CONCLUDE = (
    sa.update(jobs)
    .where(jobs.c.id == bindparam("b_job"))
    .values(cancel_reason=bindparam("b_reason"), closed=True)
)
# A rollout whose row another replica has locked is left to the sweep: to wait for it could be a deadlock.
_UNFINISHED = (
    sa.select(*columns(UnfinishedRollout, rollouts))
    .where(rollouts.c.job_id == bindparam("b_job"), rollouts.c.state < RolloutState.SUCCEEDED)
    .order_by(rollouts.c.id)
    .limit(CANCEL_BATCH)
    .with_for_update(skip_locked=True)
)


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What the members of an ended group amount to."""

    delivered: bool
    informative: bool
    reason: str | None
    discarded_tokens: int
    """The sampled tokens that are known and of no use, because the group is not informative."""


@dataclass(slots=True)
class Tally:
    """What endings add to the counters of a job with dynamic sampling."""

    informative: int = 0
    uninformative: int = 0
    dropped: int = 0
    surplus: int = 0
    surplus_rollouts: int = 0
    discarded_tokens: int = 0

    def add(self, group: GroupResult) -> None:
        """Count an ended group."""
        if group.informative:
            self.informative += 1
        elif group.delivered:
            self.uninformative += 1
        elif group.reason == TARGET_MET:
            self.surplus += 1
        else:
            self.dropped += 1
        self.discarded_tokens += group.discarded_tokens


def begin(tx: Transaction, job_id: int, target: int, samples: int) -> None:
    """Create the counters of a new job, which wants `target` groups of `samples` rollouts with a signal."""
    counters = dict.fromkeys(_COUNTERS, 0)
    tx.conn.execute(
        sa.insert(dynamic_sampling).values(
            job_id=job_id, samples=samples, target=target, started=0, **counters
        )
    )


def result_of(tx: Transaction, job_id: int, no: int, min_group: int, rules: SamplingRules) -> GroupResult:
    """Return the result of a group whose members have all ended."""
    members: list[Any] = list(tx.conn.execute(_MEMBERS, {"b_job": job_id, "b_no": no}))
    tokens = sum(m.sampled_tokens or 0 for m in members)
    if any(m.state == RolloutState.CANCELLED and m.reason == TARGET_MET for m in members):
        # What remains of the group is not what the trainer asked for, however many members have a reward.
        return GroupResult(False, False, TARGET_MET, tokens)
    rewarded = [m for m in members if m.state == RolloutState.SUCCEEDED]
    if len(rewarded) < min(min_group, len(members)):
        all_cancelled = all(m.state == RolloutState.CANCELLED for m in members)
        return GroupResult(False, False, "Cancelled" if all_cancelled else "TooFewRewards", tokens)
    signal = has_signal(_values(rewarded, rules.metric), rules.min_std)
    return GroupResult(True, signal, None, 0 if signal else tokens)


def _values(rewarded: Sequence[Any], metric: str) -> list[float]:
    """Return the metric of those members that have it."""
    if metric == REWARD:
        return [m.reward for m in rewarded]
    components = [loads(m.components) for m in rewarded if m.components is not None]
    return [float(found[metric]) for found in components if metric in found]


def count(tx: Transaction, job_id: int, tally: Tally) -> None:
    """Add to the counters of a job."""
    values = asdict(tally)
    if any(values.values()):
        tx.conn.execute(_TALLY, {"b_job": job_id, **{f"b_{name}": n for name, n in values.items()}})


def advance(tx: Transaction, job_id: int) -> list[UnfinishedRollout]:
    """Start the groups that there is room for, or conclude the job, and return the rollouts to cancel.

    A job that was cancelled, or has been concluded before, is left alone. The transaction must have locked
    the row of the job.
    """
    row = tx.conn.execute(_STANDING, {"b_job": job_id}).one_or_none()
    if row is None:
        return []
    limits: Limits = row.limits
    rules = limits.sampling
    assert rules is not None
    most = row.groups if rules.max_groups is None else min(row.groups, rules.max_groups)
    if row.informative >= row.target:
        if row.closed:
            _conclude(tx, job_id, TARGET_MET)
            return read_all(UnfinishedRollout, tx.conn.execute(_UNFINISHED, {"b_job": job_id}))
        _hold(tx, row, holding=True)
        return []
    _hold(tx, row, holding=False)
    in_flight = row.started - row.groups_ended
    starting = max(0, min(most - row.started, rules.groups_in_flight - in_flight))
    if starting:
        tx.conn.execute(_STARTED, {"b_job": job_id, "b_count": starting})
        numbers = range(row.started, row.started + starting)
        admission.admit(tx, job_id, admission.prefix_of(row.name, row.uid), numbers, limits.samples)
    elif in_flight == 0 and (row.closed or most == rules.max_groups):
        _conclude(tx, job_id, TARGET_NOT_MET)
    return []


def _hold(tx: Transaction, row: Any, *, holding: bool) -> None:
    if row.holding != holding:
        tx.conn.execute(_HOLD, {"b_job": row.job_id, "b_holding": holding})
        tx.wake(QUEUE)


def _conclude(tx: Transaction, job_id: int, reason: str) -> None:
    tx.conn.execute(_CONCLUDE, {"b_job": job_id, "b_reason": reason})
    for topic in (job_topic(job_id), QUEUE, CLAIMS, UNFINISHED):
        tx.wake(topic)
