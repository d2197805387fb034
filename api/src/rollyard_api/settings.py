"""The settings of one control plane process."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from rollyard_crds.telemetry.options import TraceOptions

from rollyard_api.browsers.config import BrowserSettings
from rollyard_api.core.limits import Quota
from rollyard_api.jobs import blobs, task_reader
from rollyard_api.jobs.reward_services import ServiceAllowList
from rollyard_api.jobs.sandbox_hosts import SandboxHosts
from rollyard_api.jobs.task_sources import AllowList
from rollyard_api.weights.coordinator import UpdateLimits

_UPLOADS: Final = blobs.BlobLimits()
_NETWORK: Final = "a network in which the hosts of these prefixes may be, beside public addresses"


def _option(default: Any, text: str, **more: Any) -> Any:
    """Return a field that is an option of the command line, too.

    Args:
        default: The default, which also decides how a value is read.
        text: The help text. Where it says what the setting is, the field has no other description.
        more: What else `add_argument` takes, and under `flag` the option if it is not the field's name.
    """
    return field(default=default, metadata={"help": text, **more})


def _bound(default: int | float, text: str) -> Any:
    """Return a field that is an option of the group of bounds, and must be more than 0."""
    return _option(default, text, bound=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """The locations of the state, and the limits and intervals of one process."""

    state_dir: Path
    """The folder of tokens.json and, by default, of the database and the trajectories."""
    db: str = _option("", "sqlite:///… or postgresql+psycopg://… (default: in the state folder)")
    """The SQLAlchemy URL of the database; the default is `state_dir/rollyard.db`."""
    trajectories: str = _option("", "URL of the trajectory store (default: in the state folder)")
    """The fsspec URL of the trajectory store; the default is `state_dir/trajectories`."""
    tokens_file: Path | None = field(
        default=None,
        metadata={
            "help": "JSON object with the tokens of admin, worker, driver and metrics, a string or a list of "
            "them for each (default: tokens.json in the state folder, made if missing); read again when it "
            "changes",
            "flag": "--tokens",
            "type": Path,
            "metavar": "FILE",
        },
    )
    tokens_seconds: float = 1.0
    """The time between two reads of the token file, in seconds."""
    open_metrics: bool = _option(False, "/metrics needs no token")
    open_docs: bool = _option(False, "/docs and /openapi.json need no token")
    lease_seconds: float = _option(30.0, "how long a lease holds without a heartbeat")
    max_queued: int = _bound(4_000_000, "unfinished rollouts")
    """The largest number of unfinished rollouts in all. Further ones are answered with 429."""
    max_queued_per_namespace: int = _bound(1_000_000, "those of one namespace")
    max_unread: int = _bound(100_000, "ended rollouts of a stream that nobody has read")
    """The largest number of ended rollouts of a stream that nobody has read. A stream with more of them takes
    no further tasks and targets."""
    max_claims: int = 40_000
    """The largest number of claims whose sandbox is not removed. Further ones are answered with 429."""
    max_claims_per_namespace: int = 10_000
    max_body_bytes: int = 64 << 20
    max_expiries: int = 10
    """The number of leases of a rollout that may expire. One more ends it as Failed/LeaseExpired."""
    no_backend_seconds: float = _option(
        3600.0, "how long rollouts of a job without a deadline wait while their pool has no ready backend"
    )
    """How long such rollouts wait in the Run queue, in seconds. Then they end as Failed/NoBackend."""
    max_unstored: int = _bound(10_000, "ended rollouts awaiting the trajectory store")
    """The number of ended rollouts that may wait for the trajectory store. Above it, completions answer
    507."""
    store_seconds: float = _bound(15.0, "how long a request waits for the trajectory store")
    """The time in seconds that a request waits for the trajectory store. Writing a part may take three
    times as long."""
    page_bytes: int = _bound(16 << 20, "bytes of a page of results, of a list, and of an answer with leases")
    """The largest size in bytes of a page of results, of a list, and of an answer with leases. A single
    item that is larger has a page to itself."""
    max_polls: int = _bound(4096, "long polls of trainers and drivers")
    """The largest number of simultaneous long polls of trainers and drivers. More are answered with 429."""
    max_polls_per_namespace: int = _bound(1024, "those of one namespace")
    max_worker_polls: int = _bound(32_768, "long polls of workers")
    """The largest number of simultaneous long polls of workers. More are answered with 429."""
    max_worker_polls_per_namespace: int = _bound(8192, "those of one namespace")
    max_streams: int = _bound(1024, "event streams")
    """The largest number of simultaneous event streams. More are answered with 429."""
    max_streams_per_namespace: int = _bound(256, "those of one namespace")
    max_pages: int = _bound(32, "pages of results in memory at the same time")
    """The largest number of pages of results that are in memory on their way to a client at the same time,
    from the trajectory store and from the database each. Further requests wait in order."""
    max_pages_per_namespace: int = _bound(8, "those of one namespace")
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
    """The age in seconds up to which one read of the fleet is given to all who look at it."""
    folding_seconds: float = 1.0
    """The time in seconds between two rounds in which ended rollouts are folded into statistics, the workers
    that were heard are written, and followers of the fleet get what has changed."""
    weights_seconds: float = 0.3
    """The time between two searches for backends whose weights are not the intended ones, in seconds."""
    weight_limits: UpdateLimits = field(default_factory=UpdateLimits)
    """The times that a server may take for each step of a weight update."""
    verify_python: str = ""
    """A Python with torch and transformers, for forward passes. The default is this one, if it has them."""
    recheck_seconds: float = 1.0
    """The longest sleep of a long poll, in seconds, where another replica may have made the change."""
    allow_tasks_from: tuple[str, ...] = _option(
        (),
        "what spec.tasks.url of jobs may name beside uploads, as file:///data/, https://host/path/ or "
        "s3://bucket/key/; '{namespace}' stands for the job's; may be given several times (default: nothing)",
        metavar="URL-PREFIX",
    )
    allow_tasks_networks: tuple[str, ...] = _option(
        (), _NETWORK, flag="--allow-tasks-network", metavar="CIDR"
    )
    allow_sandbox_hosts: tuple[str, ...] = _option(
        (),
        "what spec.sandbox.allowedHosts of jobs may name: a DNS name, '*.example.org' for all names "
        "below one, 'example.org:8443' for another port than 80 and 443, or '*' for every public host; "
        "'pypi.org=10.1.2.3' or 'pypi.org=10.1.0.0/16' lets the host have an address that is not public; may "
        "be given several times (default: nothing)",
        flag="--allow-sandbox-host",
        metavar="HOST",
    )
    allow_eval_hosts: tuple[str, ...] = _option(
        (),
        "what spec.stages.eval.allowedHosts of jobs may name, in the same form: hosts that hidden tests "
        "reach (default: nothing)",
        flag="--allow-eval-host",
        metavar="HOST",
    )
    allow_rewards_from: tuple[str, ...] = _option(
        (),
        "what spec.reward.service.url of jobs may name, as https://host/path/; '{namespace}' stands for "
        "the job's; may be given several times (default: nothing)",
        metavar="URL-PREFIX",
    )
    allow_rewards_networks: tuple[str, ...] = _option(
        (), _NETWORK, flag="--allow-rewards-network", metavar="CIDR"
    )
    traces: TraceOptions = field(default_factory=TraceOptions)
    """The receiver of traces, and which rollouts are traced. By default none is."""
    traces_asked: bool = False
    """Whether a flag asks for traces, and not only a variable that may be meant for other programs."""
    max_task_bytes: int = _option(task_reader.TaskFileLimits().file_bytes, "largest task file, unpacked")
    max_blob_bytes: int = _option(_UPLOADS.blob_bytes, "largest upload")
    max_namespace_blob_bytes: int = _option(_UPLOADS.namespace_bytes, "limit for all uploads of a namespace")
    max_namespace_blobs: int = _option(_UPLOADS.namespace_count, "uploads of a namespace")
    browsers: BrowserSettings = field(default_factory=BrowserSettings)
    """The addresses of the page, and the times that sessions last."""
    sqlite_max_pages: int = _option(0, "bound of the database file in pages; 0: none")
    """The largest size of the SQLite file in pages of 4 KiB. With 0, only the disk limits it."""

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
            ListEntryError: An entry cannot be used.
        """
        # Tokens, the database and the trajectories of other jobs are never the tasks of a job.
        kept = [self.state_dir]
        kept += [] if self.tokens_file is None else [self.tokens_file]
        kept += [] if "://" in self.trajectories_url else [Path(self.trajectories_url)]
        return AllowList.of(self.allow_tasks_from, self.allow_tasks_networks, kept)

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
            ListEntryError: An entry cannot be used.
        """
        return SandboxHosts.of(self.allow_sandbox_hosts, self.allow_eval_hosts)

    @property
    def reward_services(self) -> ServiceAllowList:
        """The reward services that jobs may name.

        Raises:
            ListEntryError: An entry cannot be used.
        """
        return ServiceAllowList.of(self.allow_rewards_from, self.allow_rewards_networks)

    @property
    def trajectories_url(self) -> str:
        """The URL of the trajectory store. By default it is a folder in the state folder."""
        return self.trajectories or str(self.state_dir.absolute() / "trajectories")


BOUNDS: Final = [each.name for each in fields(Settings) if "bound" in each.metadata]
"""The settings that bound what one namespace, or one client, may hold."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that are settings to a command line. Their values get the names of the settings."""
    bounds = parser.add_argument_group("bounds on what one namespace, or one client, may hold")
    for each in fields(Settings):
        if not each.metadata:
            continue
        options: dict[str, Any] = {"flag": f"--{each.name.replace('_', '-')}", **each.metadata}
        group = bounds if options.pop("bound", False) else parser
        if isinstance(each.default, bool):
            kind: dict[str, Any] = {"action": "store_true"}
        elif isinstance(each.default, tuple):
            kind = {"action": "append", "default": []}
        else:
            kind = {"type": type(each.default), "default": each.default}
            options["help"] += "" if isinstance(each.default, str | None) else " (default: %(default)s)"
        group.add_argument(options.pop("flag"), dest=each.name, **kind | options)
