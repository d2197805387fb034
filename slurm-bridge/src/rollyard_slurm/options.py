"""The options of `rollyard slurm-bridge up`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rollyard_crds import BackendPool, RolloutJob
from rollyard_drivers.reconcile.placement import is_for
from rollyard_drivers.reconcile.plan import Profile

from rollyard_slurm.profile import SiteProfile
from rollyard_slurm.scripts.site import Site

COMMAND: Final = "rollyard slurm-bridge up"
UNIX: Final = "unix"
"""The value of `listen` that stands for a Unix socket in the home."""
SOCKET_NAME: Final = "api.sock"
"""The name of the socket in the state folder. Only the user of the bridge can reach this folder."""
CA_NAME: Final = "ca.crt"
"""The name of the file in the home into which the certificates are copied."""
DEFAULT_TIMEOUT: Final = 20.0


@dataclass(frozen=True, slots=True)
class BridgeOptions:
    """The settings of one bridge."""

    home: Path
    """The home folder, which is on storage that this host and the nodes share."""
    join: str = ""
    """The URL of a running control plane to join. If it is empty, the bridge starts a control plane."""
    tokens: Path | None = None
    """A file with a JSON object that holds the tokens of driver and worker. It is needed with `join`."""
    namespaces: tuple[str, ...] = ()
    """The namespaces whose jobs and pools run here, with `join`. An empty tuple stands for all namespaces."""
    ca_file: Path | None = None
    """A PEM file with the certificate authorities to trust for `https:`, if they are not public."""
    listen: str = ""
    """The address on which the control plane listens.

    If it is empty, the address of this host in the cluster's network is used. UNIX stands for a socket in the
    home.
    """
    advertise: str = ""
    """The host by which the nodes reach the control plane. If it is empty, the value of `listen` is used."""
    port: int = 0
    """The port of the control plane. 0 stands for the port of the last run on this home, or a free port."""
    sandbox: str = "apptainer"
    sandbox_options: tuple[str, ...] = ()
    profile: SiteProfile = field(default_factory=SiteProfile)
    telemetry: tuple[tuple[str, str], ...] = ()
    """The variables of the jobs for traces and log lines."""
    hub: tuple[tuple[str, str], ...] = ()
    """The variables by which the bridge and its workers find the cache of the Hugging Face Hub."""
    pools: tuple[BackendPool, ...] = ()
    """The pools that the bridge creates or replaces when it starts."""
    plane: Mapping[str, Any] = field(default_factory=dict)
    """The options of a control plane that the bridge starts, by their names in files."""
    timeout: float = DEFAULT_TIMEOUT
    """The time limit of one Slurm command or one call of slurmrestd, in seconds."""
    max_jobs: int = 16
    """The largest number of RolloutJobs that are active at the same time."""

    def site(self, instance: str, url: str) -> Site:
        """Return the site of a bridge whose home has this name, with the URL of its control plane."""
        return Site(
            home=self.home,
            instance=instance,
            url=url,
            profile=self.profile,
            sandbox=self.sandbox,
            sandbox_options=self.sandbox_options,
            telemetry=self.telemetry,
            hub=self.hub,
            ca_file=self.home / CA_NAME if self.ca_file is not None else None,
        )

    def serves(self, thing: RolloutJob | BackendPool) -> bool:
        """Return whether a job or a pool runs here.

        Its namespace and the driver that it names decide this.
        """
        if self.namespaces and thing.metadata.namespace not in self.namespaces:
            return False
        return is_for(thing, "slurm", default=not self.join)


def served(namespaces: Sequence[str]) -> str:
    """Return a readable description of the namespaces that a joined bridge serves."""
    if not namespaces:
        return "every namespace of the control plane"
    return f"the namespace{'s' if len(namespaces) > 1 else ''} {', '.join(namespaces)}"


def reconcile_profile(site: Site, max_jobs: int = 16) -> Profile:
    """Return the settings with which jobs and pools are reconciled.

    They contain a hash of the settings of the site. Slurm jobs that run with another hash are replaced.
    """
    parts: tuple[object, ...] = (site.url, site.sandbox, site.sandbox_options, site.python)
    # The number of ready workers changes nothing in a script.
    parts += (site.profile.model_dump_json(exclude={"workers": {"ready"}}),)
    parts += (() if site.ca_file is None else (str(site.ca_file),), site.hub)
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
