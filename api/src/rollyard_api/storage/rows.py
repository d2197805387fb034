"""Rows of the tables as typed values, with a class for each table and for each partial read of it.

The fields of a class have the names of the columns, in the order in which `columns` selects them, so a
row `row` of that query is read by `JobRow(*row)`. `schema` explains what the columns mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import sqlalchemy as sa
from rollyard_crds.backendpool import BackendWeights, Circuit
from rollyard_crds.claims import ClaimState
from rollyard_crds.weights import PauseMode, UpdateState

from rollyard_api.machine.limits import Limits
from rollyard_api.machine.states import RolloutState

R = TypeVar("R")


def columns(kind: type[Any], *tables: sa.Table) -> tuple[sa.Column[Any], ...]:
    """Return the columns that a class of rows reads, each from the first of the tables that has it.

    Raises:
        StopIteration: No table has a column with a field's name.
    """
    return tuple(next(t.c[field.name] for t in tables if field.name in t.c) for field in fields(kind))


def read_all(kind: Callable[..., R], found: Iterable[sa.Row[Any]]) -> list[R]:
    """Return all rows of a query that selects the columns of `kind`."""
    # A result that is iterated asks the database's cursor row by row, which takes several times as long.
    rows = found.all() if isinstance(found, sa.Result) else found
    return [kind(*row) for row in rows]


def read_one(kind: Callable[..., R], found: sa.Row[Any] | None) -> R | None:
    """Return a row of such a query, or None if there is none."""
    return None if found is None else kind(*found)


@dataclass(frozen=True, slots=True)
class JobRow:
    """A row of `jobs`."""

    id: int
    uid: str
    namespace: str
    name: str
    generation: int
    metadata: bytes
    spec: bytes
    digest: str
    limits: Limits
    status: bytes
    pool: str | None
    priority: int
    suspended: bool
    closed: bool
    cancel_reason: str | None
    created_at: float
    started_at: float | None
    deadline_at: float | None
    finished_at: float | None
    delete_at: float | None
    deleted_at: float | None
    total: int
    ended: int
    succeeded: int
    failed: int
    cancelled: int
    reward_sum: float
    groups: int
    groups_ended: int
    parts: int
    object_uid: str | None
    warm: bytes | None
    blob_id: int | None
    outage_began: float | None
    holding: bool
    read_trajectories: int
    read_groups: int
    malformed_rollouts: int
    malformed_calls: int
    well_formed: bool


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """The columns of a row of `groups` that results read."""

    no: int
    task_id: str
    seq: int
    delivered: bool
    informative: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class EndedRollout:
    """The columns that make up a trajectory record, including columns of `groups` and `payloads`."""

    id: str
    job_id: int
    sample: int
    state: RolloutState
    failures_init: int
    failures_run: int
    failures_eval: int
    attempts: bytes | None
    timings: str
    backend: str | None
    reward: float | None
    components: bytes | None
    reward_reason: str | None
    reward_output: str | None
    reason: str | None
    message: str | None
    end_seq: int
    pending: int | None
    part: int | None
    part_offset: int | None
    part_length: int | None
    group_no: int
    task_id: str
    trajectory: bytes | None
    segments: bytes | None


@dataclass(frozen=True, slots=True)
class BlobRow:
    """A row of `blobs`."""

    id: int
    namespace: str
    sha256: str
    size: int
    pieces: int
    complete: bool
    created_at: float
    touched_at: float


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """A row of `claims`."""

    id: str
    rollout_id: str
    token: int
    namespace: str
    job: str
    job_uid: str
    shape: bytes
    state: ClaimState
    removed: bool
    address: str
    secret: str
    reason: str
    message: str
    retryable: bool
    created_at: float


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A row of `pools`."""

    id: int
    uid: str
    namespace: str
    name: str
    generation: int
    metadata: bytes
    spec: bytes
    status: bytes
    model: str
    tokenizer: str
    max_active: int
    external: bool
    created_at: float
    policy_version: str
    policy_index: int
    paused: bool
    pause_mode: PauseMode | None
    served_model: str | None


@dataclass(frozen=True, slots=True)
class BackendRow:
    """A row of `backends`."""

    pool_id: int
    url: str
    position: int
    ready: bool
    policy_version: str
    message: str
    weights: BackendWeights
    weights_message: str
    policy_index: int
    restart_requested: bool
    draining: bool
    circuit: Circuit
    failures: int
    opened_at: float | None
    speed: float | None
    pace: float | None
    pace_seconds: float | None
    pace_load: float | None
    measured_at: float | None
    stats: bytes | None


@dataclass(frozen=True, slots=True)
class RoutedBackend:
    """What routing reads of a ready backend and its pool. The first eight fields belong to the pool."""

    id: int
    namespace: str
    name: str
    model: str
    served_model: str | None
    tokenizer: str
    max_active: int
    paused: bool
    url: str
    policy_version: str
    policy_index: int
    weights: BackendWeights
    circuit: Circuit
    failures: int
    opened_at: float | None
    draining: bool
    speed: float | None
    pace: float | None
    pace_seconds: float | None
    pace_load: float | None
    measured_at: float | None


@dataclass(frozen=True, slots=True)
class WeightUpdateRow:
    """A row of `weight_updates`."""

    id: int
    pool_id: int
    policy_version: str
    policy_index: int
    request: bytes
    state: UpdateState
    verified: bool
    verified_by: str
    message: str
    progress: bytes
    owner: str | None
    owner_expires: float | None
    created_at: float
    finished_at: float | None


@dataclass(frozen=True, slots=True)
class LeasableJob:
    """The columns of a job that leases read."""

    id: int
    uid: str
    namespace: str
    name: str
    priority: int
    pool: str | None
    holding: bool


@dataclass(frozen=True, slots=True)
class RolloutSize:
    """The place of an ended rollout's record, and the number of bytes that it adds to a page."""

    id: str
    end_seq: int
    group_no: int
    sample: int
    pending: int | None
    bytes: int
