"""Every statement that writes `jobs`, `plugins`, `dynamic_sampling` or `sampling_targets`, and shared reads.

A change wakes all waits for it, so no caller has to know of them. Where a function says that it needs
the lock of the job's row, `find_locked` or an earlier change of the row in the same transaction gives it.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa
from rollyard_crds.reading.plugin import Plugin
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import dumps, loads
from rollyard_api.core.cursors import Kind
from rollyard_api.core.problems import NotFound
from rollyard_api.core.wakeups import CLAIMS, QUEUE, UNFINISHED, job_topic
from rollyard_api.machine.groups import Tally
from rollyard_api.machine.jobs import SamplingState
from rollyard_api.machine.limits import Limits
from rollyard_api.machine.signs import Signs
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import JobRow, columns, read_one
from rollyard_api.storage.schema import dynamic_sampling, jobs, plugins, rollouts, sampling_targets
from rollyard_api.storage.statements import rows_of

DELETED: Final = "Deleted"
"""The cancel reason of a job that is to be removed."""
_THIS: Final = jobs.c.id == bindparam("b_job")
_ITS: Final = dynamic_sampling.c.job_id == bindparam("b_job")
_ITS_STEPS: Final = sampling_targets.c.job_id == bindparam("b_job")
_ITS_PLUGINS: Final = plugins.c.job_id == bindparam("b_job")
_UPDATE: Final = sa.update(jobs).where(_THIS)
OPEN: Final = (jobs.c.cancel_reason.is_(None), jobs.c.finished_at.is_(None))
"""The conditions of a job that may still start rollouts."""
LEASABLE: Final = (*OPEN, jobs.c.deleted_at.is_(None), jobs.c.suspended.is_(False))
"""The conditions of a job whose rollouts may be leased."""


def _set(tx: Transaction, job_id: int, **values: Any) -> None:
    tx.conn.execute(_UPDATE, {"b_job": job_id, **values})


def _wake_all(tx: Transaction, job_id: int) -> None:
    tx.wake(job_topic(job_id), QUEUE, CLAIMS, UNFINISHED)


# Finding jobs.

_FIND: Final = sa.select(jobs).where(
    jobs.c.namespace == bindparam("b_namespace"),
    jobs.c.name == bindparam("b_name"),
    jobs.c.deleted_at.is_(None),
)
_FIND_LOCKED: Final = _FIND.with_for_update()
_BY_ID: Final = sa.select(jobs).where(_THIS)


def named(conn: Connection, namespace: str, name: str, *, lock: bool = False) -> JobRow | None:
    """Return the job with this name that is not deleted, or None; `lock` locks its row until the commit."""
    rows = conn.execute(_FIND_LOCKED if lock else _FIND, {"b_namespace": namespace, "b_name": name})
    return read_one(JobRow, rows.one_or_none())


def find(
    conn: Connection, namespace: str, name: str, *, uid: str | None = None, lock: bool = False
) -> JobRow:
    """Return the job with this name that is not deleted, and has this uid if one is given.

    Raises:
        NotFound: There is no such job in this namespace, or another job with this name has replaced it.
    """
    job = named(conn, namespace, name, lock=lock)
    if job is None:
        raise NotFound(f"no RolloutJob {name!r} in namespace {namespace!r}", reason="JobNotFound")
    if uid is not None and uid != job.uid:
        raise NotFound(f"RolloutJob {name!r} with uid {uid} is gone", reason="JobNotFound")
    return job


def find_locked(tx: Transaction, namespace: str, name: str) -> JobRow:
    """Return the same as `find`, and lock the row until the commit."""
    return find(tx.conn, namespace, name, lock=True)


def by_id(conn: Connection, job_id: int) -> JobRow | None:
    """Return the row of a job, even of a deleted one, by its number; return None once the row is removed."""
    return read_one(JobRow, conn.execute(_BY_ID, {"b_job": job_id}).one_or_none())


def _sums(number: sa.ColumnElement[int]) -> sa.Select[tuple[int, int]]:
    """Return a query for the sum of a number over all jobs, and over those of one namespace."""
    own = sa.case((jobs.c.namespace == bindparam("b_namespace"), number), else_=0)
    return sa.select(sa.func.coalesce(sa.func.sum(number), 0), sa.func.coalesce(sa.func.sum(own), 0))


_UNFINISHED: Final = _sums(jobs.c.total - jobs.c.ended).where(jobs.c.finished_at.is_(None))
# The rollouts of the groups that have not started, in all jobs that may still start them.
_UNSTARTED: Final = (
    _sums((jobs.c.groups - dynamic_sampling.c.started) * dynamic_sampling.c.samples)
    .join_from(dynamic_sampling, jobs, jobs.c.id == dynamic_sampling.c.job_id)
    .where(*OPEN)
)


def unfinished_rollouts(conn: Connection, namespace: str) -> tuple[int, int]:
    """Return the number of rollouts that have not ended, of all namespaces and of this one.

    Those of groups that dynamic sampling has not started yet are counted.
    """
    rows = [conn.execute(query, {"b_namespace": namespace}).one() for query in (_UNFINISHED, _UNSTARTED)]
    total, own = (sum(map(int, numbers)) for numbers in zip(*rows, strict=True))
    return total, own


_CANCELLING: Final = sa.select(jobs.c.id).where(
    jobs.c.cancel_reason.is_not(None), jobs.c.finished_at.is_(None)
)
_REMOVABLE: Final = sa.select(jobs.c.id).where(
    jobs.c.deleted_at.is_not(None),
    jobs.c.finished_at.is_not(None),
    ~sa.exists().where(rollouts.c.job_id == jobs.c.id, rollouts.c.pending.is_not(None)),
)


def cancelling(conn: Connection) -> list[int]:
    """Return the ids of the jobs whose cancellation has begun, perhaps before a restart, and not ended."""
    return list(conn.scalars(_CANCELLING))


def removable(conn: Connection) -> list[int]:
    """Return the ids of the deleted jobs whose rollouts have ended and are in the trajectory store."""
    return list(conn.scalars(_REMOVABLE))


# Creating and changing jobs.


def create(tx: Transaction, values: Mapping[str, Any]) -> JobRow:
    """Insert a job and return its row. `values` are the columns that the manifest decides."""
    fixed = {"uid": str(uuid.uuid4()), "generation": 1, "created_at": tx.now}
    rows = tx.conn.execute(sa.insert(jobs).values(**fixed, **values).returning(jobs))
    tx.wake(UNFINISHED)
    return JobRow(*rows.one())


def change(tx: Transaction, job_id: int, values: Mapping[str, Any]) -> None:
    """Write columns that a manifest, a PATCH or a registration decides. Without columns nothing is done."""
    if values:
        _set(tx, job_id, **values)
        _wake_all(tx, job_id)


def put_status(tx: Transaction, job_id: int, status: bytes) -> None:
    """Write what the driver reported about a job, as JSON."""
    _set(tx, job_id, status=status)
    tx.wake(job_topic(job_id), CLAIMS)


def add_groups(tx: Transaction, job_id: int, count: int) -> None:
    """Count groups that were added to a job."""
    tx.conn.execute(_UPDATE.values(groups=jobs.c.groups + count), {"b_job": job_id})


def add_rollouts(tx: Transaction, job_id: int, count: int) -> None:
    """Count rollouts that were added to a job, and wait for Init."""
    tx.conn.execute(_UPDATE.values(total=jobs.c.total + count), {"b_job": job_id})
    tx.wake(job_topic(job_id), QUEUE)


def hold(tx: Transaction, job_id: int, *, holding: bool) -> None:
    """Let no rollout of a job begin, because the target of its last step is met, or let them begin again."""
    _set(tx, job_id, holding=holding)
    tx.wake(QUEUE)


def note_outage(tx: Transaction, job_id: int, since: float | None) -> None:
    """Note when the job's pool lost its last ready backend, in seconds since the epoch, or None."""
    _set(tx, job_id, outage_began=since)


_WITH_UNSCORED: Final = (
    sa.select(jobs.c.id, jobs.c.limits).where(*OPEN, jobs.c.unscored > 0).order_by(jobs.c.id)
)
_NEXT_PART: Final = _UPDATE.values(parts=jobs.c.parts + 1).returning(jobs.c.parts)
_READ: dict[Kind, sa.Column[int]] = {"trajectories": jobs.c.read_trajectories, "groups": jobs.c.read_groups}


def rewarded_by_trainers(tx: Transaction) -> dict[int, float]:
    """Return how long rollouts of open jobs may wait for a trainer's reward, in seconds, by their jobs.

    Jobs of which no rollout has waited yet are left out.
    """
    rows = rows_of(tx.conn, _WITH_UNSCORED, {})
    limits = {job_id: limits.trainer_reward_seconds for job_id, limits in rows}
    return {job_id: seconds for job_id, seconds in limits.items() if seconds is not None}


def next_part(tx: Transaction, job_id: int) -> int:
    """Return the number of the next part of a job's records, and lock the row of the job."""
    number: int = tx.conn.execute(_NEXT_PART, {"b_job": job_id}).scalar_one()
    return number


def note_read(tx: Transaction, job_id: int, kind: Kind, position: int) -> None:
    """Note that the results before a position were read. A position that is behind changes nothing."""
    ahead = sa.update(jobs).where(jobs.c.id == job_id, _READ[kind] < position)
    tx.conn.execute(ahead.values({_READ[kind]: position}))


# Ending rollouts and groups, and with them jobs.


class EndedCounts(NamedTuple):
    """What an ending needs to know about its job: the counts after it, and the job's target."""

    ended: int
    total: int
    closed: bool
    limits: Limits
    name: str
    namespace: str
    signs: Signs


_COUNT_ENDED: Final = _UPDATE.values(
    **{
        name: jobs.c[name] + bindparam(f"b_{name}")
        for name in ("ended", "succeeded", "failed", "cancelled", "reward_sum")
    }
).returning(*columns(EndedCounts, jobs))
_COUNT_ENDED_GROUPS: Final = _UPDATE.values(
    groups_ended=jobs.c.groups_ended + bindparam("b_count")
).returning(jobs.c.groups_ended)
_COUNT_UNSCORED: Final = _UPDATE.values(unscored=jobs.c.unscored + bindparam("b_count")).returning(
    jobs.c.unscored
)
_CONCLUDE: Final = _UPDATE.where(*OPEN).values(cancel_reason=bindparam("b_reason"), closed=True)
_FINISH: Final = _UPDATE.where(jobs.c.finished_at.is_(None)).values(finished_at=bindparam("b_now"))
_FINISH_CONCLUDED: Final = _FINISH.where(jobs.c.cancel_reason.is_not(None), jobs.c.ended == jobs.c.total)


def count_ended(
    tx: Transaction, job_id: int, *, succeeded: int, failed: int, cancelled: int, rewards: float
) -> EndedCounts:
    """Count ended rollouts, and lock the row of the job. `rewards` is the sum of their rewards.

    The lock lasts until the commit. The order of a job's results is therefore the order of the commits, and a
    reader's cursor skips nothing.
    """
    counted = {
        "b_ended": succeeded + failed + cancelled,
        "b_succeeded": succeeded,
        "b_failed": failed,
        "b_cancelled": cancelled,
        "b_reward_sum": rewards,
    }
    row = tx.conn.execute(_COUNT_ENDED, {"b_job": job_id, **counted}).one()
    tx.wake(job_topic(job_id))
    return EndedCounts(*row)


def count_unscored(tx: Transaction, job_id: int, count: int) -> int:
    """Count rollouts that begin to wait for the trainer's reward, and return the place of the first of them.

    As in `count_ended`, the lock of the job's row makes their order that of the commits.
    """
    last: int = tx.conn.execute(_COUNT_UNSCORED, {"b_job": job_id, "b_count": count}).scalar_one()
    tx.wake(job_topic(job_id))
    return last - count + 1


def keep_signs(tx: Transaction, job_id: int, signs: Signs) -> None:
    """Write the signs of a job, whose row is locked since they were read."""
    _set(tx, job_id, signs=signs)


def count_ended_groups(tx: Transaction, job_id: int, count: int) -> int:
    """Count ended groups, and return the place of the first in the order in which the job's groups ended."""
    last: int = tx.conn.execute(_COUNT_ENDED_GROUPS, {"b_job": job_id, "b_count": count}).scalar_one()
    return last - count + 1


def close(tx: Transaction, job_id: int) -> None:
    """Note that no more tasks will be added to a job."""
    _set(tx, job_id, closed=True)
    tx.wake(job_topic(job_id))


def conclude(tx: Transaction, job_id: int, reason: str) -> None:
    """Remove a job from all queues for a reason, such as Cancelled or TargetMet, unless it has another.

    It is finished if none of its rollouts is unfinished. The others are ended soon after.
    """
    if tx.conn.execute(_CONCLUDE, {"b_job": job_id, "b_reason": reason}).rowcount:
        finish_concluded(tx, job_id)
        _wake_all(tx, job_id)


def finish(tx: Transaction, job_id: int) -> None:
    """Mark a closed job as finished. This is called when every rollout of the job has ended."""
    if tx.conn.execute(_FINISH, {"b_job": job_id, "b_now": tx.now}).rowcount:
        _wake_all(tx, job_id)


def finish_concluded(tx: Transaction, job_id: int) -> None:
    """Mark a job as finished if it is concluded and every one of its rollouts has ended."""
    if tx.conn.execute(_FINISH_CONCLUDED, {"b_job": job_id, "b_now": tx.now}).rowcount:
        _wake_all(tx, job_id)


# Deleting and removing jobs.

_OLD: Final = (jobs.c.deleted_at.is_(None), jobs.c.finished_at + jobs.c.ttl_seconds < bindparam("b_now"))
_DELETE_OLD: Final = (
    sa.update(jobs).where(*_OLD, jobs.c.object_uid.is_(None)).values(deleted_at=bindparam("b_now"))
)
_ASK_OLD: Final = (
    sa.update(jobs)
    .where(*_OLD, jobs.c.object_uid.is_not(None), jobs.c.cancel_reason.is_distinct_from(DELETED))
    .values(cancel_reason=DELETED)
)
_REMOVE: Final = sa.delete(jobs).where(_THIS).returning(jobs.c.blob_id)
_REMOVE_PARTS: Final = (
    sa.delete(dynamic_sampling).where(_ITS),
    sa.delete(sampling_targets).where(_ITS_STEPS),
    sa.delete(plugins).where(_ITS_PLUGINS),
)


def delete(tx: Transaction, job_id: int) -> None:
    """Hide a job, whose name is then free. `remove` removes its row."""
    _set(tx, job_id, deleted_at=tx.now)
    tx.wake(job_topic(job_id), UNFINISHED)


def ask_for_deletion(tx: Transaction, job_id: int) -> None:
    """Ask the driver of a job's object to delete the object, and then the job."""
    _set(tx, job_id, cancel_reason=DELETED)
    tx.wake(job_topic(job_id), UNFINISHED)


def past_deadline(tx: Transaction) -> list[int]:
    """Return the ids of the open jobs that are past their active deadline."""
    late = (*OPEN, jobs.c.deleted_at.is_(None), jobs.c.deadline_at < tx.now)
    return list(tx.conn.scalars(sa.select(jobs.c.id).where(*late)))


def delete_old(tx: Transaction) -> None:
    """Delete the finished jobs whose time has come.

    The driver of an object would register the job again, so it is asked to delete the object first.
    """
    for statement in (_DELETE_OLD, _ASK_OLD):
        if tx.conn.execute(statement, {"b_now": tx.now}).rowcount:
            tx.wake(UNFINISHED)


def remove(tx: Transaction, job_id: int) -> int | None:
    """Remove the row of a job whose rollouts are removed, and return the id of the upload that it held."""
    for statement in _REMOVE_PARTS:
        tx.conn.execute(statement, {"b_job": job_id})
    blob_id: int | None = tx.conn.execute(_REMOVE, {"b_job": job_id}).scalar_one_or_none()
    return blob_id


# The plugins of a job never change.

_PLUGINS: Final = (
    sa.select(plugins.c.sha256, plugins.c.file, plugins.c.offers)
    .where(_ITS_PLUGINS)
    .order_by(plugins.c.file, plugins.c.sha256)
)
_PLUGIN_TEXT: Final = sa.select(plugins.c.text).where(_ITS_PLUGINS, plugins.c.sha256 == bindparam("b_sha256"))


def keep_plugins(tx: Transaction, job_id: int, used: Sequence[Plugin]) -> None:
    """Keep the plugins that a new job uses, as they are now, until its row is removed."""
    rows = [
        {
            "job_id": job_id,
            "sha256": plugin.sha256,
            "file": plugin.file,
            "offers": dumps(plugin.offers),
            "text": zlib.compress(plugin.text),
        }
        for plugin in used
    ]
    if rows:
        tx.conn.execute(sa.insert(plugins), rows)


def plugins_of(conn: Connection, job_id: int) -> list[dict[str, Any]]:
    """Return the plugins that a job uses, as OfferingPlugin has them."""
    return [
        {"file": row.file, "sha256": row.sha256, "offers": loads(row.offers)}
        for row in conn.execute(_PLUGINS, {"b_job": job_id})
    ]


def plugin_text(conn: Connection, job_id: int, sha256: str) -> bytes:
    """Return the text of a plugin that a job uses.

    Raises:
        NotFound: The job uses no plugin with this SHA-256.
    """
    packed = conn.execute(_PLUGIN_TEXT, {"b_job": job_id, "b_sha256": sha256}).scalar_one_or_none()
    if packed is None:
        raise NotFound(f"the job uses no plugin sha256:{sha256}", reason="PluginNotFound")
    return zlib.decompress(packed)


# Dynamic sampling counts the groups of a job, and its steps add to the target.


class SamplingCounts(Tally):
    """The counters of a job with dynamic sampling."""

    target: int = 0
    started: int = 0


class SamplingStep(NamedTuple):
    """A step that a trainer opened."""

    groups: int
    goal: int


_SAMPLING: Final = sa.select(*columns(SamplingCounts, dynamic_sampling)).where(_ITS)
_SAMPLING_STATE: Final = (
    sa.select(*columns(SamplingState, dynamic_sampling, jobs))
    .join_from(dynamic_sampling, jobs, jobs.c.id == dynamic_sampling.c.job_id)
    .where(_ITS, jobs.c.cancel_reason.is_(None))
)
_UPDATE_SAMPLING: Final = sa.update(dynamic_sampling).where(_ITS)
_COUNT_GROUPS: Final = _UPDATE_SAMPLING.values(
    {name: dynamic_sampling.c[name] + bindparam(f"b_{name}") for name in Tally.__struct_fields__}
)


def begin_sampling(tx: Transaction, job_id: int, *, target: int, samples: int) -> None:
    """Create the counters of a new job, which needs `target` groups of `samples` rollouts with a signal."""
    values = {"job_id": job_id, "target": target, "samples": samples, "started": 0}
    tx.conn.execute(sa.insert(dynamic_sampling), values | msgspec.structs.asdict(Tally()))


def sampling(conn: Connection, job_id: int) -> SamplingCounts:
    """Return the counters of a job with dynamic sampling."""
    return SamplingCounts(*conn.execute(_SAMPLING, {"b_job": job_id}).one())


def sampling_state(tx: Transaction, job_id: int) -> SamplingState | None:
    """Return what the job's next step depends on, or None if the job is concluded or samples otherwise.

    The caller has the lock of the job's row.
    """
    return read_one(SamplingState, tx.conn.execute(_SAMPLING_STATE, {"b_job": job_id}).one_or_none())


def count_groups(tx: Transaction, job_id: int, tally: Tally) -> None:
    """Add to the counters of a job with dynamic sampling."""
    counted = {f"b_{name}": number for name, number in msgspec.structs.asdict(tally).items()}
    if any(counted.values()):
        tx.conn.execute(_COUNT_GROUPS, {"b_job": job_id, **counted})


def count_started(tx: Transaction, job_id: int, count: int) -> None:
    """Count groups that were started, which are those with the lowest numbers."""
    started = dynamic_sampling.c.started + count
    tx.conn.execute(_UPDATE_SAMPLING.values(started=started), {"b_job": job_id})


def step(conn: Connection, job_id: int, name: str) -> SamplingStep | None:
    """Return the step that was opened under this id, or None."""
    its = (sampling_targets.c.job_id == job_id, sampling_targets.c.id == name)
    query = sa.select(*columns(SamplingStep, sampling_targets)).where(*its)
    return read_one(SamplingStep, conn.execute(query).one_or_none())


def steps(conn: Connection, job_id: int) -> int:
    """Return the number of steps of a job."""
    count: int = conn.execute(sa.select(sa.func.count()).where(_ITS_STEPS), {"b_job": job_id}).scalar_one()
    return count


def open_step(tx: Transaction, job_id: int, name: str, groups: int) -> SamplingStep:
    """Add a step under a new id, which raises the job's target by `groups`, and return it."""
    target = dynamic_sampling.c.target
    raised = _UPDATE_SAMPLING.values(target=target + groups).returning(target)
    goal: int = tx.conn.execute(raised, {"b_job": job_id}).scalar_one()
    values = {"job_id": job_id, "id": name, "groups": groups, "goal": goal, "opened_at": tx.now}
    tx.conn.execute(sa.insert(sampling_targets), values)
    return SamplingStep(groups, goal)
