"""The options of `rollyard slurm-bridge up`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollyard_crds import BackendPool, RolloutJob
from rollyard_drivers.reconcile.placement import is_for
from rollyard_drivers.reconcile.plan import Profile

from rollyard_slurm.profile import SiteProfile
from rollyard_slurm.scripts.site import Site

COMMAND = "rollyard slurm-bridge up"
UNIX = "unix"
SOCKET_NAME = "api.sock"
"""The socket's name in the state folder, which only this user can reach."""
CA_NAME = "ca.crt"
"""The name of the copied certificates in the home."""
DEFAULT_LEASE_SECONDS = 30.0
DEFAULT_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class BridgeOptions:
    """The settings of one bridge."""

    home: Path
    """The home, on storage that this host and the nodes share."""
    join: str = ""
    """The URL of a running control plane; empty: the bridge starts one."""
    tokens: Path | None = None
    """With `join`: a file with a JSON object that holds the tokens of driver and worker."""
    namespaces: tuple[str, ...] = ()
    """With `join`: the namespaces whose jobs and pools run here; empty: all of them."""
    ca_file: Path | None = None
    """With `join`: a PEM file with the authorities to trust for `https:`, where they are not public."""
    listen: str = ""
    """The address to listen on; empty: this host's in the cluster's network; UNIX: a socket in the home."""
    advertise: str = ""
    """The host by which the nodes reach the control plane; empty: `listen`."""
    port: int = 0
    """The port; 0: that of the last run on this home, else a free one."""
    sandbox: str = "apptainer"
    sandbox_options: tuple[str, ...] = ()
    profile: SiteProfile = field(default_factory=SiteProfile)
    pools: tuple[BackendPool, ...] = ()
    """The pools that are created at the start."""
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    timeout: float = DEFAULT_TIMEOUT
    """Seconds for one command of Slurm, or one call of slurmrestd."""
    max_jobs: int = 16
    """The number of RolloutJobs that are active at once."""

    def serves(self, thing: RolloutJob | BackendPool) -> bool:
        """Returns whether a job or a pool runs here, by its namespace and by the driver that it names."""
        if self.namespaces and thing.metadata.namespace not in self.namespaces:
            return False
        return is_for(thing, "slurm", default=not self.join)


def served(namespaces: Sequence[str]) -> str:
    """Returns words for people about the namespaces that a joined bridge serves."""
    if not namespaces:
        return "every namespace of the control plane"
    return f"the namespace{'s' if len(namespaces) > 1 else ''} {', '.join(namespaces)}"


def reconcile_profile(site: Site, max_jobs: int = 16) -> Profile:
    """Returns how jobs and pools are reconciled; jobs that run with other settings of the site are
    replaced."""
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
