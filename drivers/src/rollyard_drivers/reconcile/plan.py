"""The data that the reconcile reads and returns: workloads, observations and plans.

All of it is immutable. A driver (local, Kubernetes, Slurm) fills an `Observed…` object with what it sees,
calls the reconcile, carries out the plan, and observes again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Generic, Literal, TypeVar

from rollyard_crds import BackendPoolStatus, BackendStatus, RolloutJobStatus, StageName

WorkloadKind = Literal["stage-worker", "backend"]
WorkloadState = Literal["starting", "running", "stopping", "exited"]
EngineType = Literal["embedded", "external", "vllm"]
STARTING: Final = "starting"
"""The message of a backend that is not yet expected to answer."""
TEMPLATE_NOT_ALLOWED: Final = "TemplateNotAllowed"
"""The reason of a job or a pool whose template the installation does not permit."""
StatusT = TypeVar("StatusT", RolloutJobStatus, BackendPoolStatus)


@dataclass(frozen=True, slots=True)
class Owner:
    """The object that a workload belongs to."""

    kind: Literal["RolloutJob", "BackendPool", "ReadyWorker"]
    """The kind of the object. A `ReadyWorker` stands for a worker that is ready and has no job yet."""
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Workload:
    """One process, pod or batch job that should run.

    Its name is deterministic, so it is harmless to start it a second time.
    """

    name: str
    kind: WorkloadKind
    owner: Owner
    index: int = 0
    """The index of the replica, counted from 0."""
    stages: tuple[StageName, ...] = ()
    """The stages that a stage worker leases from."""
    concurrency: tuple[tuple[StageName, int], ...] = ()
    """The number of rollouts that a stage worker runs at the same time, for each of its stages."""
    engine: EngineType = "embedded"
    """The type of the engine of a backend."""
    model: str = ""
    """The model folder of a backend, which is also the name that the model is served under."""
    command: tuple[str, ...] = ()
    """The command that starts vLLM's API server. If it is empty, the driver's default applies."""
    args: tuple[str, ...] = ()
    """Further arguments of the engine's command line, for backends."""
    env: tuple[tuple[str, str], ...] = ()
    """The environment of a backend's engine, sorted by name."""
    gpus: int = 0
    """The number of GPUs of a backend. With 0, GPUs are neither requested nor restricted."""
    made_of: str = ""
    """On Kubernetes, a digest of the pod template and of what else the workload's pod is made from."""

    @property
    def spec_hash(self) -> str:
        """A hash of 16 hex digits, which changes with everything that a running workload cannot take over."""
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
    """The number of times the workload was restarted, as stated by the launch that began it."""
    last_end: str = ""
    """How the workload's predecessor ended, as stated by the launch that began the workload."""
    exit_code: int | None = None
    """The exit status of a workload that has exited. A negative number is a signal."""
    exited_at: datetime | None = None
    ready: bool = True
    """Whether a backend has passed the health check and the warm-up completion."""
    unready_since: datetime | None = None
    """The time since which a backend's health check has failed."""
    url: str = ""
    """The base URL of a backend, once it is known."""
    policy_version: str = ""
    """The label of the weights that a backend loaded at its start, if the engine reports it."""
    message: str = ""
    """What the driver knows about the workload's trouble (the telling line of its log)."""
    trouble: str = ""
    """What keeps a running workload from doing its work at present, such as a full disk of its node, in the
    source's own words."""
    blocked: bool = False
    """Whether the workload cannot be started. An exited workload was not started because this machine lacks
    what `message` says. A starting workload cannot be started by the cluster yet, which keeps trying;
    `message` says why."""
    pending: bool = False
    """Whether the program of a starting workload has not begun, because it waits for a place or because its
    image is being pulled. The limit on the start time does not apply yet."""
    draining_since: datetime | None = None
    """The time since which a backend takes no new rollouts, as an earlier plan said."""
    worker: str = ""
    """The name under which a stage worker leases rollouts, which no other process ever has. It is empty if
    the driver does not know it."""
    useful: bool = False
    """Whether a stage worker that has exited is known to have completed a stage of a rollout."""
    ready_since: datetime | None = None
    """The time at which a backend became ready for the first time."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The part of a BackendPool that its jobs need."""

    ready: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """The surroundings of a job. The job's counts are in its own status."""

    workloads: tuple[ObservedWorkload, ...] = ()
    pool: PoolState | None = None
    """The job's pool, or None if there is no such pool or the job names none."""
    closed: bool = False
    """Whether no more tasks will be added, because a batch is loaded or a stream was closed."""
    cancelled: str = ""
    """Why the job was cancelled (`Cancelled`, `DeadlineExceeded`, `NoToolParser`, `Deleted`), or an empty
    string if it was not."""
    admitted_others: int = 0
    """The number of other jobs of this driver that are admitted and not finished."""
    refused: str = ""
    """On Kubernetes, the part of the job's templates that the installation does not permit."""


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """The surroundings of a pool."""

    workloads: tuple[ObservedWorkload, ...] = ()
    external: tuple[BackendStatus, ...] = ()
    """The results of the probes of the URLs of an external pool."""
    refused: str = ""
    """On Kubernetes, the part of the pool's template that the installation does not permit."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A step that starts a workload.

    `restarts` and `last_end` have to be kept and returned with each observation of the workload.
    """

    workload: Workload
    restarts: int = 0
    last_end: str = ""
    """How the previous workload ended, such as `exited with 1 (…)`, if this is a restart."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A step that drains a workload for at most `grace_seconds` and then ends it.

    A workload that has exited is discarded.
    """

    name: str
    grace_seconds: float
    again: Launch | None = None
    """How to count the next launch, if the workload is stopped because it does not do its work and is
    launched again."""


@dataclass(frozen=True, slots=True)
class Plan(Generic[StatusT]):
    """The steps to take now, and the status that results from them."""

    status: StatusT
    launch: tuple[Launch, ...] = ()
    stop: tuple[Stop, ...] = ()
    drain: frozenset[str] = frozenset()
    """The backends of a pool that take no new rollouts now; the driver remembers since when. All other
    backends may take rollouts again."""
    cancel: str = ""
    """The reason for which every rollout of the job that has not ended is cancelled. Empty cancels none."""
    delete: bool = False
    """Whether the job object is deleted, because its time to live has passed."""
    requeue_after: float | None = None
    """The seconds after which the plan changes even if nothing else does."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The settings in which drivers differ, and the limits of restarts."""

    combine_stages: bool = False
    """Whether one worker serves all three stages if each stage wants one replica."""
    node_workers: bool = False
    """Whether every worker serves all three stages. Slurm needs this, since sandboxes live on the worker's
    node. There are as many workers as the stage that needs the most."""
    max_active_jobs: int = 16
    """The number of jobs that run at the same time. Further jobs are Pending until one has finished."""
    backoff_seconds: float = 1.0
    """The delay in seconds before the first restart. It doubles with each restart. That of a backend is
    counted from the time at which the backend was ready."""
    backoff_cap_seconds: float = 60.0
    """The longest delay between restarts, in seconds."""
    stable_seconds: float = 120.0
    """A worker that has run, or a backend that has been ready, for this many seconds is restarted with the
    shortest delay again."""
    blocked_seconds: float = 5.0
    """The pause in seconds between two checks of whether the machine has what a backend lacked."""
    unready_seconds: float = 60.0
    """A backend whose health check fails for this many seconds is restarted."""
    drain_seconds: float = 30.0
    """The time in seconds that the workers of a suspended job, and the rollouts of a backend that is removed,
    have to finish."""
    stop_seconds: float = 10.0
    """The time in seconds that everything else has to end by itself."""
    made_of: str = ""
    """On Kubernetes, a digest of what the installation puts into pods, such as images. When it changes, stage
    workers and backends are replaced. It is empty for drivers that do not use pod templates."""
