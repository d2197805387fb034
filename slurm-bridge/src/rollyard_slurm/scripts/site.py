"""What the batch scripts of one bridge share, and where its files are. This module is pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from rollyard_drivers.reconcile.plan import Workload

from rollyard_slurm.profile import SiteProfile


@dataclass(frozen=True, slots=True)
class Site:
    """The site, the home and the control plane of one bridge."""

    home: Path
    """The home, on storage that the nodes share."""
    instance: str
    """The name of the home in the comments of jobs."""
    url: str
    """The URL by which the nodes reach the control plane."""
    profile: SiteProfile
    sandbox: str = "apptainer"
    sandbox_options: tuple[str, ...] = ()
    """Further arguments of the workers, such as `--default-image`."""
    python: str = field(default_factory=lambda: sys.executable)
    ca_file: Path | None = None
    """The authorities that workers trust for `https:`."""

    @property
    def logs(self) -> Path:
        """The folder of the jobs' logs."""
        return self.home / "logs"

    @property
    def endpoints(self) -> Path:
        """The folder with one file for each backend, which says where it answers."""
        return self.home / "endpoints"

    @property
    def tokens(self) -> Path:
        """The folder with one file for each RolloutJob, which holds the token of its workers."""
        return self.home / "tokens"

    @property
    def troubles(self) -> Path:
        """The folder with one file for each running worker that takes no Init work; the file says why."""
        return self.home / "troubles"

    def token_file(self, workload: Workload) -> Path:
        """Returns the file with the token of the workers of one RolloutJob."""
        owner = workload.owner
        return self.tokens / f"{owner.namespace}.{owner.name}.{owner.uid[:8] or 'none'}"

    def endpoint_file(self, launch: str) -> Path:
        """Returns the file in which the backend of one submission says where it answers."""
        return self.endpoints / f"{launch}.json"

    def trouble_file(self, workload: Workload, job: int | str) -> Path:
        """Returns the file that says what keeps a worker from starting sandboxes, while something does."""
        return self.troubles / f"{workload.name}-{job}"

    def log(self, workload: Workload, job: int) -> Path:
        """Returns the file with the output of a job."""
        return self.logs / f"{workload.name}-{job}.log"
