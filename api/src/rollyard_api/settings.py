"""The settings of one control plane process: its options, and what is not an option."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from rollyard_process.telemetry.options import TraceOptions

from rollyard_api.core.hosts import HostCheck
from rollyard_api.core.limits import Quota
from rollyard_api.jobs import blobs, task_reader
from rollyard_api.jobs.allow_lists import AllowList, SandboxHosts
from rollyard_api.jobs.reward_services import ServiceAllowList
from rollyard_api.options.declared import ControlPlaneOptions
from rollyard_api.weights.coordinator import UpdateLimits


class Settings(ControlPlaneOptions):
    """The options of one process, and the limits and intervals that no installer chooses."""

    tokens_seconds: float = 1.0
    """The time between two reads of the token file, in seconds."""
    max_claims: int = 40_000
    """The largest number of claims whose sandbox is not removed. Further ones are answered with 429."""
    max_claims_per_namespace: int = 10_000
    max_body_bytes: int = 64 << 20
    sweep_seconds: float = 1.0
    health_seconds: float = 5.0
    """The time between two health checks of an external backend, in seconds."""
    circuit_seconds: float = 1.0
    """The time between two searches for open circuits that are due for a probe, in seconds."""
    stats_seconds: float = 2.0
    """The time between two readings of the backends' own metrics, in seconds."""
    speeds_seconds: float = 0.25
    """The time between two writes of the measured speeds of backends, in seconds. Without new measurements
    nothing is written. It is short because a pool's first job may last only a few seconds."""
    fleet_seconds: float = 1.0
    """The age in seconds up to which one read of the fleet serves all requests."""
    folding_seconds: float = 1.0
    """The time in seconds between two rounds in which ended rollouts are folded into statistics, the workers
    that were heard from are written, and followers of the fleet get what has changed."""
    weights_seconds: float = 0.3
    """The time between two searches for backends whose weights are not the intended ones, in seconds."""
    weight_limits: UpdateLimits = Field(default_factory=UpdateLimits)
    """The times that a server may take for each step of a weight update."""
    recheck_seconds: float = 1.0
    """The longest sleep of a long poll, in seconds, where another replica may have made the change."""
    traces: TraceOptions = Field(default_factory=TraceOptions)
    """The receiver of traces, and which rollouts are traced; by default, none."""
    traces_asked: bool = False
    """Whether an option asks for traces, and not just a variable that may be meant for other programs."""
    page_folder: Path = Path(__file__).parent / "page"
    """The folder with the page's index.html and its assets."""

    @property
    def host_check(self) -> HostCheck:
        """The Host headers that are accepted from callers without a token."""
        return HostCheck(self.host, self.allowed_hosts)

    @property
    def rollout_quota(self) -> Quota:
        """The room for unfinished rollouts."""
        return Quota(self.max_queued, self.max_queued_per_namespace)

    @property
    def claim_quota(self) -> Quota:
        """The room for claims whose sandbox is not removed."""
        return Quota(self.max_claims, self.max_claims_per_namespace)

    @property
    def database_url(self) -> str:
        """The URL of the database. By default it is an SQLite file in the state folder."""
        return self.db or f"sqlite:///{self.state_dir.absolute() / 'rollyard.db'}"

    @property
    def task_sources(self) -> AllowList:
        """The sources that jobs may name.

        Raises:
            OptionInvalid: An entry cannot be used.
        """
        # Tokens, the database and the trajectories of other jobs are never the tasks of a job.
        private = [self.state_dir]
        private += [] if self.tokens_file is None else [self.tokens_file]
        private += [] if "://" in self.trajectories_url else [Path(self.trajectories_url)]
        return AllowList.of(self.allow_tasks_from, self.allow_tasks_networks, private)

    @property
    def task_limits(self) -> task_reader.TaskFileLimits:
        """The limits on what is read for jobs."""
        return task_reader.TaskFileLimits(file_bytes=self.max_task_bytes)

    @property
    def blob_limits(self) -> blobs.BlobLimits:
        """The limits on uploads."""
        return blobs.BlobLimits(self.max_blob_bytes, self.max_namespace_blob_bytes, self.max_namespace_blobs)

    @property
    def sandbox_hosts(self) -> SandboxHosts:
        """The hosts that jobs may open to their sandboxes.

        Raises:
            OptionInvalid: An entry cannot be used.
        """
        return SandboxHosts.of(self.allow_sandbox_hosts, self.allow_eval_hosts)

    @property
    def reward_services(self) -> ServiceAllowList:
        """The reward services that jobs may name.

        Raises:
            OptionInvalid: An entry cannot be used.
        """
        return ServiceAllowList.of(self.allow_rewards_from, self.allow_rewards_networks)

    @property
    def trajectories_url(self) -> str:
        """The URL of the trajectory store. By default it is a folder in the state folder."""
        return self.trajectories or str(self.state_dir.absolute() / "trajectories")
