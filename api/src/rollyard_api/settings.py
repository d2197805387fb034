"""Settings of one control plane process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rollyard_api.jobs import blobs, task_reader
from rollyard_api.jobs.task_sources import AllowList
from rollyard_api.weights.limits import UpdateLimits


@dataclass(frozen=True, slots=True)
class Settings:
    """Where state lives and how much of everything there may be."""

    state_dir: Path
    """Holds tokens.json and, by default, the database and the trajectories."""
    db: str = ""
    """SQLAlchemy URL, `sqlite:///…` or `postgresql+psycopg://…`; default: `state_dir/rollyard.db`."""
    trajectories: str = ""
    """fsspec URL of the trajectory store; default: `state_dir/trajectories`."""
    tokens_file: Path | None = None
    """JSON object with the tokens of each role; default: `state_dir/tokens.json`, made if missing."""
    tokens_seconds: float = 1.0
    """Between two looks at whether the token file has changed."""
    older_job_tokens: bool = True
    """Whether job tokens without a uid, which older bridges make, are accepted."""
    open_metrics: bool = False
    """Whether `/metrics` needs no token."""
    open_docs: bool = False
    """Whether `/docs` and `/openapi.json` need no token."""
    lease_seconds: float = 30.0
    node_seconds: float = 60.0
    """Silence of all workers of a node after which its sandboxes have ended by themselves."""
    max_queued: int = 1_000_000
    """Unfinished rollouts in all; more is answered 429."""
    max_claims: int = 10_000
    """Sandbox claims whose sandbox is not removed; more is answered 429."""
    max_body_bytes: int = 64 << 20
    max_expiries: int = 10
    """Expired leases per rollout, after which it ends as Failed/LeaseExpired."""
    max_unstored: int = 10_000
    """Ended rollouts that wait for the trajectory store; beyond, completions answer 507."""
    store_seconds: float = 15.0
    """How long a request waits for the trajectory store; writing a part may take three times as long."""
    page_bytes: int = 16 << 20
    """The largest page of results or of a list, and the largest answer with leases; a single larger item
    has a page to itself."""
    max_polls: int = 4096
    """Long polls of trainers and drivers at the same time; more are answered 429."""
    max_polls_per_namespace: int = 1024
    max_worker_polls: int = 32_768
    """Long polls of workers at the same time; more are answered 429."""
    max_worker_polls_per_namespace: int = 8192
    max_streams: int = 1024
    """Event streams at the same time; more are answered 429."""
    max_streams_per_namespace: int = 256
    max_pages: int = 32
    """Pages of results in memory at the same time, on their way to a client: so many from the trajectory
    store, and as many from the database. Others wait their turn."""
    max_pages_per_namespace: int = 8
    sweep_seconds: float = 1.0
    health_seconds: float = 5.0
    """Between two health checks of an external backend."""
    circuit_seconds: float = 1.0
    """Between two looks at which open circuits are due for a probe."""
    stats_seconds: float = 2.0
    """Between two readings of the backends' own metrics."""
    weights_seconds: float = 0.3
    """Between two looks at which backends have other weights than they should."""
    weight_limits: UpdateLimits = field(default_factory=UpdateLimits)
    """How long a server may take for each step of a weight update."""
    verify_python: str = ""
    """Python with torch and transformers, for forward passes; default: this one, if it has them."""
    recheck_seconds: float = 1.0
    """Longest sleep of a long poll where another replica may have made the change."""
    event_buffer: int = 4096
    """Events kept per job for resuming, and at most owed to one subscriber."""
    allow_tasks_from: tuple[str, ...] = ()
    """URL prefixes that `spec.tasks.url` of a job may begin with, beside uploads; see `AllowList`."""
    allow_tasks_networks: tuple[str, ...] = ()
    """Networks in which hosts of these prefixes may be, beside public addresses."""
    task_limits: task_reader.TaskFileLimits = field(default_factory=task_reader.TaskFileLimits)
    """How much may be read in the name of jobs."""
    blob_limits: blobs.BlobLimits = field(default_factory=blobs.BlobLimits)
    """How much may be uploaded."""
    sqlite_max_pages: int = 0
    """Bound of the SQLite file in pages of 4 KiB; 0: the disk is the bound."""

    @property
    def database_url(self) -> str:
        return self.db or f"sqlite:///{self.state_dir.absolute() / 'rollyard.db'}"

    @property
    def task_sources(self) -> AllowList:
        """What jobs may name.

        Raises:
            PrefixError: an entry cannot be used.
        """
        # Tokens, the database and others' trajectories are never a job's tasks.
        kept = [self.state_dir]
        kept += [] if self.tokens_file is None else [self.tokens_file]
        kept += [] if "://" in self.trajectories_url else [Path(self.trajectories_url)]
        return AllowList.of(self.allow_tasks_from, self.allow_tasks_networks, kept)

    @property
    def trajectories_url(self) -> str:
        return self.trajectories or str(self.state_dir.absolute() / "trajectories")
