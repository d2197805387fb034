"""Sandbox claims: a worker asks for a sandbox, and a driver that starts sandboxes elsewhere provides it.

On Kubernetes the sandbox is a pod that only the operator can create. A worker files a claim with
the control plane and waits. The operator binds it to a pod, and reports where the exec server listens.
The control plane releases a claim once no rollout needs it. The operator then deletes the pod and reports it,
and the claim is removed. Every step may be repeated.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from rollyard_crds.fields.quantity import parse_quantity
from rollyard_crds.names import RUNTIME_PATH
from rollyard_crds.rolloutjob import SandboxSpec
from rollyard_crds.task import EmptyFolder
from rollyard_crds.trajectory import Record

EXEC_PORT: Final = 7411
"""TCP port of the exec server in a sandbox pod."""
EXEC_LISTEN: Final = f"tcp://*:{EXEC_PORT}"
"""Its `--listen`: every address of the pod, IPv4 and IPv6."""
EXEC_SERVER_ARGV: Final[tuple[str, ...]] = (
    f"{RUNTIME_PATH}/loader",
    "--library-path",
    f"{RUNTIME_PATH}/libs",
    "--argv0",
    f"{RUNTIME_PATH}/venv/bin/python",
    f"{RUNTIME_PATH}/python/bin/python3",
    "-I",
    "-S",
    f"{RUNTIME_PATH}/exec-server.py",
)
"""Starts the exec server in any image; its options follow. It needs nothing from the image, not even a shell.

As in `(*EXEC_SERVER_ARGV, "--listen", EXEC_LISTEN, "--workdir", "/work", "--token-sha256", HEX)`.
"""
COPY_ARGV: Final[tuple[str, ...]] = (
    "/loader",
    "--library-path",
    "/libs",
    "/python/bin/python3",
    "-I",
    "-S",
    "/copy-runtime.py",
)
"""Run in the runtime's own image, it copies the runtime to the folder in the argument that follows.

For clusters without image volumes: an init container copies it to an empty volume, which the
sandbox mounts read-only at RUNTIME_PATH.
"""

ClaimState = Literal["Pending", "Bound", "Failed", "Released"]


class SandboxShape(Record):
    """The settings of a sandbox. Claims and warm sandboxes of one shape are interchangeable."""

    image: str = ""
    """Container image without `docker://`; empty: the installation's default."""
    cpu: float
    """Cores."""
    memory_bytes: int
    disk_bytes: int
    processes: int
    network: Literal["none"] = "none"
    """Every sandbox is started without a network. That of `network: allowlist` comes from its worker later,
    over the connection to the exec server."""
    folders: Annotated[list[EmptyFolder], Field(max_length=8)] = Field(default_factory=list)
    """Empty folders directly below /, in which programs can write."""


class ClaimRequest(Record):
    """A worker's request for one sandbox. The same rollout and token again make the same claim."""

    rollout: Annotated[str, Field(min_length=1, max_length=253)]
    token: Annotated[int, Field(ge=1)]
    """Fencing token of the Init or Eval lease in whose name it is filed."""
    shape: SandboxShape
    wait: Annotated[float, Field(ge=0, le=60)] = 0.0
    """Seconds to wait for it to be bound or refused."""


class Claim(Record):
    """One claim as workers and drivers read it."""

    id: str
    """Lower-case DNS label of at most 40 characters; the sandbox's id."""
    namespace: str
    job: str
    job_uid: str
    """The control plane's uid of the job; the driver knows the object by namespace and name."""
    rollout: str
    shape: SandboxShape
    state: ClaimState
    address: str = ""
    """Bound: `tcp://host:port` of the exec server."""
    secret: str = ""
    """Bound: the secret that the exec server requires. The server is started with its SHA-256 only.

    A server that has been shown the secret proves from then on that it knows it; handles of sandboxes then
    hold `proven.` and the secret, which must not begin with `proven.` itself.
    """
    reason: str = ""
    """Failed: a CamelCase word, such as `ImagePullFailed`, `QuotaExceeded`, `NotIsolated`."""
    message: str = ""
    retryable: bool = True
    """Failed: False where no other attempt can succeed."""
    age_seconds: float = 0.0
    """Seconds since it was filed."""


class ClaimStatus(Record):
    """The state of a claim, as its driver reports it. After `Removed` nothing of the sandbox is left."""

    state: Literal["Bound", "Failed", "Removed"]
    address: Annotated[str, Field(max_length=512)] = ""
    secret: Annotated[str, Field(max_length=128)] = ""
    reason: Annotated[str, Field(max_length=128)] = ""
    message: Annotated[str, Field(max_length=1024)] = ""
    retryable: bool = True


class WarmWant(Record):
    """Sandboxes of one shape that an unfinished job wants ready and unclaimed."""

    namespace: str
    job: str
    job_uid: str
    shape: SandboxShape
    count: int


class ClaimList(Record):
    """All claims that concern a driver, and the sandboxes to keep warm."""

    revision: int
    """Pass it with the next call, which then waits for a change."""
    claims: list[Claim]
    warm: list[WarmWant]


def shape_of(spec: SandboxSpec) -> SandboxShape:
    """Return the shape of a job's sandboxes, without what a single task changes."""
    resources = spec.resources
    return SandboxShape(
        image=(spec.image or "").removeprefix("docker://"),
        cpu=parse_quantity(resources.cpu),
        memory_bytes=int(parse_quantity(resources.memory)),
        disk_bytes=int(parse_quantity(resources.disk)),
        processes=resources.processes,
    )
