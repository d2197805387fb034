"""The profile of a site, which says what each batch script asks Slurm for.

It also holds the shell lines that run before the program.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from rollyard_crds.base import Model
from rollyard_crds.reading.manifest import describe

from rollyard_slurm.errors import BridgeError
from rollyard_slurm.readers.command_output import duration_seconds
from rollyard_slurm.scripts import job_fields

SIGNAL_SECONDS: Final = 90
"""The default of `signalSeconds`. A drain, a hand-over and the end of the sandboxes fit into this time."""
Word = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\s\x00-\x1f\x7f]+$")]
Line = Annotated[str, Field(max_length=4096, pattern=r"^[^\n\x00]*$")]
Variable = Annotated[str, Field(max_length=1024, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Words = Annotated[list[Word], Field(max_length=64)]
_OURS: Final = (
    *("--job-name", "-J", "--comment", "--output", "-o", "--error", "-e", "--signal"),
    *("--requeue", "--no-requeue", "--array", "-a", "--wrap", "--parsable", "--open-mode"),
    *("--time", "-t", "--nodes", "-N", "--ntasks", "-n"),
    *("--wait", "-W", "--test-only", "--hold", "-H"),
)


class JobProfile(Model):
    """The resources and options that one kind of job asks Slurm for.

    The defaults of the site apply to each field that is left out.
    """

    partition: Word | None = None
    """One or several partitions, separated by commas. Slurm takes the one in which the job starts first."""
    account: Word | None = None
    """The account to which Slurm charges the job."""
    qos: Word | None = None
    """The quality of service (QOS) of the job."""
    reservation: Word | None = None
    """The reservation in which the job runs."""
    wckey: Word | None = None
    """The workload characterization key (wckey), which the accounting of the site uses."""
    constraint: Line | None = None
    """The features that nodes must have, in the syntax of sbatch's `--constraint`."""
    exclude: Word | None = None
    """The nodes on which the job must not run."""
    time_limit: str | None = None
    """The time limit as `MINUTES`, `HOURS:MINUTES:SECONDS` or `DAYS-HOURS:MINUTES:SECONDS`.

    The default is the time limit of the partition.
    """
    cpus: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The number of CPUs of the job."""
    memory: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """The memory of the job, such as `8G`. The value 0 means the whole memory of the node.

    Sandboxes share the memory of their worker. The default is 2G, and for vLLM the default of the site.
    """
    gres: Line | None = None
    """The generic resources. `{gpus}` stands for the number of GPUs that a backend asks for."""
    exclusive: bool | None = None
    """Whether no other job may run on the nodes of the job."""
    requeue: bool | None = None
    """Whether Slurm may restart the job after its node failed or it was preempted. The default is true."""
    sbatch: Words = Field(default_factory=list)
    """Further options of sbatch, such as `--licenses=matlab:1`."""
    prolog: Annotated[list[Line], Field(max_length=64)] = Field(default_factory=list)
    """The shell lines that run before the program, such as `module load apptainer`."""
    env: Annotated[dict[Variable, Line], Field(max_length=128)] = Field(default_factory=dict)
    """The environment of the job. The variables for all jobs and those for its kind are joined."""
    python: Word | None = None
    """The Python on the nodes that has Rollyard installed. The default is the bridge's own Python."""
    signal_seconds: Annotated[int, Field(ge=5, le=3600)] | None = None
    """How many seconds before its time limit a job begins to drain. Slurm may be 60 s early.

    The default is 90.
    """
    ahead_seconds: Annotated[int, Field(ge=10, le=86_400)] | None = None
    """How many seconds before the time limit of a job its successor is submitted.

    The default is 600. The time is never more than half of the time limit.
    """

    @field_validator("time_limit")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        """Check that the time limit can be read."""
        if value is not None and not duration_seconds(value):
            raise ValueError("must be MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS")
        return value

    @field_validator("env")
    @classmethod
    def _no_token(cls, value: dict[str, str]) -> dict[str, str]:
        """Check that no token of the hub becomes part of batch scripts."""
        for name in value:
            if name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
                raise ValueError(
                    f"{name} would stand in every batch script; set it for the bridge, or write the token "
                    "into the file `token` in HF_HOME, as `hf auth login` does"
                )
        return value

    @field_validator("sbatch")
    @classmethod
    def _not_ours(cls, value: list[str]) -> list[str]:
        """Check that the options are not among those that the bridge itself sets."""
        for option in value:
            name = option.partition("=")[0]
            if not name.startswith("-"):
                raise ValueError(f"{option!r} is not an option: write it as --name=value")
            if name in _OURS:
                raise ValueError(f"{name} is set by the bridge; leave it out")
        return value


class WorkersProfile(JobProfile):
    """The resources and options that the jobs of stage workers ask Slurm for."""

    run_dir: Annotated[str, Field(pattern=r"^/[^\s]*$", max_length=40)] = "/tmp"
    """The node-local folder for the files and sockets of sandboxes.

    It must be short, because the length of a socket's path is limited.
    """
    drain_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """The time after which a draining worker hands over the rollouts that it still holds, in seconds."""
    max_sandboxes: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The number of rollouts on a node that may have a sandbox at the same time.

    The default is a worker's places for Run and Eval and twice its places for Init. With this number, the
    next sandboxes are ready early.
    """
    ready: Annotated[int, Field(ge=0, le=100)] = 0
    """The number of workers that stand ready as Slurm jobs of their own until a new RolloutJob takes them.

    They stand in each namespace that the bridge names, or else in the namespace `default`.
    """


class BackendsProfile(JobProfile):
    """The resources and options that the jobs of inference backends ask Slurm for."""

    image: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """The SIF, folder or `docker://` image in which vLLM runs. By default, vLLM runs directly on the node."""
    apptainer: Words = Field(default_factory=lambda: ["apptainer"])
    """The program that runs `image`, and its options before `exec`."""
    exec_options: Words = Field(default_factory=list)
    """The options of `exec`, such as `--bind=/models`. `--nv` is added if the backend asks for GPUs."""


class RestProfile(Model):
    """The address and the credentials of a slurmrestd, which is used in place of Slurm's commands."""

    url: Annotated[str, Field(min_length=1, max_length=1024)]
    """The URL of slurmrestd: `unix:/PATH`, `http://HOST:PORT` or `https://HOST:PORT`."""
    token_file: Annotated[str, Field(pattern=r"^/", max_length=4096)] | None = None
    """A file with a token (JWT), which only the user may be able to read.

    A socket that knows its users needs no token.
    """
    version: Annotated[str, Field(pattern=r"^v0\.0\.\d+$")] | None = None
    """The version of its API. The default is the newest version that both slurmrestd and the bridge know."""
    user: Word | None = None
    """The user of the token. The default is the user of the bridge."""

    @field_validator("url")
    @classmethod
    def _reachable(cls, value: str) -> str:
        """Check the form of the URL, and the length of the path of a socket."""
        if re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", value):
            return value
        if not re.fullmatch(r"unix:/\S+", value):
            raise ValueError("must be unix:/PATH, http://HOST:PORT or https://HOST:PORT")
        if len(value.removeprefix("unix:").encode()) > 107:
            raise ValueError("the path of a socket has at most 107 bytes")
        return value

    @property
    def socket(self) -> Path | None:
        """The path of the Unix socket, or None if slurmrestd is reached by TCP."""
        return Path(self.url.removeprefix("unix:")) if self.url.startswith("unix:") else None


class SiteProfile(JobProfile):
    """The content of a profile file: fields that are common to all jobs, and fields for each kind of job."""

    rest: RestProfile | None = None
    """The slurmrestd to use. By default, the bridge uses Slurm's commands."""

    workers: WorkersProfile = Field(default_factory=WorkersProfile)
    backends: BackendsProfile = Field(default_factory=BackendsProfile)
    pass_env: Words = Field(default_factory=list)
    """The variables that Slurm's commands and the jobs inherit from the bridge's environment."""

    @model_validator(mode="after")
    def _drains_in_time(self) -> SiteProfile:
        """Check that a worker can drain between the signal and its time limit."""
        seconds = self.workers.signal_seconds or self.signal_seconds or SIGNAL_SECONDS
        if self.workers.drain_seconds >= seconds:
            raise ValueError(
                f"workers.drainSeconds ({self.workers.drain_seconds}) must be less than signalSeconds "
                f"({seconds}): what a worker holds is handed over before the time limit"
            )
        return self

    @model_validator(mode="after")
    def _has_fields(self) -> SiteProfile:
        """Check that slurmrestd, if it is used, has fields for all options of sbatch."""
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

    def of(self, kind: str) -> JobProfile:
        """Return the profile of one kind of job. Its own fields take precedence over the common ones."""
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
    """Read a profile from a YAML file.

    Args:
        path: The file, or None for a profile without fields.
        overrides: Fields from the command line, which override those of the file.

    Raises:
        BridgeError: The file cannot be read, or a field has an invalid value.
    """
    document: Any = {}
    if path is not None:
        try:
            document = yaml.safe_load(path.read_text()) or {}
        except OSError as error:
            raise BridgeError(
                f"--profile {path}: cannot be read: {error.strerror}", reason="ProfileInvalid"
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            words = " ".join(str(error).split())
            raise BridgeError(f"--profile {path}: is not YAML: {words}", reason="ProfileInvalid") from error
        if not isinstance(document, dict):
            raise BridgeError(f"--profile {path}: must be a mapping of fields", reason="ProfileInvalid")
    where = f"--profile {path}" if path is not None else "options"
    try:
        profile = SiteProfile.model_validate(document)
        chosen = {name: value for name, value in (overrides or {}).items() if value is not None}
        if profile.rest is not None and "rest" in chosen:
            chosen["rest"] = {**profile.rest.model_dump(exclude_none=True), **chosen["rest"]}
        if chosen:
            # Options of the command line apply to every kind of job.
            cleared = {name: None for name in chosen if name in JobProfile.model_fields}
            profile = profile.model_copy(
                update={
                    "workers": profile.workers.model_copy(update=cleared),
                    "backends": profile.backends.model_copy(update=cleared),
                }
            )
            profile = SiteProfile.model_validate({**profile.model_dump(), **chosen})
        return profile
    except ValidationError as error:
        raise BridgeError(
            f"{where}: " + "; ".join(describe(error, model=SiteProfile)), reason="ProfileInvalid"
        ) from error
