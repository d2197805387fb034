"""The data that the reconcile reads and returns: workloads, observations and plans.

All of it is immutable data. A driver (local, Kubernetes, Slurm) fills an `Observed…`
with what it sees, calls reconcile, carries the plan out and sees again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, Literal, TypeVar

from rollyard_crds import BackendPoolStatus, BackendStatus, RolloutJobStatus, StageName

WorkloadKind = Literal["stage-worker", "backend"]
WorkloadState = Literal["starting", "running", "stopping", "exited"]
EngineType = Literal["embedded", "external", "vllm"]
STARTING = "starting"
"""Message of a backend that is expected not to answer yet."""
TEMPLATE_NOT_ALLOWED = "TemplateNotAllowed"
"""Reason of a job or a pool whose template the installation does not permit."""
StatusT = TypeVar("StatusT", RolloutJobStatus, BackendPoolStatus)


@dataclass(frozen=True, slots=True)
class Owner:
    """The object that a workload belongs to."""

    kind: Literal["RolloutJob", "BackendPool"]
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Workload:
    """One process, pod or batch job that should run. Its name is deterministic, so a repeat is harmless."""

    name: str
    kind: WorkloadKind
    owner: Owner
    index: int = 0
    """Replica index, from 0."""
    stages: tuple[StageName, ...] = ()
    """Stage workers: the stages it leases from."""
    concurrency: tuple[tuple[StageName, int], ...] = ()
    """Stage workers: rollouts at once, for each of its stages."""
    engine: EngineType = "embedded"
    """Backends: what serves."""
    model: str = ""
    """Backends: model folder, and the name that the model is served under."""
    command: tuple[str, ...] = ()
    """vLLM: what starts its API server; empty: the driver's default."""
    args: tuple[str, ...] = ()
    """Backends: further arguments of the engine's command line."""
    env: tuple[tuple[str, str], ...] = ()
    """Backends: environment of the engine, sorted by name."""
    gpus: int = 0
    """Backends: the GPUs of each; with 0 they are neither asked for nor restricted."""
    made_of: str = ""
    """Kubernetes: digest of the pod template and of what else its pod is made from."""

    @property
    def spec_hash(self) -> str:
        """16 hex digits; changes with everything that a running workload cannot take over."""
        backend = (self.engine, self.model, self.command, self.args, self.env, self.gpus)
        text = repr((self.stages, self.concurrency, backend)) + self.made_of
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ObservedWorkload:
    """A workload as its driver sees it."""

    name: str
    spec_hash: str
    state: WorkloadState
    started_at: datetime
    restarts: int = 0
    """How often it was restarted, as the launch that began it said."""
    last_end: str = ""
    """How its predecessor ended, as the launch that began it said."""
    exit_code: int | None = None
    """Exited: its status; negative is a signal."""
    exited_at: datetime | None = None
    ready: bool = True
    """Backends: whether it passed the health check and the warm-up completion."""
    unready_since: datetime | None = None
    """Backends: since when the health check fails."""
    url: str = ""
    """Backends: base URL, once known."""
    policy_version: str = ""
    """Backends: label of the weights that they loaded at their start, where the engine says."""
    message: str = ""
    """What the driver knows about its trouble (the telling line of its log)."""
    trouble: str = ""
    """Running: what keeps it from doing its work just now, such as its node's full disk, in its own words."""
    blocked: bool = False
    """Exited: nothing was started, because this machine lacks what `message` says. Starting: the cluster
    cannot start it yet and keeps trying; `message` says why."""
    pending: bool = False
    """Starting: its program has not begun (it waits for a place, or its image is pulled); no limit on the
    time of starting counts yet."""
    draining_since: datetime | None = None
    """Backends: since when it takes no new rollouts, as an earlier plan said."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The job's BackendPool, as far as a job needs to know."""

    ready_backends: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """What surrounds a job; its counts stand in the job's own status."""

    workloads: tuple[ObservedWorkload, ...] = ()
    pool: PoolState | None = None
    """None: there is no such pool (or the job names none)."""
    closed: bool = False
    """No task will come any more: a batch is loaded, or a stream was closed."""
    cancelled: str = ""
    """Why the job was cancelled (`Cancelled`, `DeadlineExceeded`, `Deleted`); empty if it was not."""
    admitted_others: int = 0
    """Other jobs of this driver that are admitted and not finished."""
    refused: str = ""
    """Kubernetes: what of its templates the installation does not permit."""


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """What surrounds a pool."""

    workloads: tuple[ObservedWorkload, ...] = ()
    external: tuple[BackendStatus, ...] = ()
    """External pools: what the probes of its URLs say."""
    refused: str = ""
    """Kubernetes: what of its template the installation does not permit."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Start this workload; `restarts` and `last_end` are to be kept with what is observed of it."""

    workload: Workload
    restarts: int = 0
    last_end: str = ""
    """A restart: how the one before ended, such as `exited with 1 (…)`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Let a workload drain for at most `grace_seconds`, then end it; forget one that has exited."""

    name: str
    grace_seconds: float
    again: Launch | None = None
    """It is stopped because it does not do its work: how it is to be counted when it is launched again."""


@dataclass(frozen=True, slots=True)
class Plan(Generic[StatusT]):
    """What to do now, and the status that follows."""

    status: StatusT
    launch: tuple[Launch, ...] = ()
    stop: tuple[Stop, ...] = ()
    drain: frozenset[str] = frozenset()
    """Pools: backends that take no new rollouts now; the driver remembers since when. Others may again."""
    cancel: str = ""
    """Jobs: cancel every rollout that has not ended, for this reason."""
    delete: bool = False
    """Jobs: delete the object; its time to live has passed."""
    requeue_after: float | None = None
    """After this many seconds the plan changes even if nothing else does."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What differs between drivers, and the bounds of restarting."""

    combine_stages: bool = False
    """One worker for all three stages where each stage wants one replica."""
    node_workers: bool = False
    """Slurm: every worker has all three stages, since sandboxes live on its node; as many workers as the
    stage that wants most."""
    max_active_jobs: int = 16
    """This many jobs run at once; more are Pending until one has finished."""
    backoff_seconds: float = 1.0
    """Delay before the first restart; doubles with each."""
    backoff_cap_seconds: float = 60.0
    """Longest delay between restarts."""
    stable_seconds: float = 120.0
    """A workload that ran this long starts over with the shortest delay."""
    blocked_seconds: float = 5.0
    """The pause between two checks whether the machine has what a backend lacked."""
    unready_seconds: float = 60.0
    """A backend whose health check fails this long is restarted."""
    drain_seconds: float = 30.0
    """How long the workers of a suspended job, and the rollouts of a backend that is removed, may finish."""
    stop_seconds: float = 10.0
    """How long everything else may take to end by itself."""
    made_of: str = ""
    """Kubernetes: digest of what the installation puts into pods, such as images; with another one, stage
    workers and backends are replaced. Empty: pod templates mean nothing to this driver."""
