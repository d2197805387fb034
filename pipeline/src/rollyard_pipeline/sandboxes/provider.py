"""The provider of one node, which claims, attaches, releases and sweeps sandboxes of one kind.

Its warm pool starts sandboxes before they are needed, keyed by the properties of their start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from rollyard_crds.lease import LeaseRef, SandboxHandle
from rollyard_crds.names import NODE, PROVIDER
from rollyard_process.backoff import Backoff
from rollyard_process.telemetry.scope import outside
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import SandboxError as ExecError

from rollyard_pipeline.control_plane.calls import WorkerCalls
from rollyard_pipeline.sabotage import CRASHED, OUT_OF_MEMORY
from rollyard_pipeline.sandboxes.allowed_images import ANY, AllowedImages
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions, ApptainerStarter
from rollyard_pipeline.sandboxes.claims import ClaimProvider
from rollyard_pipeline.sandboxes.connection import apply, connect
from rollyard_pipeline.sandboxes.containers.engine import KINDS
from rollyard_pipeline.sandboxes.containers.starter import ContainerStarter
from rollyard_pipeline.sandboxes.errors import (
    DiskFull,
    ImageNotUsable,
    NodeDiskFull,
    SandboxImpossible,
    SandboxLost,
    SandboxProviderError,
    SandboxStartFailed,
)
from rollyard_pipeline.sandboxes.host import cgroups
from rollyard_pipeline.sandboxes.host.disk_room import DiskRefuses, DiskRoom, is_full
from rollyard_pipeline.sandboxes.host.processes import ends, this_process
from rollyard_pipeline.sandboxes.host.records import Death, SandboxFolder, SandboxRecord
from rollyard_pipeline.sandboxes.host.threads import in_thread
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxKey, SandboxProvider, SandboxRequest
from rollyard_pipeline.sandboxes.starters.bare_process import WARNING, ProcessStarter
from rollyard_pipeline.sandboxes.starters.base import LEASE_SECONDS, Starter, limits_of
from rollyard_pipeline.sandboxes.starters.bubblewrap import BubblewrapStarter

_START_AGAIN: Final = Backoff(first=1.0, longest=30.0)


log = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 30.0
RELEASE_SECONDS: Final = 15.0
CONNECT_SECONDS: Final = 5.0
_RENEW_AT_ONCE: Final = 16
_END_SECONDS: Final = 5.0
"""The time that a process of a lost connection gets to end. Process 1 ends after all others inside."""


Claimed = Callable[[SandboxRecord], SandboxRecord]
"""Returns the record of a sandbox with the rollout that has claimed it."""
_NO_GROUPS: Final = (
    "no writable control groups for %s: as root the limit on processes does not bind, and memory is limited "
    "per process only; give this container its own writable cgroups, or run as another user"
)
PROVIDERS: Final = ("bubblewrap", "apptainer", *KINDS, "process", PROVIDER)


class NodeProvider(SandboxProvider):
    """A SandboxProvider over one kind of sandbox (see `interface.SandboxProvider`).

    Args:
        folder: The run folder's sandboxes, which the provider shares with the other workers of the node.
        starter: Starts and kills sandboxes of this kind.
        places: The places where control groups can be made. It is empty if there are none.
        starts_at_once: The number of sandboxes that may start at the same time, including refills of the warm
            pool.
        warnings: What the log is to say when the provider is started.
    """

    def __init__(
        self,
        folder: SandboxFolder,
        node: str,
        starter: Starter,
        places: Sequence[cgroups.CgroupPlace],
        starts_at_once: int,
        warnings: Sequence[str] = (),
        images: AllowedImages | None = None,
    ) -> None:
        self._images = images or AllowedImages([ANY])
        self._folder = folder
        self._node = node
        self._starter = starter
        self._places = tuple(places)
        self._starts = asyncio.Semaphore(starts_at_once)
        self._worker = this_process()
        self._room = DiskRoom(folder.path)
        self._warm = WarmPool(self._start_warm, self._remove_warm)
        self._tasks: set[asyncio.Task[None]] = set()
        self._probed = False
        self._draining = False
        self._warnings = tuple(warnings)
        self._leases: dict[str, float] = {}
        """When the leases that this process has renewed end, by the monotonic clock."""

    @property
    def name(self) -> str:
        """Return the name of the kind that the starter starts."""
        return self._starter.name

    @property
    def fetches(self) -> bool:
        """Return whether images come from elsewhere, so that bringing them early saves time."""
        return self._starter.fetches

    async def stand_ready(self) -> None:
        """Do the slow part of `start` in advance. Nothing runs in the background yet.

        Raises:
            NodeUnusable, SandboxStartFailed: Sandboxes cannot be started.
        """
        await in_thread(self._folder.prepare)
        await self._starter.probe()
        self._probed = True
        await self._starter.stand_ready()

    async def start(self) -> None:
        """Prepare the run folder, check that sandboxes can be started, and sweep."""
        await in_thread(self._folder.prepare)
        if not self._probed:
            await self._starter.probe()
            self._probed = True
        for warning in self._warnings:
            log.warning("%s", warning)
        await self.sweep()
        self._tasks.add(asyncio.create_task(self._housekeeping(), name="sandbox-housekeeping"))

    def drain(self) -> None:
        """Take no lost sandbox for a crashed one from now on.

        Slurm and systemd signal all processes of a job, and those of its sandboxes may end first.
        """
        self._draining = True

    async def aclose(self) -> None:
        """Remove this provider's unclaimed sandboxes, and its control groups if nothing uses them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        try:
            await self._warm.aclose()
        finally:
            await in_thread(self._remove_own)
            self._starter.close()
            await in_thread(cgroups.remove_places, self._places)

    async def acquire(self, request: SandboxRequest, owner: LeaseRef, *, for_eval: bool = False) -> Sandbox:
        """Hand out a warm sandbox of the request's key, or start one."""
        self._check(request)
        claimed = partial(_claimed, request=request, owner=owner.rollout, for_eval=for_eval)
        try:
            while (warm := self._warm.take(request.key) or await self._warm.next(request.key)) is not None:
                try:
                    return await self._claim(warm, request, claimed)
                except SandboxLost as error:
                    log.warning("a warm sandbox was lost: %s", error)
        finally:
            self._warm.refill(request.key)
        return await self._claim(await self._start_warm(request.key, claimed), request, claimed)

    def _check(self, request: SandboxRequest) -> None:
        """Check the request's image: first that it may be used, so nobody learns more about other images.

        Raises:
            SandboxImpossible, ImageNotUsable: It may not, or it cannot be started.
        """
        # What a Dockerfile is built from is known when it has been translated, and checked there.
        if request.build is None:
            self._images.check(self._starter.listed_name(request.image))
        self._starter.check(request.key)

    async def attach(self, handle: SandboxHandle) -> Sandbox:
        """Connect to a sandbox that any worker of this node has claimed."""
        if handle.node != self._node or handle.provider != self.name:
            raise SandboxLost(
                f"sandbox {handle.id} is a {handle.provider} sandbox of node {handle.node!r}; "
                f"this worker has {self.name} sandboxes on {self._node!r}"
            )
        record = self._folder.load(handle.id)
        if record is None or not record.alive():
            raise SandboxLost(f"sandbox {handle.id} is gone from node {self._node!r}")
        client = await self._connect(record)
        return Sandbox(handle, client, record.workdir, record.env)

    async def release(self, handle: SandboxHandle | str) -> None:
        """Kill everything inside, and remove the sandbox's folder and limits."""
        sandbox_id = handle if isinstance(handle, str) else handle.id
        await in_thread(self._remove, sandbox_id)

    async def sweep(self) -> list[str]:
        """Remove what dead sandboxes and dead workers have left, and return the ids."""
        return await in_thread(self._sweep)

    def claimed(self) -> list[str]:
        """Return the ids of the claimed sandboxes that are alive. This reads the run folder."""
        return [record.id for record in self._records() if record.state == "claimed"]

    def in_use(self) -> list[str]:
        """Return the ids of all sandboxes that have an owner. This reads the run folder."""
        return [record.id for record in self._records() if record.owner is not None]

    def own(self) -> list[str]:
        """Return the ids of the claimed sandboxes that this process started. This reads the run folder."""
        return [
            record.id
            for record in self._records()
            if record.state == "claimed" and record.worker == self._worker
        ]

    def _records(self) -> Iterator[SandboxRecord]:
        for sandbox_id in self._folder.ids():
            record = self._folder.load(sandbox_id)
            if record is not None and record.alive():
                yield record

    async def renew(self, ids: Collection[str], seconds: float) -> None:
        """Renew the leases of sandboxes. Those that do not answer are logged and skipped."""
        at_once = asyncio.Semaphore(_RENEW_AT_ONCE)

        async def renew_one(sandbox_id: str) -> None:
            async with at_once:
                record = self._folder.load(sandbox_id)
                if record is None:
                    return
                try:
                    client = await self._connect(record, seconds)
                    await client.close()
                except (SandboxLost, ExecError) as error:
                    log.warning("sandbox %s could not be renewed: %s", sandbox_id, error)

        async with asyncio.TaskGroup() as group:
            for sandbox_id in ids:
                group.create_task(renew_one(sandbox_id))

    async def warm(self, request: SandboxRequest, count: int) -> None:
        """Keep `count` sandboxes of the request's key ready in the background, or none if they start fast."""
        self._check(request)
        if self._starter.starts_ahead:
            self._warm.want(request.key, count)

    async def fetch(self, request: SandboxRequest) -> bool:
        """Bring the image of a request to this node before a sandbox needs it, if there is room for it."""
        self._check(request)
        return await self._starter.fetch(request.key)

    def trouble(self) -> str:
        """Return why no sandbox can be started now, or "". This may test the disk."""
        trouble = self._room.trouble()
        return f"node {self._node} starts no sandboxes: {trouble}" if trouble else ""

    async def oom_killed(self, handle: SandboxHandle | str) -> bool:
        """Return whether the kernel killed a process inside for lack of memory.

        The sandbox's control groups report it, and after its removal by a sweep the run folder.
        """
        sandbox_id = handle if isinstance(handle, str) else handle.id
        record = self._folder.load(sandbox_id)
        if record is None:
            return await in_thread(self._folder.died_of, sandbox_id, "oom")
        return await in_thread(self._starter.oom_killed, record)

    async def own_end(self, handle: SandboxHandle | str) -> str:
        """Return why a lost sandbox has ended by itself; see `interface.SandboxProvider.own_end`.

        A crash of an exec server is inferred from what did not happen: its process has ended, but it was not
        removed, its lease has not ended, the worker that started it has not ended, and this worker is not
        about to end.
        """
        if await self.oom_killed(handle):
            return OUT_OF_MEMORY
        sandbox_id = handle if isinstance(handle, str) else handle.id
        record = self._folder.load(sandbox_id)
        crashed = record is not None and await in_thread(self._crashed, record, _END_SECONDS)
        # A sweep may have removed it, also in the meantime.
        crashed = crashed or await in_thread(self._folder.died_of, sandbox_id, "crash")
        return CRASHED if crashed else ""

    def _crashed(self, record: SandboxRecord, seconds: float) -> bool:
        """Return whether an exec server has ended by itself, or does so within `seconds`. This blocks."""
        if record.root is None or record.owner is None or not self._is_leased(record.id):
            return False
        if not ends(record.root, seconds) or not record.worker.alive():
            return False
        if self._draining or not self._is_leased(record.id) or self._starter.taken_away(record):
            return False
        log.error(
            "the exec server of sandbox %s has ended by itself: this is a bug, please report it", record.id
        )
        return True

    def _is_leased(self, sandbox_id: str) -> bool:
        return time.monotonic() < self._leases.get(sandbox_id, 0.0)

    async def _start_warm(self, key: SandboxKey, claimed: Claimed | None = None) -> WarmSandbox:
        """Start a sandbox and connect to it. After a failure nothing of it is left.

        Args:
            key: What it is started with.
            claimed: Returns the record of a sandbox that is started for a rollout. None is for the warm pool.

        Raises:
            NodeDiskFull: There was no room for the sandbox. `trouble` reports this until there is room.
        """
        try:
            warm = await self._start(key, claimed)
        except DiskRefuses:
            raise
        except (DiskFull, ImageNotUsable, SandboxStartFailed, OSError) as error:
            # The disk is always tested, because an error about a full disk may concern the sandbox's own
            # disk, and many programs do not mention a full disk at all.
            if isinstance(error, NodeDiskFull) or is_full(error):
                await in_thread(self._room.failed, str(error))
            elif not await in_thread(self._room.full):
                raise
            if isinstance(error, NodeDiskFull):
                raise
            raise NodeDiskFull(f"no room left on the disk of node {self._node!r}: {error}") from error
        self._room.worked()
        return warm

    async def _start(self, key: SandboxKey, claimed: Claimed | None) -> WarmSandbox:
        await self._starter.prepare(key)
        async with self._starts:
            # The time is taken before the test, so no sandbox created after the disk is known to be full is
            # started.
            created = time.time()
            if full := await in_thread(self._room.look):
                # The little room that is left would allow a start, but running sandboxes would then lack it.
                raise DiskRefuses(full)
            sandbox_id = self._folder.new_id()
            groups = cgroups.group_paths(self._places, sandbox_id)
            record = SandboxRecord(
                id=sandbox_id,
                provider=self.name,
                state="starting",
                worker=self._worker,
                created=created,
                cgroups=tuple(str(path) for path in groups),
                workdir=self._starter.workdir(self._folder.folder(sandbox_id)),
                secret=self._folder.new_secret(),
            )
            secret = bytes.fromhex(record.secret)
            try:
                await in_thread(self._make_folder, record, key)
                started = await self._starter.start(key, self._folder.folder(sandbox_id), groups, secret)
                record = replace(
                    record,
                    state="warm",
                    root=started.root,
                    monitor=started.monitor,
                    helpers=started.helpers,
                    cgroups=(*record.cgroups, *map(str, started.cgroups)),
                )
                if claimed is not None:
                    record = claimed(record)
                self._folder.save(record)
                client = await self._connect(record)
            except BaseException as error:
                # The removal uses the record in memory, because on a full disk the file may hold an older
                # one.
                await in_thread(self._remove, sandbox_id, record if record.root is not None else None)
                if isinstance(error, SandboxLost):
                    raise SandboxStartFailed(f"the exec server ended at once: {error}") from error
                raise
            return WarmSandbox(record, client)

    def _make_folder(self, record: SandboxRecord, key: SandboxKey) -> None:
        """Make a sandbox's folder and control groups. This blocks."""
        self._folder.create(record)
        try:
            cgroups.create(self._places, record.id, limits_of(key))
        except OSError as error:
            raise SandboxImpossible(
                f"limits cpu={key.cpu:g}, memory={key.memory_bytes} bytes, processes={key.processes} "
                f"cannot be set by control groups: {error}",
                "ResourceLimitsUnavailable",
            ) from error

    async def _claim(self, warm: WarmSandbox, request: SandboxRequest, claimed: Claimed) -> Sandbox:
        record = claimed(warm.record)
        try:
            # One that was started for this rollout was claimed then, and its lease has just begun.
            waited = record != warm.record
            ends_at = time.monotonic() + LEASE_SECONDS
            await apply(warm.client, record.workdir, request, LEASE_SECONDS if waited else None)
            if waited:
                self._leases[record.id] = ends_at
                self._folder.save(record)
        except FileNotFoundError as error:
            await self._remove_warm(warm)
            raise SandboxLost(f"sandbox {record.id} was removed by another process") from error
        except BaseException as error:
            if isinstance(error, NodeDiskFull):
                await in_thread(self._room.failed, str(error))
            await self._remove_warm(warm)
            raise
        handle = SandboxHandle(
            provider=self.name,
            id=record.id,
            node=self._node,
            address=self._address(record.id),
        )
        return Sandbox(handle, warm.client, record.workdir, dict(request.env))

    async def _remove_warm(self, warm: WarmSandbox) -> None:
        with contextlib.suppress(ExecError):
            await warm.client.close()
        await in_thread(self._remove, warm.record.id)

    async def _connect(self, record: SandboxRecord, lease: float = LEASE_SECONDS) -> ExecClient:
        """Return a connection to a sandbox's exec server, whose lease is renewed for that many seconds."""
        # The server's own lease begins later, so it never ends before this one.
        ends_at = time.monotonic() + lease
        secret = bytes.fromhex(record.secret)
        client = await connect(self._address(record.id), CONNECT_SECONDS, secret=secret, lease=lease)
        self._leases[record.id] = ends_at
        return client

    def _address(self, sandbox_id: str) -> str:
        return f"unix:{self._folder.socket_path(sandbox_id)}"

    def _remove(self, sandbox_id: str, known: SandboxRecord | None = None) -> None:
        """Kill and remove a sandbox. This blocks for a bounded time, and a missing sandbox is not an
        error."""
        self._leases.pop(sandbox_id, None)  # What ends from here on does not end by itself.
        record = known if known is not None else self._folder.load(sandbox_id)
        if record is not None:
            if not self._starter.kill(record, RELEASE_SECONDS):
                log.error("sandbox %s: processes survive SIGKILL (in uninterruptible sleep?)", sandbox_id)
            if not cgroups.remove([Path(path) for path in record.cgroups], RELEASE_SECONDS):
                log.error("sandbox %s: its control groups cannot be removed", sandbox_id)
        self._folder.remove(sandbox_id)

    def _sweep(self) -> list[str]:
        removed: list[str] = []
        with self._folder.sweeping() as mine:
            if not mine:
                return removed
            for sandbox_id in self._folder.ids():
                record = self._folder.load(sandbox_id)
                death: Death | None = None
                if record is not None:
                    if record.provider != self.name:
                        continue
                    if record.alive() and (record.state == "claimed" or record.worker.alive()):
                        continue
                    if record.state == "claimed" and self._starter.oom_killed(record):
                        death = "oom"
                    elif record.state == "claimed" and self._crashed(record, 0.0):
                        death = "crash"
                self._remove(sandbox_id)
                if death is not None:
                    # Its Eval may still come, and must know that the sandbox has ended by itself. What was
                    # removed has made room for this.
                    self._folder.remember_death(sandbox_id, death)
                removed.append(sandbox_id)
            self._folder.remove_abandoned(time.time())
            for sandbox_id in [name for name in self._leases if not self._is_leased(name)]:
                self._leases.pop(sandbox_id, None)  # Another worker may have removed it.
        if removed:
            log.info("removed %d unused sandboxes: %s", len(removed), ", ".join(removed[:20]))
        return removed

    def _remove_own(self) -> None:
        """Remove what this process has started and not handed out.

        The warm pool forgets sandboxes that have died, and leaves their folders to a sweep, which no longer
        comes. Claimed sandboxes stay, because another worker may continue their rollouts.
        """
        for sandbox_id in self._folder.ids():
            record = self._folder.load(sandbox_id)
            if record is None or record.provider != self.name or record.worker != self._worker:
                continue
            if record.state != "claimed":
                self._remove(sandbox_id)

    async def _housekeeping(self) -> None:
        """Keep this worker's warm sandboxes alive, and remove dead ones."""
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            try:
                await self._warm.renew(LEASE_SECONDS)
                await self.sweep()
            except OSError as error:
                log.warning("sandbox housekeeping: %s", error)


def _claimed(record: SandboxRecord, *, request: SandboxRequest, owner: str, for_eval: bool) -> SandboxRecord:
    # A sandbox of Eval alone stays "warm". Like an unclaimed one, it is swept once its worker is dead, and no
    # heartbeat asks the control plane about its rollout.
    state: Literal["warm", "claimed"] = "warm" if for_eval else "claimed"
    return replace(record, state=state, owner=owner, env=dict(request.env))


WITHOUT_TOOLS: Final = (PROVIDER, "process")
"""The kinds of sandboxes into which a worker cannot mount the installer's folder with programs."""


def check_tools(tools: Path, run_dir: Path) -> None:
    """Check that a folder with programs can be shown to all sandboxes.

    Raises:
        ValueError: It is not a folder, or it would show the run folder, which holds the sandboxes' secrets.
    """
    if not tools.is_dir():
        raise ValueError(f"--sandbox-tools {tools}: there is no such folder on this node")
    if tools == run_dir or tools in run_dir.parents or run_dir in tools.parents:
        raise ValueError(f"--sandbox-tools {tools}: holds, or lies within, the run dir {run_dir}")


def open_provider(
    name: str,
    *,
    run_dir: Path | str,
    node: str,
    starts_at_once: int | None = None,
    bwrap: str | None = None,
    find_places: Callable[[], Sequence[cgroups.CgroupPlace]] = cgroups.find_places,
    claims: WorkerCalls | None = None,
    apptainer: ApptainerOptions | None = None,
    default_image: str | None = None,
    fakeroot: bool = False,
    templates: bool = True,
    images: Sequence[str] = (ANY,),
    tools: Path | None = None,
) -> SandboxProvider:
    """Return the provider `name`. The caller must await its `start()` before any other call.

    Args:
        run_dir: The run folder, which all workers of the node share. Claimed pods do not need one.
        node: The name of the node, which handles carry.
        starts_at_once: The number of sandboxes that may start at the same time. The default is the number of
            CPU cores, but at least 2.
        bwrap: The path of the bubblewrap program. By default it is looked up on PATH.
        find_places: Returns the places where control groups can be made.
        claims: The control plane's claims, which `kubernetes` needs.
        apptainer: The options of `apptainer` sandboxes.
        default_image: The image of jobs that name none, for `docker` and `podman` sandboxes.
        fakeroot: Whether programs in these may change the files of an image's root.
        templates: Whether `bubblewrap` sandboxes are forked from templates, which is much faster than
            starting bwrap and Python for each of them.
        images: The images that jobs may name on this node; see `AllowedImages`.
        tools: A folder of this node with programs that every sandbox sees, read-only, as `runtime.TOOLS`.
            Pods and bare processes have none.

    Raises:
        ValueError: No provider has that name, an option that it needs is missing, or an entry of `images` is
            malformed; the message names it.
    """
    if name not in PROVIDERS:
        raise ValueError(f"--sandbox {name}: there is no such provider; choose one of {', '.join(PROVIDERS)}")
    if name == PROVIDER:
        if claims is None:
            raise ValueError(f"--sandbox {name}: needs a control plane that takes claims")
        if node != NODE:
            raise ValueError(
                f"--node {node}: sandbox pods are reached from every worker alike, so that workers with "
                f"--sandbox {name} have --node {NODE}"
            )
        return ClaimProvider(claims)
    folder = SandboxFolder(Path(run_dir))
    if tools is not None:
        check_tools(tools, folder.run_dir.resolve())
    try:
        allowed = AllowedImages(images)
    except ValueError as error:
        raise ValueError(f"--allow-image: {error}") from error
    starts = starts_at_once or max(2, os.cpu_count() or 2)
    places = list(find_places())
    for kind in KINDS:
        if name == kind:
            # On version 2, a group of ours replaces the engine's for all controllers.
            own = places if cgroups.enforced(places) >= {"memory", "pids", "cpu"} else []
            engine_starter = ContainerStarter(
                kind, folder, own, default_image, fakeroot=fakeroot, tools=tools
            )
            return NodeProvider(folder, node, engine_starter, own, starts, images=allowed)
    missing = {"memory", "pids"} - cgroups.enforced(places)
    warnings = []
    if missing and os.geteuid() == 0:
        warnings.append(_NO_GROUPS % " and ".join(sorted(missing)))
    if name == "process":
        warnings.append(WARNING % os.geteuid())
        return NodeProvider(folder, node, ProcessStarter(places), places, starts, warnings, allowed)
    if name == "apptainer":
        options = apptainer or ApptainerOptions()
        apptainer_starter = ApptainerStarter(folder, places, options, allowed, tools)
        return NodeProvider(folder, node, apptainer_starter, places, starts, warnings, allowed)
    starter = BubblewrapStarter(folder, places, bwrap, templates=templates, tools=tools)
    return NodeProvider(folder, node, starter, places, starts, warnings, allowed)


@dataclass(frozen=True, slots=True)
class WarmSandbox:
    """A sandbox that is started and connected, but not claimed."""

    record: SandboxRecord
    client: ExecClient


class WarmPool:
    """Keeps as many sandboxes of each key ready as `want` requests. One task refills one key.

    Args:
        start: Starts one sandbox. The caller bounds how many starts run at once.
        remove: Removes a sandbox that will not be used.
    """

    def __init__(
        self,
        start: Callable[[SandboxKey], Awaitable[WarmSandbox]],
        remove: Callable[[WarmSandbox], Coroutine[Any, Any, None]],
    ) -> None:
        self._start = start
        self._remove = remove
        self._ready: dict[SandboxKey, deque[WarmSandbox]] = {}
        self._wanted: dict[SandboxKey, int] = {}
        self._refills: dict[SandboxKey, asyncio.Task[None]] = {}
        self._starting: Counter[SandboxKey] = Counter()
        self._waiting: dict[SandboxKey, deque[asyncio.Future[WarmSandbox | None]]] = {}

    def ready(self, key: SandboxKey) -> int:
        """Return how many sandboxes of this key are ready now."""
        return len(self._ready.get(key, ()))

    def want(self, key: SandboxKey, count: int) -> None:
        """Set how many sandboxes are kept ready. They are started or removed in the background."""
        self._wanted[key] = count
        self.refill(key)

    def take(self, key: SandboxKey) -> WarmSandbox | None:
        """Return the oldest ready sandbox, or None.

        Call `refill` only when the sandbox is in use, because starting another one costs CPU time.
        """
        ready = self._ready.get(key)
        while ready:
            warm = ready.popleft()
            if warm.record.alive():
                return warm
            log.warning("warm sandbox %s has died", warm.record.id)
        return None

    async def next(self, key: SandboxKey) -> WarmSandbox | None:
        """Return one of the sandboxes that are being started now.

        The result is None if other callers wait for all of them, or if the start fails. A caller that finds
        none ready is served sooner this way than by an additional start, which would come after these.
        """
        waiting = self._waiting.setdefault(key, deque())
        if self._starting[key] <= len(waiting):
            return None
        future: asyncio.Future[WarmSandbox | None] = asyncio.get_running_loop().create_future()
        waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (warm := future.result()) is not None:
                self._ready.setdefault(key, deque()).append(warm)
                self.refill(key)
            raise
        finally:
            if future in waiting:
                waiting.remove(future)

    async def renew(self, seconds: float) -> None:
        """Renew the lease of every ready sandbox, and remove those that do not answer."""
        for key, ready in list(self._ready.items()):
            for warm in list(ready):
                try:
                    async with asyncio.timeout(5):
                        await warm.client.renew(seconds)
                except (ExecError, TimeoutError) as error:
                    # The sandbox may have been handed out during the request. It then no longer belongs to
                    # the pool.
                    if warm in ready:
                        ready.remove(warm)
                        log.warning("warm sandbox %s is lost: %s", warm.record.id, error)
                        await self._remove(warm)
                        self.refill(key)

    async def aclose(self) -> None:
        """Stop refilling and remove the ready sandboxes."""
        self._wanted.clear()
        refills = list(self._refills.values())
        for task in refills:
            task.cancel()
        await asyncio.gather(*refills, return_exceptions=True)
        left = [warm for ready in self._ready.values() for warm in ready]
        self._ready.clear()
        async with asyncio.TaskGroup() as group:
            for warm in left:
                group.create_task(self._remove(warm))

    def refill(self, key: SandboxKey) -> None:
        """Start the missing sandboxes of this key in the background."""
        task = self._refills.get(key)
        if self._wanted.get(key, 0) != self.ready(key) and (task is None or task.done()):
            self._refills[key] = asyncio.create_task(
                self._fill(key), name="sandbox-refill", context=outside()
            )

    async def _fill(self, key: SandboxKey) -> None:
        failures = 0
        ready = self._ready.setdefault(key, deque())
        while (missing := self._wanted.get(key, 0) - len(ready)) != 0:
            if missing < 0:
                await self._remove(ready.popleft())
                continue
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(missing):
                        group.create_task(self._add(key, ready))
            except* (SandboxProviderError, ExecError, OSError) as errors:
                first = errors.exceptions[0]
                failures += 1
                delay = _START_AGAIN.pause(failures)
                log.warning("the warm pool cannot start a sandbox, next try in %g s: %s", delay, first)
                await asyncio.sleep(delay)
            else:
                failures = 0

    async def _add(self, key: SandboxKey, ready: deque[WarmSandbox]) -> None:
        waiting = self._waiting.setdefault(key, deque())
        self._starting[key] += 1
        try:
            warm = await self._start(key)
            while waiting:
                if not (future := waiting.popleft()).done():
                    future.set_result(warm)
                    return
            ready.append(warm)
        finally:
            self._starting[key] -= 1
            while len(waiting) > self._starting[key]:
                # The start for which this caller waited has failed.
                if not (future := waiting.pop()).done():
                    future.set_result(None)
