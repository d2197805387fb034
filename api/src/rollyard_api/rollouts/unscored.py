"""Rollouts that wait for the trainer's reward: the trainer reads them, and hands their rewards in.

A rollout waits from the end of its Run until its reward comes, it is cancelled, new weights make it too old,
or its time is over (see `sweeps`). What Run recorded stays in the database until then, so nothing is lost if
the control plane or the trainer is killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import sqlalchemy as sa
from pydantic import AfterValidator, BeforeValidator, Field
from rollyard_crds.base import Model
from rollyard_crds.fields.reward import MAX_COMPONENTS, RESERVED, ComponentName
from rollyard_crds.lease import Reward
from rollyard_crds.trajectory import RewardReason
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import MAX_PROBLEMS, dumps, loads
from rollyard_api.core.problems import Conflict, Invalid, NotFound
from rollyard_api.machine.events import Rewarded
from rollyard_api.machine.limits import Limits
from rollyard_api.machine.rollout import Rejection, Rollout, decide
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import transitions
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import EndedRollout, JobRow, RolloutSize, columns, read_all
from rollyard_api.storage.schema import payloads, rollouts
from rollyard_api.trajectories import records
from rollyard_api.trajectories.records import EndedResults

MAX_REWARDS: Final = 1000
"""The most rewards of one call."""
PLAYS_AGAIN: Final = "PlaysAgain"
"""Why a reward for an earlier Run is not needed: the rollout was too old for new weights and began again."""


def _free(name: str) -> str:
    if name in RESERVED:
        raise ValueError(f"must not be one of {', '.join(RESERVED)}")
    return name


def _with_name(value: Any) -> Any:
    return {"reward": value} if not isinstance(value, dict) else value


class TrainerReward(Model):
    """The reward of one rollout. A number alone stands for a reward without anything else."""

    reward: Reward
    components: Annotated[
        dict[Annotated[ComponentName, AfterValidator(_free)], Reward], Field(max_length=MAX_COMPONENTS)
    ] = Field(default_factory=dict)
    """Components, which are delivered as they are. The metric of dynamic sampling may be one of them."""
    reason: RewardReason = ""
    """Why the reward is what it is, in CamelCase, for people."""
    fence: Annotated[int, Field(ge=0, strict=True)] | None = None
    """The `fence` of the unscored trajectory. It is required where new weights may let a rollout play again,
    which is where the job has `maxPolicyLag` and restarts stale rollouts."""


class TrainerRewards(Model):
    """Rewards that a trainer hands in, by the ids of their rollouts."""

    rewards: Annotated[
        dict[Annotated[str, Field(max_length=128)], Annotated[TrainerReward, BeforeValidator(_with_name)]],
        Field(min_length=1, max_length=MAX_REWARDS),
    ]


class _Result(msgspec.Struct, frozen=True):
    """The result of a rollout that has ended. The fields have the names of its row's columns."""

    id: str
    reward: float | None
    components: bytes | None
    reward_reason: str | None
    reason: str | None

    def is_from(self, given: TrainerReward) -> bool:
        """Return whether the result is what this reward gave."""
        components = {} if self.components is None else loads(self.components)
        mine = (self.reward, components, self.reward_reason or "")
        return mine == (given.reward, given.components, given.reason)


def _results(tx: Transaction, ids: Sequence[str]) -> dict[str, _Result]:
    query = sa.select(*columns(_Result, rollouts)).where(rollouts.c.id.in_(ids))
    return {row.id: row for row in read_all(_Result, tx.conn.execute(query))}


def hand_in(
    tx: Transaction, namespace: str, name: str, rewards: Mapping[str, TrainerReward]
) -> dict[str, Any]:
    """Give rollouts their rewards: all of them, or none if one of the rewards is refused.

    A reward that a rollout has already changes nothing, so a repeat is harmless. Neither does one that is too
    late, because its rollout has ended without it or plays again; the answer names it.

    Args:
        tx: The transaction.
        namespace: The namespace of the job.
        name: The name of the job.
        rewards: The rewards, by the ids of their rollouts.

    Returns:
        How many were accepted, how many were repeated, and why others are late, by the ids of the rollouts.

    Raises:
        NotFound: There is no such job, or it has no such rollout.
        Invalid: A reward names no Run, and it might be for another one than that which waits.
        Conflict: The trainer gives no rewards in this job, a rollout does not wait for one yet, or it has
            another reward already.
    """
    job = job_rows.find(tx.conn, namespace, name)
    _refuse_others(job)
    rows = rollout_rows.named(tx, rewards)
    unknown = [id for id in rewards if id not in rows or rows[id].job_id != job.id]
    if unknown:
        lines = [f"rewards.{id}: RolloutJob {name!r} has no such rollout" for id in unknown]
        raise NotFound.of(*lines[:MAX_PROBLEMS], reason="RolloutNotFound")
    _check_fences(rewards, job.limits)
    results = _results(tx, [id for id, row in rows.items() if row.state.has_ended])
    decided: list[transitions.Decided] = []
    late: dict[str, str] = {}
    waiting: list[str] = []
    differing: list[str] = []
    repeated = 0
    for id, given in rewards.items():
        row = rows[id]
        if row.state in (RolloutState.FAILED, RolloutState.CANCELLED):
            late[id] = results[id].reason or row.state.status
        elif _is_of_earlier_run(row, given):
            late[id] = PLAYS_AGAIN
        elif row.state == RolloutState.SUCCEEDED:
            same = results[id].is_from(given)
            repeated += same
            if not same:
                differing.append(f"rewards.{id}: the rollout has the reward {results[id].reward!r} already")
        else:
            decision = decide(row, _event(given), None, tx.now)
            if isinstance(decision, Rejection):
                waiting.append(f"rewards.{id}: the rollout is still {row.state.status} in stage {row.stage}")
            else:
                decided.append((row, decision))
    if differing:
        raise Conflict.of(*differing[:MAX_PROBLEMS], reason="RewardDiffers")
    if waiting:
        raise Conflict.of(*waiting[:MAX_PROBLEMS], reason="RolloutNotWaiting")
    transitions.apply(tx, decided)
    return {"accepted": len(decided), "repeated": repeated, "late": late}


def _event(given: TrainerReward) -> Rewarded:
    components = dumps(given.components) if given.components else None
    return Rewarded(given.fence, given.reward, components, given.reason or None)


def _refuse_others(job: JobRow) -> None:
    if job.limits.trainer_reward_seconds is None:
        raise Conflict(
            f"RolloutJob {job.name!r} takes no rewards from a trainer: its Eval gives them; submit a stream "
            "with 'handler: unscored' and no 'reward' to give them yourself",
            reason="NotRewardedByTrainer",
        )


def _check_fences(rewards: Mapping[str, TrainerReward], limits: Limits) -> None:
    """Check that each reward names its Run where another Run of the rollout may wait by now."""
    if limits.max_policy_lag is None or limits.stale_rollouts == "Cancel":
        return
    lines = [
        f"rewards.{id}.fence: is required, because the job restarts rollouts beyond its maxPolicyLag: give "
        "the 'fence' of the unscored trajectory"
        for id, given in rewards.items()
        if given.fence is None
    ]
    if lines:
        raise Invalid.of(*lines[:MAX_PROBLEMS], reason="FenceMissing")


def _is_of_earlier_run(row: Rollout, given: TrainerReward) -> bool:
    """Return whether a reward is for a Run after which the rollout began again."""
    if given.fence is None or given.fence > row.token:
        return False
    left = row.state < RolloutState.UNSCORED and row.state != RolloutState.LEASED_RUN
    return given.fence < row.token or left


# Reading what waits.


def waiting_after(conn: Connection, job_id: int, cursor: int, limit: int, max_bytes: int) -> EndedResults:
    """Return rollouts that began to wait after a cursor: at most `limit`, with `max_bytes` if several.

    Raises:
        Conflict: The trainer gives no rewards in this job.
    """
    job = job_rows.by_id(conn, job_id)
    assert job is not None, "its caller has just read it"
    _refuse_others(job)
    query = (
        sa.select(*rollouts.c["id", "unscored_seq", "group_no", "sample"], sa.literal(1))
        .add_columns(records.waiting_bytes())
        .outerjoin(payloads, payloads.c.rollout_id == rollouts.c.id)
        .where(rollouts.c.job_id == job_id, rollouts.c.unscored_seq > cursor)
    )
    rows = read_all(RolloutSize, conn.execute(query.order_by(rollouts.c.unscored_seq).limit(limit)))
    count = records.fitting((row.bytes for row in rows), max_bytes)
    full = count < len(rows) or len(rows) == limit
    return EndedResults(
        rows[:count], rows[count - 1].end_seq if full else max(cursor, job.unscored), job.unscored
    )


class UnscoredRow(msgspec.Struct, frozen=True):
    """A rollout that waits, as its record needs it."""

    row: EndedRollout
    seq: int
    fence: int


def rows_of(conn: Connection, job_id: int, cursor: int, last: int) -> list[UnscoredRow]:
    """Return the rollouts that still wait and began to after a cursor, up to the place `last`."""
    query = (
        records.select()
        .add_columns(rollouts.c.unscored_seq, rollouts.c.token)
        .where(rollouts.c.job_id == job_id, rollouts.c.unscored_seq > cursor, rollouts.c.unscored_seq <= last)
        .order_by(rollouts.c.unscored_seq)
    )
    return [UnscoredRow(EndedRollout(*row[:-2]), *row[-2:]) for row in conn.execute(query)]


def head_of(waiting: UnscoredRow, job: JobRow) -> dict[str, Any]:
    """Return the UnscoredTrajectory of a rollout without its segments, before it is encoded."""
    return records.head_of(waiting.row, job) | {"status": "unscored", "fence": waiting.fence}


def oldest(conn: Connection, job_id: int) -> float | None:
    """Return since when the rollout has waited that has waited longest, in seconds of the epoch, or None."""
    query = sa.select(sa.func.min(rollouts.c.since)).where(
        rollouts.c.job_id == job_id, rollouts.c.state == RolloutState.UNSCORED
    )
    since: float | None = conn.execute(query).scalar_one()
    return since
