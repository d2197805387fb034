"""What every sandbox provider offers, and what is asked of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self

from rollyard_crds.fields.quantity import parse_quantity
from rollyard_crds.lease import LeaseRef, SandboxHandle
from rollyard_crds.rolloutjob import SandboxSpec
from rollyard_crds.task import TaskSandbox
from rollyard_sandbox.client import ExecClient


@dataclass(frozen=True, slots=True)
class SandboxKey:
    """What a sandbox must be started with: two requests of one key can share warm sandboxes."""

    image: str | None
    cpu: float
    """Cores."""
    memory_bytes: int
    """All memory of the sandbox, the files in its work folder and /tmp included."""
    disk_bytes: int
    """The size of the work folder; /tmp has the same again. Each is at most a third of the memory."""
    processes: int
    """Processes and threads at once."""
    network: Literal["none"] = "none"


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """A sandbox as one rollout wants it: `env` and `files` are applied when it is handed out."""

    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Path (relative to the work folder, or absolute) to text."""
    cpu: float = 1.0
    memory_bytes: int = 1 << 30
    disk_bytes: int = 1 << 28
    processes: int = 512
    network: Literal["none"] = "none"

    @property
    def key(self) -> SandboxKey:
        """What the warm pool is keyed by."""
        return SandboxKey(
            self.image, self.cpu, self.memory_bytes, self.disk_bytes, self.processes, self.network
        )

    @classmethod
    def of(cls, spec: SandboxSpec, task: TaskSandbox | None = None) -> SandboxRequest:
        """The request of a job's sandbox with what one task adds to it.

        Raises:
            ValueError: a quantity of the spec is malformed.
        """
        return cls(
            image=task.image if task is not None and task.image is not None else spec.image,
            env={**spec.env, **(task.env if task is not None else {})},
            files=dict(task.files) if task is not None else {},
            cpu=parse_quantity(spec.resources.cpu),
            memory_bytes=int(parse_quantity(spec.resources.memory)),
            disk_bytes=int(parse_quantity(spec.resources.disk)),
            processes=spec.resources.processes,
            network=spec.network,
        )


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A claimed sandbox and an open connection to its exec server."""

    handle: SandboxHandle
    client: ExecClient
    workdir: str
    """The work folder as programs inside see it."""
    env: Mapping[str, str]
    """The request's variables; those of `acquire` are already in force for every new session."""

    async def close(self) -> None:
        """Closes the connection; the sandbox lives on."""
        await self.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class SandboxProvider(Protocol):
    """Starts, hands out, finds again and removes the sandboxes of one node, or of a cluster.

    Several worker processes may share one run folder; each has a provider of its own. A
    claimed sandbox outlives the worker that started it: any other attaches to it.
    """

    @property
    def name(self) -> str:
        """The kind of its sandboxes, as handles carry it."""
        ...

    async def start(self) -> None:
        """Checks that sandboxes can be started here, then sweeps.

        Raises:
            BubblewrapMissing, UserNamespacesForbidden, RunDirUnusable: with what to do.
        """
        ...

    async def aclose(self) -> None:
        """Removes this provider's unclaimed sandboxes; claimed ones stay."""
        ...

    async def acquire(self, request: SandboxRequest, owner: LeaseRef, *, for_eval: bool = False) -> Sandbox:
        """A fresh sandbox for the rollout of the lease `owner`; a warm one where there is one.

        It takes as long as starting one takes: the caller bounds the wait. With `for_eval` it serves the one
        lease only: it is not among those of `claimed`, and it ends with this process if not released before.

        Raises:
            ImageNotUsable, SandboxStartFailed, SandboxImpossible, SandboxLost, DiskFull,
                NodeDiskFull, SandboxFileRefused.
        """
        ...

    async def attach(self, handle: SandboxHandle) -> Sandbox:
        """A connection to a sandbox that any worker of this node claimed.

        Raises:
            SandboxLost: it is gone, on another node, or does not answer.
        """
        ...

    async def release(self, handle: SandboxHandle | str) -> None:
        """Kills everything inside and removes its folder and limits; harmless when it is gone."""
        ...

    async def sweep(self) -> list[str]:
        """Removes dead sandboxes and unclaimed ones of dead workers; returns their ids."""
        ...

    def claimed(self) -> list[str]:
        """Ids of the claimed sandboxes that this node has to look after, whichever worker claimed them."""
        ...

    def in_use(self) -> list[str]:
        """Ids of `claimed` and of those acquired `for_eval`, whichever worker of the node did so."""
        ...

    def own(self) -> list[str]:
        """Return the ids of the claimed sandboxes that this provider's process started."""
        ...

    async def renew(self, ids: Collection[str], seconds: float) -> None:
        """Lets these sandboxes live for another `seconds`; those that are gone are passed over."""
        ...

    async def warm(self, request: SandboxRequest, count: int) -> None:
        """Keeps `count` unclaimed sandboxes of this request's key ready (0: none)."""
        ...

    def trouble(self) -> str:
        """Why no further sandbox can be started here just now (the disk is full); empty: nothing is wrong.

        It may ask the disk: call it in a thread.
        """
        ...

    async def oom_killed(self, handle: SandboxHandle | str) -> bool:
        """Whether the kernel has killed a process inside for want of memory."""
        ...
