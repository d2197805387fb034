"""The profile of a site: what every batch script asks Slurm for, and what it does first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from rollyard_crds.base import Model
from rollyard_crds.reading.manifest import describe

from rollyard_slurm.errors import ProfileInvalid
from rollyard_slurm.readers.command_output import duration_seconds
from rollyard_slurm.scripts import job_fields

SIGNAL_SECONDS = 90
"""The default for `signalSeconds`, into which a drain, a hand-over and the end of the sandboxes fit."""
Word = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\s]+$")]
Line = Annotated[str, Field(max_length=4096, pattern=r"^[^\n]*$")]
Words = Annotated[list[Word], Field(max_length=64)]
_OURS = (
    "--job-name", "-J", "--comment", "--output", "-o", "--error", "-e", "--signal",
    "--requeue", "--no-requeue",
    "--array", "-a", "--wrap", "--parsable", "--open-mode", "--time", "-t", "--nodes", "-N", "--ntasks", "-n",
    "--wait", "-W", "--test-only", "--hold", "-H",
)  # fmt: skip


class JobProfile(Model):
    """What one kind of job asks Slurm for; the site's own defaults apply to what is left out."""

    partition: Word | None = None
    """One partition, or several separated by commas, of which Slurm takes the one that starts first."""
    account: Word | None = None
    """The account that is charged."""
    qos: Word | None = None
    """The quality of service."""
    reservation: Word | None = None
    """The reservation to run in."""
    wckey: Word | None = None
    """The workload characterization key, for the site's accounts."""
    constraint: Line | None = None
    """The features of nodes, as sbatch takes them."""
    exclude: Word | None = None
    """The nodes to exclude."""
    time_limit: str | None = None
    """`MINUTES`, `HOURS:MINUTES:SECONDS` or `DAYS-HOURS:MINUTES:SECONDS`; default: the partition's."""
    cpus: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The CPUs of the job."""
    memory: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """The memory of the job, such as `8G`; 0: the node's whole memory. Sandboxes share that of the workers.
    The default is 2G, and the site's own for vLLM."""
    gres: Line | None = None
    """The generic resources; `{gpus}` stands for the number that a backend asks for."""
    exclusive: bool | None = None
    """Whether the job has its nodes for itself."""
    requeue: bool | None = None
    """Whether Slurm itself may restart a job after its node failed or it was preempted; default: true."""
    start: Literal["sbatch", "salloc"] | None = None
    """It has no effect: every job is submitted by sbatch. Profiles of earlier versions may hold it."""
    sbatch: Words = Field(default_factory=list)
    """Further options of sbatch, such as `--licenses=matlab:1`."""
    prolog: Annotated[list[Line], Field(max_length=64)] = Field(default_factory=list)
    """Shell lines before the program, such as `module load apptainer`."""
    env: Annotated[dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], Line], Field(max_length=128)] = (
        Field(default_factory=dict)
    )
    """The environment of the job; that of all jobs and that of its kind are joined."""
    python: Word | None = None
    """The Python with Rollyard on the nodes; default: the bridge's own."""
    signal_seconds: Annotated[int, Field(ge=5, le=3600)] | None = None
    """A job begins to drain this long before its time limit; Slurm may be 60 s early. Default: 90."""
    ahead_seconds: Annotated[int, Field(ge=10, le=86_400)] | None = None
    """A successor is submitted this long before the time limit; default: 600, at most half of the limit."""

    @field_validator("time_limit")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None and not duration_seconds(value):
            raise ValueError("must be MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS")
        return value

    @field_validator("sbatch")
    @classmethod
    def _not_ours(cls, value: list[str]) -> list[str]:
        for option in value:
            name = option.partition("=")[0]
            if not name.startswith("-"):
                raise ValueError(f"{option!r} is no option: write it as --name=value")
            if name in _OURS:
                raise ValueError(f"{name} is set by the bridge; leave it out")
        return value


class WorkersProfile(JobProfile):
    """What stage workers ask for."""

    run_dir: Annotated[str, Field(pattern=r"^/[^\s]*$", max_length=40)] = "/tmp"
    """The node-local folder for sandboxes' files and sockets; short, because sockets' paths are limited."""
    drain_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """A draining worker hands over the rollouts that it still holds after this time."""
    max_sandboxes: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The rollouts on a node that have a sandbox; default: a worker's places of Run and Eval and twice those
    of Init, so that the next ones are ready early."""


class BackendsProfile(JobProfile):
    """What inference backends ask for."""

    image: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """The SIF, folder or `docker://` image in which vLLM runs; default: the program on the node."""
    apptainer: Words = Field(default_factory=lambda: ["apptainer"])
    """The program for `image`, and its options before `exec`."""
    exec_options: Words = Field(default_factory=list)
    """The options of `exec`, such as `--bind=/models`; `--nv` is added where GPUs are asked for."""


class RestProfile(Model):
    """slurmrestd in place of Slurm's commands."""

    url: Annotated[str, Field(min_length=1, max_length=1024)]
    """`unix:/PATH`, `http://HOST:PORT` or `https://HOST:PORT`."""
    token_file: Annotated[str, Field(pattern=r"^/", max_length=4096)] | None = None
    """A file with a token (JWT) that only the user can read; not needed for a socket that knows its users."""
    version: Annotated[str, Field(pattern=r"^v0\.0\.\d+$")] | None = None
    """The version of its API; default: the newest known one of those that it has."""
    user: Word | None = None
    """The user of the token; default: the user of the bridge."""

    @field_validator("url")
    @classmethod
    def _reachable(cls, value: str) -> str:
        if re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", value):
            return value
        if not re.fullmatch(r"unix:/\S+", value):
            raise ValueError("must be unix:/PATH, http://HOST:PORT or https://HOST:PORT")
        if len(value.removeprefix("unix:").encode()) > 107:
            raise ValueError("the path of a socket has at most 107 bytes")
        return value

    @property
    def socket(self) -> Path | None:
        """The Unix socket; None: slurmrestd is reached by TCP."""
        return Path(self.url.removeprefix("unix:")) if self.url.startswith("unix:") else None


class SiteProfile(JobProfile):
    """A profile file: fields common to all jobs, and those of each kind."""

    rest: RestProfile | None = None
    """slurmrestd in place of Slurm's commands; default: the commands."""

    workers: WorkersProfile = Field(default_factory=WorkersProfile)
    backends: BackendsProfile = Field(default_factory=BackendsProfile)
    pass_env: Words = Field(default_factory=list)
    """The variables that Slurm's commands and the jobs inherit from the bridge's environment."""

    @model_validator(mode="after")
    def _drains_in_time(self) -> SiteProfile:
        seconds = self.workers.signal_seconds or self.signal_seconds or SIGNAL_SECONDS
        if self.workers.drain_seconds >= seconds:
            raise ValueError(
                f"workers.drainSeconds ({self.workers.drain_seconds}) must be less than signalSeconds "
                f"({seconds}): what a worker holds is handed over before the time limit"
            )
        return self

    @model_validator(mode="after")
    def _has_fields(self) -> SiteProfile:
        if self.rest is not None:
            for where, options in (
                ("sbatch", self.sbatch),
                ("workers.sbatch", self.workers.sbatch),
                ("backends.sbatch", self.backends.sbatch),
            ):
                try:
                    job_fields.sbatch_options(options)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from error
        return self

    @property
    def asks_for_salloc(self) -> bool:
        """Whether the profile holds `start: salloc`, which earlier versions understood."""
        return "salloc" in (self.start, self.workers.start, self.backends.start)

    def of(self, kind: str) -> JobProfile:
        """Returns the profile of one kind of job, whose own fields precede the common ones."""
        own = self.backends if kind == "backend" else self.workers
        joined: dict[str, Any] = {}
        for name in JobProfile.model_fields:
            mine, common = getattr(own, name), getattr(self, name)
            if name == "env":
                joined[name] = {**common, **mine}
            elif name in ("sbatch", "prolog"):
                joined[name] = [*common, *mine]
            else:
                joined[name] = common if mine is None else mine
        return JobProfile.model_validate(joined)


def load(path: Path | None, overrides: dict[str, Any] | None = None) -> SiteProfile:
    """Reads the profile in a YAML file; options of the command line override its fields.

    Raises:
        ProfileInvalid: The file cannot be read, or a field is wrong.
    """
    document: Any = {}
    if path is not None:
        try:
            document = yaml.safe_load(path.read_text()) or {}
        except OSError as error:
            raise ProfileInvalid(f"--profile {path}: cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            words = " ".join(str(error).split())
            raise ProfileInvalid(f"--profile {path}: no YAML: {words}") from error
        if not isinstance(document, dict):
            raise ProfileInvalid(f"--profile {path}: must be a mapping of fields")
    where = f"--profile {path}" if path is not None else "options"
    try:
        made = SiteProfile.model_validate(document)
        chosen = {name: value for name, value in (overrides or {}).items() if value is not None}
        if made.rest is not None and "rest" in chosen:
            chosen["rest"] = {**made.rest.model_dump(exclude_none=True), **chosen["rest"]}
        if chosen:
            # Options of the command line count for every kind of job.
            cleared = {name: None for name in chosen if name in JobProfile.model_fields}
            made = made.model_copy(
                update={
                    "workers": made.workers.model_copy(update=cleared),
                    "backends": made.backends.model_copy(update=cleared),
                }
            )
            made = SiteProfile.model_validate({**made.model_dump(), **chosen})
        return made
    except ValidationError as error:
        raise ProfileInvalid(f"{where}: " + "; ".join(describe(error, model=SiteProfile))) from error
