"""The interface of every sandbox provider, and the requests that it receives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Protocol, Self

from rollyard_crds.fields.quantity import parse_quantity
from rollyard_crds.lease import LeaseRef, SandboxHandle
from rollyard_crds.rolloutjob import SandboxSpec
from rollyard_crds.task import TaskSandbox
from rollyard_sandbox.client import ExecClient


@dataclass(frozen=True, slots=True)
class BuildFolder:
    """The folder of a Dockerfile, from which an image is built where there is none of its name."""

    files: Mapping[str, tuple[bytes, int]]
    """Content and mode by path. No path is absolute or has the part `..`."""
    bases: Mapping[str, str]
    """What the job has in place of images that Dockerfiles name."""


@dataclass(frozen=True, slots=True)
class SandboxKey:
    """The properties with which a sandbox must be started.

    Requests of the same key can share warm sandboxes.
    """

    image: str | None = None
    cpu: float = 1.0
    """The number of CPU cores."""
    memory_bytes: int = 1 << 30
    """All memory of the sandbox in bytes, including the files in its work folder and /tmp."""
    disk_bytes: int = 1 << 28
    """The size of the work folder in bytes, and also that of /tmp. Each is at most a third of the memory."""
    processes: int = 512
    """The number of processes and threads that may exist at once."""
    folders: tuple[str, ...] = ()
    """Empty folders directly below /, in which programs can write. Each may grow to `disk_bytes`."""
    build: BuildFolder | None = field(default=None, compare=False, repr=False)
    """What the image can be built from. Its name stands for the content, so it is not part of the key."""


@dataclass(frozen=True, slots=True)
class SandboxRequest(SandboxKey):
    """The sandbox that one rollout needs. `env` and `files` are applied when it is handed out.

    Every sandbox is started without a network (see `sandboxes.egress`).
    """

    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """The text of each file by its path, which is absolute or relative to the work folder."""

    @property
    def key(self) -> SandboxKey:
        """Return the key of the warm pool for this request."""
        return SandboxKey(**{each.name: getattr(self, each.name) for each in fields(SandboxKey)})

    @classmethod
    def of(
        cls,
        spec: SandboxSpec,
        task: TaskSandbox | None = None,
        dockerfile: Callable[[str], Mapping[str, tuple[bytes, int]] | None] = lambda image: None,
    ) -> SandboxRequest:
        """Return the request for a job's sandbox with what one task adds to it.

        Args:
            spec: The job's sandbox.
            task: What the task adds.
            dockerfile: Returns the folder of the Dockerfile from which the task's image can be built.

        Raises:
            ValueError: A quantity of the spec is malformed.
        """
        image, build = spec.image, None
        if task is not None and task.image is not None:
            name, images = task.image.removeprefix("docker://"), spec.images or {}
            image = images.get(name, images.get(f"docker://{name}", task.image))
            if image == task.image and (files := dockerfile(image)) is not None:
                build = BuildFolder(files, images)
        return cls(
            image=image,
            env={**spec.env, **(task.env if task is not None else {})},
            files=dict(task.files) if task is not None else {},
            cpu=parse_quantity(spec.resources.cpu),
            memory_bytes=int(parse_quantity(spec.resources.memory)),
            disk_bytes=int(parse_quantity(spec.resources.disk)),
            processes=spec.resources.processes,
            folders=tuple(sorted(set(task.folders or ()))) if task is not None else (),
            build=build,
        )


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A claimed sandbox and an open connection to its exec server."""

    handle: SandboxHandle
    client: ExecClient
    workdir: str
    """The path of the work folder as programs inside see it."""
    env: Mapping[str, str]
    """The request's variables. Those of `acquire` already apply to every new session."""

    async def close(self) -> None:
        """Close the connection. The sandbox itself continues to run."""
        await self.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class SandboxProvider(Protocol):
    """Starts, hands out, finds and removes the sandboxes of one node or of a cluster.

    Several worker processes may share one run folder, and each has its own provider. A claimed sandbox
    outlives the worker that started it, and any other worker can attach to it. By default a provider does
    nothing by itself, because somebody else keeps and removes its sandboxes.
    """

    @property
    def name(self) -> str:
        """Return the kind of the provider's sandboxes, which handles carry."""

    @property
    def fetches(self) -> bool:
        """Return whether `fetch` saves time, because images come from elsewhere."""
        return False

    async def start(self) -> None:
        """Check that sandboxes can be started here, then sweep.

        Raises:
            NodeUnusable: Sandboxes cannot be started. The message says what to do.
        """
        return

    def drain(self) -> None:
        """Learn that this worker is to end. What ends it may end its sandboxes as well; see `own_end`."""
        return

    async def aclose(self) -> None:
        """Remove this provider's unclaimed sandboxes. Claimed ones stay."""
        return

    async def acquire(self, request: SandboxRequest, owner: LeaseRef, *, for_eval: bool = False) -> Sandbox:
        """Return a fresh sandbox for the rollout of the lease `owner`, a warm one if there is one.

        A start can take long, so the caller bounds the wait. With `for_eval` the sandbox serves only this
        lease: it is not listed by `claimed`, and it ends with this process unless it is released earlier.

        Raises:
            ImageNotUsable, SandboxStartFailed, SandboxImpossible, SandboxLost, DiskFull, NodeDiskFull:
                The sandbox could not be started or prepared.
        """

    async def attach(self, handle: SandboxHandle) -> Sandbox:
        """Return a connection to a sandbox that any worker of this node has claimed.

        Raises:
            SandboxLost: The sandbox is gone, is on another node, or does not answer.
        """

    async def release(self, handle: SandboxHandle | str) -> None:
        """Kill everything inside and remove its folder and limits. A sandbox that is gone is not an error."""

    async def sweep(self) -> list[str]:
        """Remove dead sandboxes and the unclaimed ones of dead workers, and return their ids."""
        return []

    def claimed(self) -> list[str]:
        """Return the ids of the claimed sandboxes that this node maintains, whichever worker claimed them."""
        return []

    def in_use(self) -> list[str]:
        """Return the ids of `claimed` and of sandboxes acquired with `for_eval` by any worker of the node."""
        return []

    def own(self) -> list[str]:
        """Return the ids of the claimed sandboxes that this provider's process started."""
        return []

    async def renew(self, ids: Collection[str], seconds: float) -> None:
        """Let these sandboxes live for another `seconds`. Sandboxes that are gone are skipped."""
        return

    async def warm(self, request: SandboxRequest, count: int) -> None:
        """Keep `count` unclaimed sandboxes of this request's key ready. A count of 0 keeps none.

        A provider whose sandboxes start at once keeps none.
        """
        return

    async def fetch(self, request: SandboxRequest) -> bool:
        """Bring the image of a request to this node before a sandbox needs it. Return whether there was room.

        Raises:
            ImageNotUsable, SandboxStartFailed, DiskFull: The image cannot be had, or not this time.
        """
        return True

    def trouble(self) -> str:
        """Return why no further sandbox can be started now (the disk is full), or "" if nothing is wrong.

        The method may test the disk and should be called in a thread.
        """
        return ""

    async def oom_killed(self, handle: SandboxHandle | str) -> bool:
        """Return whether the kernel has killed a process inside because memory ran out."""

    async def own_end(self, handle: SandboxHandle | str) -> str:
        """Return why a lost sandbox has ended by itself: `SandboxOutOfMemory`, `SandboxCrashed` or "".

        It is "" for a sandbox that was taken away: it was released, or went with its node, worker or lease.
        While the worker drains, a crash cannot be distinguished from that.
        """
