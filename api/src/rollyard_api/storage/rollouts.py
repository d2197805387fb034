"""Every statement that writes `rollouts` or `payloads`, and the reads for decisions about rollouts.

Only `rollouts.transitions` changes the state of a rollout. A statement names the changed columns alone:
SQLite writes the entry of every index that has a named column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from rollyard_crds.names import NODE
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.machine.groups import Member
from rollyard_api.machine.limits import Limits
from rollyard_api.machine.rollout import Rollout
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.jobs import OPEN
from rollyard_api.storage.rows import columns
from rollyard_api.storage.schema import backends, groups, jobs, payloads, pools, rollouts
from rollyard_api.storage.statements import by_dialect, chunks, rows_of, run

_SELECT: Final = sa.select(*columns(Rollout, rollouts))
_OF_JOB: Final = rollouts.c.job_id == bindparam("b_job")
_IS_HELD: Final = rollouts.c.lease_expires.is_not(None)
_IN_SANDBOX: Final = rollouts.c.state.in_([RolloutState.QUEUED_RUN, RolloutState.QUEUED_EVAL])
_THIS: Final = rollouts.c.id == bindparam("b_id")
_AMONG: Final = bindparam("b_ids", type_=sa.String, expanding=True)
_UPDATE: Final = sa.update(rollouts).where(_THIS)


# Finding rollouts, and locking their rows until the commit. Several are locked in the order of their ids,
# because two replicas could deadlock otherwise. Rows that another replica has locked are left out where a
# later round takes them.

_NAMED: Final = _SELECT.where(rollouts.c.id.in_(_AMONG)).order_by(rollouts.c.id).with_for_update()
_SEGMENTS_IN_EVAL: Final = sa.case((payloads.c.tokens_in_eval, payloads.c.segments))
"""The token lists, if the evaluation needs them. They are not read otherwise: most evaluations do not."""
_BYTES: Final = sum(
    (
        sa.func.coalesce(sa.func.length(column), 0)
        for column in (payloads.c.carry, payloads.c.trajectory, _SEGMENTS_IN_EVAL)
    ),
    start=sa.func.length(groups.c.task),
)
_WAITING: Final = (
    _SELECT.add_columns(_BYTES)
    .join_from(
        rollouts, groups, sa.and_(groups.c.job_id == rollouts.c.job_id, groups.c.no == rollouts.c.group_no)
    )
    .outerjoin(payloads, payloads.c.rollout_id == rollouts.c.id)
    .where(_OF_JOB, rollouts.c.state == bindparam("b_state"), rollouts.c.node == bindparam("b_node"))
    .order_by(rollouts.c.place)
    .limit(bindparam("b_limit"))
    .with_for_update(of=rollouts, skip_locked=True)
)


class Waiting(NamedTuple):
    """A rollout that may be leased, and the bytes of its task and of what earlier stages left."""

    rollout: Rollout
    bytes: int


def named(tx: Transaction, ids: Iterable[str]) -> dict[str, Rollout]:
    """Return the rollouts with these ids, by their ids."""
    return {row[0]: Rollout(*row) for row in rows_of(tx.conn, _NAMED, {"b_ids": sorted(set(ids))})}


def waiting(tx: Transaction, job_id: int, state: RolloutState, node: str, limit: int) -> list[Waiting]:
    """Return the first rollouts of a job's queue that are for the workers of `node`, or for any with ""."""
    values = {"b_job": job_id, "b_state": state, "b_node": node, "b_limit": limit}
    return [Waiting(Rollout(*row[:-1]), row[-1]) for row in rows_of(tx.conn, _WAITING, values)]


def _found(
    tx: Transaction,
    *where: sa.ColumnElement[bool],
    limit: int | None = None,
    skip_locked: bool = False,
    order: sa.ColumnElement[Any] = rollouts.c.id,
) -> list[Rollout]:
    query = _SELECT.where(*where).order_by(order).limit(limit)
    rows = tx.conn.execute(query.with_for_update(skip_locked=skip_locked)).all()
    return [Rollout(*row) for row in rows]


def expired(tx: Transaction, limit: int) -> list[Rollout]:
    """Return the rollouts whose leases have expired, in the order of their expiry."""
    expires = rollouts.c.lease_expires
    return _found(tx, expires < tx.now, limit=limit, skip_locked=True, order=expires)


def held_by(tx: Transaction, job_id: int, worker: str, limit: int) -> list[Rollout]:
    """Return the rollouts of a job that a worker holds."""
    return _found(tx, _IS_HELD, rollouts.c.job_id == job_id, rollouts.c.worker == worker, limit=limit)


def at_node(tx: Transaction, job_id: int, node: str, limit: int) -> list[Rollout]:
    """Return the rollouts of a job that wait for the workers of a node, because their sandboxes are there."""
    where = (rollouts.c.job_id == job_id, _IN_SANDBOX, rollouts.c.node == node)
    return _found(tx, *where, limit=limit, skip_locked=True)


def for_sandboxes(tx: Transaction, sandboxes: Sequence[str]) -> list[Rollout]:
    """Return the rollouts that wait with one of these sandboxes."""
    return _found(tx, rollouts.c.sandbox_id.in_(sandboxes), _IN_SANDBOX)


def unfinished(
    tx: Transaction,
    job_id: int,
    *,
    group: int | None = None,
    rollout: str | None = None,
    limit: int | None = None,
    skip_locked: bool = False,
) -> list[Rollout]:
    """Return the unfinished rollouts of a job, of one of its groups, or only the given one."""
    where = [rollouts.c.job_id == job_id, rollouts.c.state < RolloutState.SUCCEEDED]
    if group is not None:
        where.append(rollouts.c.group_no == group)
    if rollout is not None:
        where.append(rollouts.c.id == rollout)
    return _found(tx, *where, limit=limit, skip_locked=skip_locked)


def overdue(tx: Transaction, since: float, limit: int) -> list[Rollout]:
    """Return rollouts of jobs without a deadline that have waited for Init or Run in an outage since then."""
    late = sa.select(jobs.c.id).where(*OPEN, jobs.c.deadline_at.is_(None), jobs.c.outage_began <= since)
    states = [RolloutState.QUEUED_INIT, RolloutState.QUEUED_RUN]
    where = (rollouts.c.job_id.in_(late), rollouts.c.state.in_(states), rollouts.c.since <= since)
    return _found(tx, *where, limit=limit, skip_locked=True)


def unrewarded(tx: Transaction, job_id: int, since: float, limit: int) -> list[Rollout]:
    """Return the rollouts of a job that have waited for the trainer's reward since then or longer."""
    where = (
        rollouts.c.job_id == job_id,
        rollouts.c.state == RolloutState.UNSCORED,
        rollouts.c.since <= since,
    )
    return _found(tx, *where, limit=limit, skip_locked=True)


def _of_pool(
    tx: Transaction, namespace: str, pool: str, *where: sa.ColumnElement[bool]
) -> list[tuple[Rollout, Limits]]:
    """Return the rollouts of a pool's unfinished jobs that meet the conditions, with their jobs' limits."""
    query = _SELECT.add_columns(jobs.c.limits).join_from(rollouts, jobs, jobs.c.id == rollouts.c.job_id)
    query = query.where(jobs.c.namespace == namespace, jobs.c.pool == pool, jobs.c.finished_at.is_(None))
    query = query.where(*where).order_by(rollouts.c.id).with_for_update(of=rollouts)
    rows = tx.conn.execute(query).all()
    return [(Rollout(*row[:-1]), row.limits) for row in rows]


def behind(tx: Transaction, namespace: str, pool: str, index: int) -> list[tuple[Rollout, Limits]]:
    """Return the pool's rollouts in Run or before Eval whose Run began before the weights of this index."""
    states = [RolloutState.LEASED_RUN, RolloutState.QUEUED_EVAL, RolloutState.UNSCORED]
    return _of_pool(tx, namespace, pool, rollouts.c.state.in_(states), rollouts.c.policy_index < index)


def running_on(tx: Transaction, namespace: str, pool: str, url: str) -> list[Rollout]:
    """Return the pool's rollouts that are in Run on this backend."""
    running = (rollouts.c.backend == url, rollouts.c.state == RolloutState.LEASED_RUN)
    return [row for row, _ in _of_pool(tx, namespace, pool, *running)]


# Other reads.

_MEMBERS: Final = sa.select(rollouts.c.group_no, *columns(Member, rollouts)).where(
    _OF_JOB, rollouts.c.group_no.in_(bindparam("b_nos", expanding=True))
)
_WITH_SANDBOX: Final = sa.select(rollouts.c.sandbox_id).where(rollouts.c.sandbox_id.in_(_AMONG))
_STALE_POOLS: Final = (
    sa.select(pools.c.namespace, pools.c.name)
    .distinct()
    .join_from(rollouts, jobs, jobs.c.id == rollouts.c.job_id)
    .join(pools, sa.and_(pools.c.namespace == jobs.c.namespace, pools.c.name == jobs.c.pool))
    .where(rollouts.c.id.in_(_AMONG), rollouts.c.policy_index < pools.c.policy_index)
)
_LEASES: Final = sa.select(rollouts.c.id, rollouts.c.token, rollouts.c.state).where(rollouts.c.id.in_(_AMONG))


class JobOfRollouts(NamedTuple):
    """What decisions about failures need to know about a job."""

    namespace: str
    pool: str | None
    limits: Limits


_JOBS: Final = sa.select(jobs.c.id, *columns(JobOfRollouts, jobs)).where(
    jobs.c.id.in_(bindparam("b_jobs", expanding=True))
)


def jobs_of(tx: Transaction, ids: Iterable[int]) -> dict[int, JobOfRollouts]:
    """Return the jobs with these ids, by their ids."""
    rows = rows_of(tx.conn, _JOBS, {"b_jobs": sorted(ids)})
    return {row[0]: JobOfRollouts(*row[1:]) for row in rows}


def members(tx: Transaction, job_id: int, numbers: Sequence[int]) -> dict[int, list[Member]]:
    """Return the rollouts of groups whose members have all ended, by the numbers of the groups."""
    ended: dict[int, list[Member]] = {no: [] for no in numbers}
    for row in rows_of(tx.conn, _MEMBERS, {"b_job": job_id, "b_nos": list(numbers)}):
        ended[row[0]].append(Member(*row[1:]))
    return ended


def has_completed(tx: Transaction, job_id: int, worker: str) -> bool:
    """Return whether this worker was the last one to complete a stage of at least one rollout of the job."""
    # The last lease of a rollout names the worker, and a completed stage is recorded under the lease's token.
    completed = (" " + rollouts.c.settled + " ").like("% c" + sa.cast(rollouts.c.token, sa.String) + " %")
    mine = (rollouts.c.job_id == job_id, rollouts.c.worker == worker)
    return tx.conn.execute(sa.select(rollouts.c.id).where(*mine, completed).limit(1)).first() is not None


def with_sandbox(tx: Transaction, sandboxes: Sequence[str], *, leased: bool = False) -> set[str]:
    """Return those of the sandboxes that belong to unfinished rollouts, or only to rollouts that are held."""
    query = _WITH_SANDBOX.where(_IS_HELD) if leased else _WITH_SANDBOX
    return {row for batch in chunks(sandboxes) for row in tx.conn.scalars(query, {"b_ids": batch})}


def oldest_init(tx: Transaction, node: str) -> float | None:
    """Return when the oldest Init lease of a node was granted, in seconds since the epoch, or None."""
    its = (_IS_HELD, rollouts.c.state == RolloutState.LEASED_INIT, rollouts.c.node == node)
    since: float | None = tx.conn.execute(sa.select(sa.func.min(rollouts.c.since)).where(*its)).scalar_one()
    return since


def waited_for(tx: Transaction) -> list[tuple[str, int]]:
    """Return each node for whose workers rollouts wait with their sandboxes, and the waiting job."""
    query = sa.select(rollouts.c.node, rollouts.c.job_id).distinct().where(_IN_SANDBOX)
    rows = tx.conn.execute(query.where(rollouts.c.node.not_in(("", NODE))))
    return sorted((row.node, row.job_id) for row in rows)


def leases(tx: Transaction, ids: Iterable[str]) -> dict[tuple[str, int], RolloutState]:
    """Return the states of these rollouts, by their ids and the tokens of their last leases."""
    rows = tx.conn.execute(_LEASES, {"b_ids": sorted(set(ids))})
    return {(row.id, row.token): row.state for row in rows}


def stale_pools(tx: Transaction, ids: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pools whose weights are newer than those under which one of these rollouts began Run."""
    return sorted((row.namespace, row.name) for row in tx.conn.execute(_STALE_POOLS, {"b_ids": ids}))


def reached(tx: Transaction, namespace: str, pool: str) -> int:
    """Return the index of the newest weights that a backend of the pool samples with; 0 before any update."""
    query = sa.select(sa.func.max(backends.c.policy_index)).where(backends.c.weights == "Current")
    query = query.join_from(backends, pools, pools.c.id == backends.c.pool_id)
    its = (pools.c.namespace == namespace, pools.c.name == pool)
    return tx.conn.execute(query.where(*its)).scalar_one() or 0


# Creating, changing and removing rollouts.


def add(tx: Transaction, job_id: int, prefix: str, numbers: range, samples: int) -> None:
    """Add `samples` rollouts to each of the groups with these numbers, which wait for Init.

    Args:
        tx: A transaction that has locked the job's row.
        job_id: The job.
        prefix: The beginning of the rollouts' ids.
        numbers: The numbers of the groups, whose rows exist.
        samples: The rollouts of each group.
    """
    base = {
        "job_id": job_id,
        "state": RolloutState.QUEUED_INIT,
        "node": "",
        "since": tx.now,
        "settled": "",
        "timings": "{}",
    }
    tx.conn.execute(
        sa.insert(rollouts),
        [
            base | {"id": f"{prefix}-{no}-{at}", "group_no": no, "sample": at, "place": no * samples + at}
            for no in numbers
            for at in range(samples)
        ],
    )


_RENEW: Final = _UPDATE.where(rollouts.c.token == bindparam("b_token"), _IS_HELD)


def change(tx: Transaction, changes: Iterable[Mapping[str, Any]]) -> None:
    """Write the changed columns of rollouts, whose ids stand under "b_id"; only `transitions` calls this."""
    for batch in _alike(changes).values():
        run(tx, _UPDATE, batch)


def _alike(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """Return the rows by the columns that they name, because one statement takes those that name the same."""
    alike: defaultdict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for values in rows:
        alike[tuple(values)].append(values)
    return alike


def renew(tx: Transaction, renewed: Iterable[tuple[str, int]], expires: float) -> None:
    """Renew the leases with these rollouts and tokens until `expires`, in seconds since the epoch."""
    changes = [{"b_id": id, "b_token": token, "lease_expires": expires} for id, token in sorted(renewed)]
    if changes:
        run(tx, _RENEW, changes)


def grace(tx: Transaction, lease_seconds: float) -> None:
    """Give every lease its full time. Called after a start, before which workers could not renew leases."""
    until = tx.now + lease_seconds
    short = sa.update(rollouts).where(_IS_HELD, rollouts.c.lease_expires < until)
    tx.conn.execute(short.values(lease_expires=until))


_DELETE: Final = sa.delete(rollouts).where(rollouts.c.id.in_(_AMONG))
_DELETE_PAYLOADS: Final = sa.delete(payloads).where(payloads.c.rollout_id.in_(_AMONG))


def remove(tx: Transaction, job_id: int, limit: int) -> int:
    """Remove up to `limit` rollouts of a deleted job, and return their number."""
    ids = list(tx.conn.scalars(sa.select(rollouts.c.id).where(rollouts.c.job_id == job_id).limit(limit)))
    drop(tx, ids)
    for batch in chunks(ids):
        tx.conn.execute(_DELETE, {"b_ids": batch})
    return len(ids)


# What one stage leaves for the next.

_PAYLOADS: Final = sa.select(
    payloads.c.rollout_id, payloads.c.carry, payloads.c.trajectory, _SEGMENTS_IN_EVAL
).where(payloads.c.rollout_id.in_(_AMONG))


class Payload(NamedTuple):
    """The part of a row of `payloads` that a lease carries."""

    rollout_id: str
    carry: bytes | None
    trajectory: bytes | None
    segments: bytes | None


def payloads_of(conn: Connection, ids: Sequence[str]) -> dict[str, Payload]:
    """Return what the leases of these rollouts carry."""
    return {row[0]: Payload(*row) for row in rows_of(conn, _PAYLOADS, {"b_ids": list(ids)})}


def keep(tx: Transaction, rows: Iterable[Mapping[str, Any]]) -> None:
    """Store what stages leave; each mapping has a "rollout_id" and the columns that are set or replaced."""
    for names, batch in _alike(rows).items():
        run(tx, _upsert(names)[tx.sqlite], batch)


@lru_cache
def _upsert(names: tuple[str, ...]) -> dict[bool, Any]:
    return by_dialect(
        lambda insert: (new := insert(payloads)).on_conflict_do_update(
            index_elements=[payloads.c.rollout_id],
            set_={name: new.excluded[name] for name in names if name != "rollout_id"},
        )
    )


def drop(tx: Transaction, ids: Sequence[str]) -> None:
    """Remove the payloads of rollouts that start again at Init, or whose records are stored."""
    for batch in chunks(ids):
        tx.conn.execute(_DELETE_PAYLOADS, {"b_ids": batch})


# Moving ended rollouts to the parts of the trajectory store.

_PENDING: Final = rollouts.c.pending.is_not(None)
_PLACE: Final = _UPDATE.where(_PENDING).values(
    pending=None,
    part_offset=bindparam("b_offset"),
    part_length=bindparam("b_length"),
    reward_output=None,  # The record has it.
)


def begin_part(tx: Transaction, job_id: int, part: int, limit: int) -> None:
    """Assign a part to the ended rollouts of a job that have none, up to `limit` of them.

    The transaction has locked the job's row, so two replicas never put one rollout into two parts.
    """
    waiting = sa.select(rollouts.c.id).where(rollouts.c.job_id == job_id, _PENDING, rollouts.c.part.is_(None))
    first = waiting.order_by(rollouts.c.end_seq).limit(limit).scalar_subquery()
    tx.conn.execute(sa.update(rollouts).where(rollouts.c.id.in_(first)).values(part=part))


def place(tx: Transaction, job_id: int, part: int, lengths: Sequence[tuple[str, int]]) -> None:
    """Note where the records of a part are, in their order, and drop their copies in the database.

    Members of the part that are not named wait for another part.
    """
    offset, places = 0, []
    for rollout, length in lengths:
        places.append({"b_id": rollout, "b_offset": offset, "b_length": length})
        offset += length
    tx.conn.execute(_PLACE, places)
    drop(tx, [rollout for rollout, _ in lengths])
    left = (rollouts.c.job_id == job_id, rollouts.c.part == part, _PENDING)
    tx.conn.execute(sa.update(rollouts).where(*left).values(part=None))
