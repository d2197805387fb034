"""The site of a bridge: the values that its batch scripts share, and the paths of its files.

This module is pure.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from rollyard_drivers.reconcile.plan import Workload

from rollyard_slurm.profile import SiteProfile


@dataclass(frozen=True, slots=True)
class Site:
    """The settings of one bridge for its site, its home and its control plane."""

    home: Path
    """The home folder, which is on storage that the nodes share."""
    instance: str
    """The name by which the comments of jobs identify the home."""
    url: str
    """The URL by which the nodes reach the control plane."""
    profile: SiteProfile
    sandbox: str = "apptainer"
    sandbox_options: tuple[str, ...] = ()
    """Further command-line arguments of the workers, such as `--default-image`."""
    python: str = field(default_factory=lambda: sys.executable)
    telemetry: tuple[tuple[str, str], ...] = ()
    """The variables of workers and backends for traces and log lines."""
    hub: tuple[tuple[str, str], ...] = ()
    """The variables by which workers find the cache of the Hugging Face Hub. No token is among them."""
    ca_file: Path | None = None
    """The file with the certificate authorities that workers trust for `https:`, if they are not public."""

    @property
    def logs(self) -> Path:
        """The folder with the logs of the jobs."""
        return self.home / "logs"

    @property
    def endpoints(self) -> Path:
        """The folder with one file for each backend, which holds the URL of the backend."""
        return self.home / "endpoints"

    @property
    def tokens(self) -> Path:
        """The folder with one file for each RolloutJob, which holds the token of its workers.

        Each ready worker has a file of its own, too.
        """
        return self.home / "tokens"

    @property
    def troubles(self) -> Path:
        """The folder with one file for each running worker that takes no Init work. The file says why."""
        return self.home / "troubles"

    def token_file(self, workload: Workload) -> Path:
        """Return the path of the file with the token of a RolloutJob's workers, or of a ready worker."""
        owner = workload.owner
        if owner.kind == "ReadyWorker":
            return self.ready_token_file(owner.namespace, owner.name)
        return self.tokens / f"{owner.namespace}.{owner.name}.{owner.uid[:8] or 'none'}"

    def ready_token_file(self, namespace: str, name: str) -> Path:
        """Return the path of the file with the token of one worker that stands ready."""
        return self.tokens / f"{namespace}.{name}.ready"

    def endpoint_file(self, launch: str) -> Path:
        """Return the path of the file in which the backend of one submission announces its URL."""
        return self.endpoints / f"{launch}.json"

    def trouble_file(self, name: str, job: int | str) -> Path:
        """Return the path of the file that says why a worker cannot start sandboxes.

        The file exists only while this is so.

        Args:
            name: The name of the workload that the job was submitted as.
            job: The number of the Slurm job.
        """
        return self.troubles / f"{name}-{job}"

    def log(self, name: str, job: int) -> Path:
        """Return the path of the file with the output of a job, whose name is that of `trouble_file`."""
        return self.logs / f"{name}-{job}.log"
