"""What the ProRL calls change: their rollouts and batches, and the pool of the servers that clients add.

Each change of the database is one transaction, and may be repeated.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import sqlalchemy as sa
from rollyard_crds.backendpool import BackendPool
from rollyard_crds.base import ObjectMeta
from rollyard_crds.rolloutjob import RolloutJob, RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_inference.capabilities import served_models
from rollyard_inference.errors import BackendError
from sqlalchemy.engine import Connection

from rollyard_api.backends import pools
from rollyard_api.core.hosts import address_of
from rollyard_api.core.limits import Quota
from rollyard_api.core.problems import ApiError, Conflict, Invalid, LimitReached, Unavailable
from rollyard_api.jobs import jobs, manifests, tasks
from rollyard_api.machine.jobs import prefix_of
from rollyard_api.machine.states import UNFINISHED, RolloutState
from rollyard_api.prorl.config import ProrlConfig, ServerRule
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import JobRow, PoolRow, columns, read_all, read_one
from rollyard_api.storage.schema import jobs as job_table
from rollyard_api.storage.schema import prorl_calls, prorl_jobs, prorl_state, rollouts
from rollyard_api.storage.statements import by_dialect

MAX_TRIES: Final = 4
"""The rollouts that are started for one job_id of a batch: the first, and the three retries of a client."""
MAX_GROUPS: Final = 20_000
"""The number of calls after which a job is closed at the next /start, so that no job grows for ever."""
MAX_KEY: Final = 512
_FIRST: Final = by_dialect(lambda insert: insert(prorl_state).on_conflict_do_nothing())


@dataclass(frozen=True, slots=True)
class ProrlBatch:
    """A row of `prorl_state`."""

    batch: int
    """The number of times that it was started."""
    running: bool
    pool_uid: str | None


def batch(conn: Connection, namespace: str, *, lock: bool = False) -> ProrlBatch:
    """Return the state of a namespace, which was never started if it has no row."""
    query = sa.select(*columns(ProrlBatch, prorl_state)).where(prorl_state.c.namespace == namespace)
    row = conn.execute(query.with_for_update() if lock else query).one_or_none()
    return read_one(ProrlBatch, row) or ProrlBatch(0, False, None)


def locked(tx: Transaction, namespace: str) -> ProrlBatch:
    """Return the same as `batch`, with a row that is locked until the commit."""
    tx.conn.execute(_FIRST[tx.sqlite], {"namespace": namespace, "batch": 0, "running": False})
    return batch(tx.conn, namespace, lock=True)


def _opened(state: ProrlBatch) -> ProrlBatch:
    """Return the state.

    Raises:
        Unavailable: No batch is open.
    """
    if not state.running:
        raise Unavailable("Server is not running")
    return state


def put(tx: Transaction, namespace: str, **values: Any) -> None:
    """Change columns of a namespace's state, whose row is locked."""
    tx.conn.execute(sa.update(prorl_state).where(prorl_state.c.namespace == namespace).values(**values))


def start(tx: Transaction, namespace: str) -> bool:
    """Open the next batch and return True, or return False if one is open.

    The calls of earlier batches are forgotten: a job_id names a call within one batch.
    """
    state = locked(tx, namespace)
    if state.running:
        return False
    put(tx, namespace, batch=state.batch + 1, running=True)
    tx.conn.execute(sa.delete(prorl_calls).where(prorl_calls.c.namespace == namespace))
    existing = sa.select(job_table.c.id).where(job_table.c.deleted_at.is_(None))
    tx.conn.execute(
        sa.delete(prorl_jobs).where(
            prorl_jobs.c.namespace == namespace, prorl_jobs.c.job_id.not_in(existing.scalar_subquery())
        )
    )
    for job in open_jobs(tx.conn, namespace):
        if job.groups >= MAX_GROUPS:
            jobs.close(tx, job.namespace, job.name)
    return True


def stop(tx: Transaction, namespace: str) -> None:
    """Close the batch. Its rollouts are ended afterwards.

    Raises:
        Unavailable: No batch is open.
    """
    _opened(locked(tx, namespace))
    put(tx, namespace, running=False)


def cancel_some(tx: Transaction, namespace: str) -> int:
    """End some unfinished rollouts of the jobs while no batch is open, and return how many."""
    if locked(tx, namespace).running:
        return 0
    return sum(jobs.cancel_unfinished(tx, job.id) for job in open_jobs(tx.conn, namespace))


def open_jobs(conn: Connection, namespace: str, settings: str | None = None) -> list[JobRow]:
    """Return the jobs of the calls that take tasks, oldest first."""
    query = (
        sa.select(job_table)
        .join(prorl_jobs, prorl_jobs.c.job_id == job_table.c.id)
        .where(
            prorl_jobs.c.namespace == namespace,
            job_table.c.namespace == namespace,
            job_table.c.deleted_at.is_(None),
            job_table.c.finished_at.is_(None),
            job_table.c.cancel_reason.is_(None),
            job_table.c.closed.is_(False),
        )
        .order_by(job_table.c.id)
    )
    if settings is not None:
        query = query.where(prorl_jobs.c.settings == settings)
    return read_all(JobRow, conn.execute(query))


@dataclass(frozen=True, slots=True)
class StartedCall:
    """One `/process` call as the database knows it."""

    job_id: int
    rollout: str


@dataclass(frozen=True, slots=True)
class NewCall:
    """What a `/process` call asks for."""

    key: str
    """The SHA-256 of the job_id."""
    digest: str
    """The SHA-256 of the instance and the parameters."""
    anonymous: bool
    spec: RolloutJobSpec
    settings: str
    """The SHA-256 of the spec."""
    task: Task
    """The task, under an id that `admit` replaces."""
    namespace: str
    max_jobs: int
    quota: Quota


def key_of(job_id: str | None) -> str:
    """Return the key of a job_id, which is a random one where the client gave none.

    Raises:
        Invalid: The job_id is longer than 512 characters.
    """
    name = secrets.token_hex(16) if job_id is None else job_id
    if len(name) > MAX_KEY:
        raise Invalid("job_id: is too long", errors=[f"job_id: may have {MAX_KEY} characters"])
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def admit(tx: Transaction, new: NewCall) -> StartedCall:
    """Return the rollout of a call, and start it unless the same job_id has one in this batch.

    A rollout that ended before its Run was complete has no messages, so clients ask again. They then get
    another rollout, at most three times, unless they cancelled the first.

    Raises:
        Unavailable: No batch is open.
        Invalid: The job_id belongs to another call of the batch.
        LimitReached: There is no room for another rollout, or for another combination of parameters.
    """
    state = _opened(locked(tx, new.namespace))
    of_call = (prorl_calls.c.namespace == new.namespace, prorl_calls.c.key == new.key)
    row = tx.conn.execute(sa.select(prorl_calls).where(*of_call)).one_or_none()
    if row is not None:
        if row.digest != new.digest:
            raise Invalid.of(
                "job_id: names another call of this batch, with another instance or other sampling_params"
            )
        if row.cancelled or row.tries >= MAX_TRIES or not _is_empty(tx.conn, row.rollout_id):
            return StartedCall(row.job_id, row.rollout_id)
    tries = 1 if row is None else row.tries + 1
    job = _job(tx, new)
    task = new.task.model_copy(update={"id": f"b{state.batch}/{new.key[:40]}/{tries}"})
    rollout = f"{prefix_of(job.name, job.uid)}-{job.groups}-0"
    jobs.push(tx, job.namespace, job.name, [tasks.row(task)], new.quota, max_unread=None)
    values = {"job_id": job.id, "rollout_id": rollout, "tries": tries}
    if row is None:
        fixed = {"namespace": new.namespace, "key": new.key, "digest": new.digest}
        values |= {"cancelled": False, "anonymous": new.anonymous}
        tx.conn.execute(sa.insert(prorl_calls).values(**fixed, **values))
    else:
        tx.conn.execute(sa.update(prorl_calls).where(*of_call).values(**values))
    return StartedCall(job.id, rollout)


def _is_empty(conn: Connection, rollout: str) -> bool:
    """Return whether a rollout ended without messages, or is gone with its job."""
    query = sa.select(rollouts.c.state, rollouts.c.sampled_tokens).where(rollouts.c.id == rollout)
    row = conn.execute(query).one_or_none()
    if row is None:
        return True
    return row.state in (RolloutState.FAILED, RolloutState.CANCELLED) and row.sampled_tokens is None


def _job(tx: Transaction, new: NewCall) -> JobRow:
    """Return the locked row of the open job with these parameters, which is made if there is none."""
    matching = open_jobs(tx.conn, new.namespace, new.settings)
    if matching:
        return job_rows.find_locked(tx, matching[-1].namespace, matching[-1].name)
    others = open_jobs(tx.conn, new.namespace)
    if len(others) >= new.max_jobs:
        idle = next((job for job in others if job.ended == job.total), None)
        if idle is None:
            raise LimitReached(
                f"{len(others)} combinations of sampling parameters are in use at the same time, and no "
                "more may be",
                headers={"Retry-After": "10"},
            )
        jobs.close(tx, idle.namespace, idle.name)
    name = f"prorl-{new.settings[:8]}-{secrets.token_hex(4)}"
    manifest = RolloutJob(metadata=ObjectMeta(name=name, namespace=new.namespace), spec=new.spec)
    jobs.create(tx, manifests.prepare(manifest), new.quota)
    job = job_rows.find_locked(tx, new.namespace, name)
    insert = sa.insert(prorl_jobs).values(job_id=job.id, namespace=new.namespace, settings=new.settings)
    tx.conn.execute(insert)
    return job


def cancel(tx: Transaction, namespace: str, key: str) -> bool:
    """End the rollout of a call, which stays cancelled, and return whether there is such a call.

    Raises:
        Unavailable: No batch is open.
    """
    _opened(locked(tx, namespace))
    of_call = (prorl_calls.c.namespace == namespace, prorl_calls.c.key == key)
    cancelled = sa.update(prorl_calls).where(*of_call).values(cancelled=True)
    row = tx.conn.execute(cancelled.returning(prorl_calls.c.job_id, prorl_calls.c.rollout_id)).one_or_none()
    if row is not None:
        jobs.cancel_unfinished(tx, row.job_id, row.rollout_id)
    return row is not None


def drop_anonymous(tx: Transaction, namespace: str) -> int:
    """End the rollouts of calls without a job_id, whose clients an earlier process has lost."""
    query = (
        sa.select(prorl_calls.c.job_id, prorl_calls.c.rollout_id)
        .join(rollouts, rollouts.c.id == prorl_calls.c.rollout_id)
        .where(prorl_calls.c.namespace == namespace, prorl_calls.c.anonymous.is_(True))
        .where(rollouts.c.state.in_(UNFINISHED))
        .limit(jobs.BATCH)
    )
    return sum(jobs.cancel_unfinished(tx, row.job_id, row.rollout_id) for row in list(tx.conn.execute(query)))


def counts(conn: Connection, namespace: str) -> dict[str, int]:
    """Return the calls of the open batch and its unfinished rollouts by stage.

    Raises:
        Unavailable: No batch is open.
    """
    _opened(batch(conn, namespace))
    count = sa.select(sa.func.count()).select_from(prorl_calls)
    calls = count.where(prorl_calls.c.namespace == namespace)
    numbers = {"jobs": conn.execute(calls).scalar_one(), "init": 0, "run": 0, "eval": 0}
    ids = [job.id for job in open_jobs(conn, namespace)]
    query = (
        sa.select(rollouts.c.state, sa.func.count().label("n"))
        .where(rollouts.c.job_id.in_(ids), rollouts.c.state.in_(UNFINISHED))
        .group_by(rollouts.c.state)
    )
    for row in conn.execute(query):
        numbers[row.state.stage] += row.n
    return numbers


MAX_ADDRESS: Final = 2048
"""The largest number of characters of a server's address."""
PROBE_SECONDS: Final = 10.0


def server_url(address: str, rules: Sequence[ServerRule]) -> str:
    """Return the base URL of a server that a client adds; `HOST:PORT` stands for `http://HOST:PORT`.

    Args:
        address: What the client gives.
        rules: The networks and names that are allowed in addition to loopback.

    Raises:
        Invalid: This is not the address of a server, or it is one that the installer does not allow.
    """
    text = address.strip()
    if len(text) > MAX_ADDRESS:
        raise _refused_address(f"must have at most {MAX_ADDRESS} characters")
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _refused_address("must be a URL such as http://10.0.0.7:8000") from None
    plain = not (parts.query or parts.fragment or parts.username or parts.password is not None)
    if parts.scheme not in ("http", "https") or not host or not plain or re.search(r"[\s\\\x00-\x20]", text):
        raise _refused_address(
            "must be a URL such as http://10.0.0.7:8000, without a user, a query or a fragment"
        )
    if not _is_allowed(host, rules):
        raise _refused_address(
            f"the host {host!r} is neither a loopback address nor allowed by this server's setting 'servers'"
        )
    shown = f"[{host}]" if ":" in host else host
    base = f"{parts.scheme}://{shown}" + ("" if port is None else f":{port}")
    return base + parts.path.rstrip("/").removesuffix("/v1")


def _refused_address(problem: str) -> Invalid:
    return Invalid.of(f"address: {problem}")


def _is_allowed(host: str, rules: Sequence[ServerRule]) -> bool:
    address = address_of(host)
    if address is None:
        return host.lower() in {"localhost", *rules}
    return address.is_loopback or any(address in rule for rule in rules if not isinstance(rule, str))


async def add_server(plane: ControlPlane, config: ProrlConfig, address: str) -> str:
    """Add a server to the pool, which is made with the first one, and return its base URL.

    Raises:
        Invalid: The address is refused, or there are as many servers as may be.
        ApiError: The model is not known, and the server does not say it.
        Conflict: Somebody else made a pool with this name.
    """
    url = server_url(address, config.servers)
    known = await plane.database.read(partial(_pool, config=config))
    model = "" if known is not None else config.model or await _served_model(plane, config, url)
    await plane.database.write(partial(_add_to_pool, config=config, url=url, model=model))
    return url


async def clear_servers(plane: ControlPlane, config: ProrlConfig) -> None:
    """Remove all servers from the pool. Rollouts wait until there are others."""

    def change(tx: Transaction) -> None:
        locked(tx, config.namespace)
        pool = _pool(tx.conn, config)
        if pool is not None:
            pools.put_servers(tx, pool, [])

    await plane.database.write(change)


def _pool(conn: Connection, config: ProrlConfig) -> PoolRow | None:
    pool = pool_rows.named(conn, config.namespace, config.pool)
    if pool is not None and pool.uid != batch(conn, config.namespace).pool_uid:
        raise Conflict(
            f"BackendPool {config.pool!r} in namespace {config.namespace!r} was not made by these calls; "
            "choose another name with the setting 'pool'",
            reason="AlreadyExists",
        )
    return pool


async def _served_model(plane: ControlPlane, config: ProrlConfig, url: str) -> str:
    try:
        models = await served_models(plane.transport, url, PROBE_SECONDS)
    except BackendError as error:
        raise ApiError(f"{url} does not say which model it serves: {error}") from error
    if models is None:
        return str(config.tokenizer)
    if len(models) > 1:
        raise ApiError(f"{url} serves {', '.join(sorted(models)[:8])}; choose one with the setting 'model'")
    return next(iter(models))


def _add_to_pool(tx: Transaction, config: ProrlConfig, url: str, model: str) -> None:
    locked(tx, config.namespace)
    pool = _pool(tx.conn, config)
    if pool is None:
        if not model:
            raise Conflict("the pool was removed at the same time; ask again")
        spec = {
            "model": model,
            "tokenizer": config.tokenizer,
            "engine": {"type": "external", "external": {"urls": [url]}},
            "maxActiveRollouts": config.max_active_rollouts,
        }
        metadata = {"name": config.pool, "namespace": config.namespace}
        pools.create(tx, BackendPool.model_validate({"metadata": metadata, "spec": spec}))
        created = pool_rows.find(tx.conn, config.namespace, config.pool)
        put(tx, config.namespace, pool_uid=created.uid)
        return
    urls = pool_rows.servers(tx.conn, pool.id)
    if url in urls:
        return
    if len(urls) >= config.max_servers:
        raise _refused_address(f"there are {len(urls)} servers, and no more may be")
    pools.put_servers(tx, pool, [*urls, url])
