"""Settings of one control plane process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rollyard_api.weight_steps import Limits


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
    """JSON object with a token per role, read at start; default: `state_dir/tokens.json`, made if missing."""
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
    sweep_seconds: float = 1.0
    health_seconds: float = 5.0
    """Between two health checks of an external backend."""
    circuit_seconds: float = 1.0
    """Between two looks at which open circuits are due for a probe."""
    stats_seconds: float = 2.0
    """Between two readings of the backends' own metrics."""
    weights_seconds: float = 0.3
    """Between two looks at which backends have other weights than they should."""
    weight_limits: Limits = field(default_factory=Limits)
    """How long a server may take for each step of a weight update."""
    verify_python: str = ""
    """Python with torch and transformers, for forward passes; default: this one, if it has them."""
    recheck_seconds: float = 1.0
    """Longest sleep of a long poll where another replica may have made the change."""
    event_buffer: int = 4096
    """Events kept per job for resuming, and at most owed to one subscriber."""
    sqlite_max_pages: int = 0
    """Bound of the SQLite file in pages of 4 KiB; 0: the disk is the bound."""

    @property
    def database_url(self) -> str:
        return self.db or f"sqlite:///{self.state_dir.absolute() / 'rollyard.db'}"

    @property
    def trajectories_url(self) -> str:
        return self.trajectories or str(self.state_dir.absolute() / "trajectories")
