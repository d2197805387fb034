"""Rows of the tables as typed values, with a class for each table and for each partial read of one.

The fields of a class have the names of the columns, in the order in which `columns` selects them, so a
row `row` of that query is read by `JobRow(*row)`. `schema` makes tables from the classes for whole rows, and
explains the columns of the other tables. The default of a field is the value of its column in a new row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, Any, TypeVar

import sqlalchemy as sa
from rollyard_crds.backendpool import BackendWeights, Circuit
from rollyard_crds.claims import ClaimState
from rollyard_crds.weights import PauseMode, UpdateState

from rollyard_api.machine.limits import Limits
from rollyard_api.machine.signs import NO_SIGNS, Signs
from rollyard_api.machine.states import RolloutState

R = TypeVar("R")

Chars36 = Annotated[str, sa.String(36)]
Chars63 = Annotated[str, sa.String(63)]
Chars128 = Annotated[str, sa.String(128)]
Chars1024 = Annotated[str, sa.String(1024)]
BigInt = Annotated[int, sa.BigInteger()]


def columns(kind: Callable[..., Any], *tables: sa.Table) -> list[sa.Column[Any]]:
    """Return the columns that a class of rows reads, each from the first of the tables that has it.

    Raises:
        StopIteration: No table has a column with a field's name.
    """
    return [next(table.c[name] for table in tables if name in table.c) for name in signature(kind).parameters]


def read_all(kind: Callable[..., R], result: Iterable[sa.Row[Any]]) -> list[R]:
    """Return all rows of a query that selects the columns of `kind`."""
    # Iterating over a result fetches row by row from the database's cursor, which takes several times as
    # long.
    rows = result.all() if isinstance(result, sa.Result) else result
    return [kind(*row) for row in rows]


def read_one(kind: Callable[..., R], row: sa.Row[Any] | None) -> R | None:
    """Return a row of such a query, or None if there is none."""
    return None if row is None else kind(*row)


@dataclass(frozen=True, slots=True)
class JobRow:
    """A row of `jobs`."""

    id: int
    uid: Chars36
    namespace: Chars63
    name: Chars63
    generation: int
    metadata: bytes
    spec: bytes
    digest: Annotated[str, sa.String(64)]
    """The digest of the spec as first submitted, so that a repeat after a PATCH is not a conflict."""
    limits: Limits
    status: bytes
    pool: Chars63 | None
    priority: int
    suspended: bool
    closed: bool
    cancel_reason: Chars128 | None
    created_at: float
    started_at: float | None
    deadline_at: float | None
    finished_at: float | None
    ttl_seconds: int | None
    """How long the job is kept after it has ended, in seconds; null means for ever."""
    deleted_at: float | None
    object_uid: Chars128 | None
    """The uid of the Kubernetes object that the job was last registered for, or null if there is none."""
    warm: bytes | None
    """The sandboxes to keep warm besides workers on Kubernetes, as JSON ({"shape", "count"}), or null."""
    blob_id: int | None
    """The upload that the tasks were read from, which is kept as long as the job's row, or null."""
    outage_began: float | None
    """When the job's pool lost its last ready backend, or null while it has one."""
    holding: bool = False
    """Whether no rollout may begin, because the target of the stream's last step is met."""
    total: int = 0
    ended: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    reward_sum: float = 0.0
    groups: int = 0
    groups_ended: int = 0
    unscored: int = 0
    """How often a rollout of the job began to wait for the trainer's reward."""
    parts: int = 0
    read_trajectories: int = 0
    """The results that precede the furthest cursor that was sent with a request. They lag behind by a part of
    the bound on unread results, so that not every page causes a write."""
    read_groups: int = 0
    signs: Signs = NO_SIGNS


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
    namespace: Chars63
    sha256: Annotated[str, sa.String(64)]
    size: BigInt
    """The bytes and pieces received so far."""
    pieces: int
    complete: bool
    created_at: float
    touched_at: float
    """When a piece was last added, or when the complete upload was last requested."""


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """A row of `claims`."""

    id: Annotated[str, sa.String(40)]
    rollout_id: Chars128
    token: int
    """The fencing token of the lease under which the claim was filed."""
    namespace: Chars63
    job: Chars63
    job_uid: Chars36
    shape: bytes
    created_at: float
    state: ClaimState = "Pending"
    removed: bool = False
    """Whether the driver has nothing left of it, so that only its worker may still ask for the reason."""
    address: Annotated[str, sa.String(512)] = ""
    secret: Chars128 = ""
    reason: Chars128 = ""
    message: Chars1024 = ""
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A row of `pools`."""

    id: int
    uid: Chars36
    namespace: Chars63
    name: Chars63
    generation: int
    metadata: bytes
    spec: bytes
    status: bytes
    model: str
    tokenizer: str
    max_active: int | None
    external: bool
    created_at: float
    pause_mode: PauseMode | None
    """What happens to the requests in flight while the pool is paused: `abort`, `wait` or `keep`."""
    served_model: str | None
    """The model name that requests must give if it is not `model`, such as a LoRA adapter's name."""
    policy_version: Chars128 = ""
    """The newest weights that every backend should have. The index orders versions and is 0 before any
    update."""
    policy_index: int = 0
    paused: bool = False


@dataclass(frozen=True, slots=True)
class BackendRow:
    """A row of `backends`."""

    pool_id: int
    url: Annotated[str, sa.String(2048)]
    position: int
    ready: bool
    policy_version: Chars128
    message: Chars1024
    weights: BackendWeights
    """Current, Updating, Stale (behind the pool's policy_index) or Failed. Only Current gets rollouts."""
    weights_message: Chars1024
    policy_index: int
    draining: bool
    opened_at: float | None
    speed: float | None
    """The sampled tokens per second of one rollout's model time, a moving average, or null until measured."""
    pace: float | None
    """Moving averages of a rollout's sampled tokens per second of Run, its seconds in Run and the active
    rollouts on the backend at that time, and when they were last measured. All are null until measured."""
    pace_seconds: float | None
    pace_load: float | None
    measured_at: float | None
    places: int | None
    """The rollouts in Run for which its KV cache has room, or null until the server was asked."""
    stats: bytes | None
    """The last values of the server's own metrics, as JSON."""
    restart_requested: bool = False
    circuit: Circuit = "Closed"
    """The state of the circuit breaker: Closed, Open since `opened_at`, or HalfOpen."""
    failures: int = 0


@dataclass(frozen=True, slots=True)
class RoutedBackend:
    """What routing reads about a ready backend and its pool. The first eight fields belong to the pool."""

    id: int
    namespace: str
    name: str
    model: str
    served_model: str | None
    tokenizer: str
    max_active: int | None
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
    places: int | None


@dataclass(frozen=True, slots=True)
class WeightUpdateRow:
    """A row of `weight_updates`."""

    id: int
    pool_id: int
    policy_version: Chars128
    policy_index: int
    request: bytes
    state: UpdateState
    verified: bool
    verified_by: Annotated[str, sa.String(16)]
    message: str
    progress: bytes
    """Each backend's part of the update, as JSON."""
    owner: Annotated[str, sa.String(64)] | None
    """The control-plane process that carries out the update, and when its ownership expires."""
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
    limits: Limits


@dataclass(frozen=True, slots=True)
class RolloutSize:
    """The place of an ended rollout's record, and the number of bytes that it adds to a page."""

    id: str
    end_seq: int
    group_no: int
    sample: int
    pending: int | None
    bytes: int
