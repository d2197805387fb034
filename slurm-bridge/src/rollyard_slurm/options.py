"""What `rollyard slurm-bridge up` was asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollyard_crds import BackendPool, RolloutJob
from rollyard_drivers.reconcile.placement import is_for
from rollyard_drivers.reconcile.plan import Profile

from rollyard_slurm.profile import SiteProfile
from rollyard_slurm.scripts.batch import Site

COMMAND = "rollyard slurm-bridge up"
UNIX = "unix"
SOCKET_NAME = "api.sock"
"""In the state folder, which is this user's alone."""
CA_NAME = "ca.crt"
"""In the home."""
DEFAULT_LEASE_SECONDS = 30.0
DEFAULT_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class BridgeOptions:
    """Settings of one bridge."""

    home: Path
    """On storage that this host and the nodes share."""
    join: str = ""
    """URL of a control plane that runs; empty: one is started here."""
    tokens: Path | None = None
    """With `join`: JSON object with the tokens of driver and worker."""
    namespaces: tuple[str, ...] = ()
    """With `join`: the namespaces whose jobs and pools run here; empty: those of all."""
    ca_file: Path | None = None
    """With `join`: whom to trust for `https:` (PEM), where its authority is not a public one."""
    listen: str = ""
    """Address to listen on; empty: this host's in the cluster's network; UNIX: a socket in the home."""
    advertise: str = ""
    """Host that the nodes are told; empty: `listen`."""
    port: int = 0
    """0: that of the last run on this home, else a free one."""
    sandbox: str = "apptainer"
    sandbox_options: tuple[str, ...] = ()
    profile: SiteProfile = field(default_factory=SiteProfile)
    pools: tuple[BackendPool, ...] = ()
    """Pools that are made at the start."""
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    timeout: float = DEFAULT_TIMEOUT
    """Seconds for one Slurm command, or one call of slurmrestd."""
    max_jobs: int = 16
    """RolloutJobs that are active at once."""

    def serves(self, thing: RolloutJob | BackendPool) -> bool:
        """Whether a job or a pool is to run here: by its namespace, and by the driver that it names."""
        if self.namespaces and thing.metadata.namespace not in self.namespaces:
            return False
        return is_for(thing, "slurm", default=not self.join)


def served(namespaces: Sequence[str]) -> str:
    """Whose jobs and pools a joined bridge runs, for people."""
    if not namespaces:
        return "every namespace of the control plane"
    return f"the namespace{'s' if len(namespaces) > 1 else ''} {', '.join(namespaces)}"


def reconcile_profile(site: Site, max_jobs: int = 16) -> Profile:
    """How jobs and pools are reconciled: what runs with other settings of the site is replaced."""
    parts: tuple[object, ...] = (site.url, site.sandbox, site.sandbox_options, site.python)
    parts += (site.profile.model_dump_json(), *([] if site.ca_file is None else [str(site.ca_file)]))
    return Profile(
        node_workers=True,
        max_active_jobs=max_jobs,
        backoff_seconds=2.0,
        backoff_cap_seconds=120.0,
        stable_seconds=120.0,
        blocked_seconds=30.0,
        drain_seconds=site.profile.workers.drain_seconds + 10.0,
        stop_seconds=20.0,
        made_of=hashlib.sha256(repr(parts).encode()).hexdigest()[:16],
    )
