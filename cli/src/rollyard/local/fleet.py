"""The stage workers and backends of a supervisor, which are subprocesses that plans start and stop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx
from rollyard_drivers.commands import ENGINE_MODULE, WORKER_MODULE, engine_arguments, worker_arguments
from rollyard_drivers.health import BackendHealth, watch_backend
from rollyard_drivers.host.child import Child, Folders
from rollyard_drivers.host.errors import HostError
from rollyard_drivers.host.home import Home
from rollyard_drivers.host.private_files import write_private
from rollyard_drivers.host.ready_processes import ReadyProcesses
from rollyard_drivers.reconcile.plan import (
    Launch,
    ObservedWorkload,
    Owner,
    Plan,
    Stop,
    Workload,
    WorkloadState,
)
from rollyard_drivers.reconcile.workloads import Replacements, exit_text

from rollyard.errors import CannotStart
from rollyard.local.options import Options
from rollyard.local.vllm import choose, free_port, visible_gpus, vllm_server

WORKER: Final = WORKER_MODULE[1]
"""The package that is run as a stage worker."""
ENGINE: Final = ENGINE_MODULE[1]
"""The package that is run as the embedded engine."""
HAND_OVER_SECONDS: Final = 6.0
"""A stage worker gets a second SIGTERM this many seconds before its grace period ends. It then immediately
gives back the rollouts that it holds."""
PORT_CHECK_SECONDS: Final = 0.1
"""The time between two checks for the port of an embedded engine, in seconds."""


@dataclass(slots=True)
class _Entry:
    workload: Workload
    restarts: int
    child: Child | None
    """The process, or None if it could not be started."""
    started_at: datetime
    failure: str = ""
    stopping: asyncio.Task[None] | None = None
    probe: asyncio.Task[None] | None = None
    health: BackendHealth = field(default_factory=BackendHealth)
    blocked: bool = False
    """Whether nothing was started because this machine lacks something that `failure` names."""
    draining_since: datetime | None = None
    port: int = 0
    """The port that was chosen for a vLLM server."""
    gpus: tuple[str, ...] = ()
    url: str = ""
    """The URL at which a vLLM server will answer. An embedded engine reports its own URL."""
    last_end: str = ""
    """How the process that ran before this one ended."""
    worker: str = ""
    """The name under which a stage worker leases rollouts. Its successor has another one."""

    @property
    def exited(self) -> bool:
        """Whether no process runs. One that runs holds its port and its GPUs."""
        return self.child is None or self.child.exit_code is not None


@dataclass(frozen=True, slots=True)
class BackendNote:
    """The health of a backend."""

    name: str
    owner: Owner
    ready: bool
    """Whether it takes requests."""
    trouble: str
    """Why it was not started, or how it has ended, or ""."""


async def _listening(port_file: Path, host: str) -> str:
    """Wait until an embedded engine has written its port, and return its base URL."""
    while True:
        try:
            port = int(port_file.read_text())
        except (OSError, ValueError):
            await asyncio.sleep(PORT_CHECK_SECONDS)
            continue
        return f"http://{host}:{port}"


class Fleet:
    """The stage workers and backends of one supervisor, by name.

    Args:
        home: The folders of logs, pid files, tokens and sandboxes.
        options: The options of `rollyard up`.
        url: The base URL of the control plane.
        http: The client that asks for the health of backends.
        wake: Called when something has changed, so that the next pass starts early.
        ready: The ready processes.
        worker_token: Returns the token of the workers of a RolloutJob.
    """

    def __init__(
        self,
        home: Home,
        options: Options,
        url: str,
        http: httpx.AsyncClient,
        wake: Callable[[], None],
        ready: ReadyProcesses,
        worker_token: Callable[[Owner], str],
    ) -> None:
        self._home = home
        self._options = options
        self._url = url
        self._http = http
        self._wake = wake
        self._entries: dict[str, _Entry] = {}
        self._folders = Folders(home.logs, home.pids)
        self._visible: tuple[str, ...] = ()
        self._replaced = Replacements()
        self._ready = ready
        self._worker_token = worker_token

    def owners(self) -> set[Owner]:
        """Return the owners of all workloads."""
        return {entry.workload.owner for entry in self._entries.values()}

    def observed(self, owner: Owner) -> tuple[ObservedWorkload, ...]:
        """Return the observed state of an owner's workloads."""
        return tuple(
            self._observe(entry) for entry in self._entries.values() if entry.workload.owner == owner
        )

    def backends(self) -> list[BackendNote]:
        """Return the health of each backend that is not being stopped."""
        notes = []
        for name, entry in self._entries.items():
            observed = self._observe(entry)
            if entry.workload.kind != "backend" or observed.state == "stopping":
                continue
            trouble = ""
            if observed.state == "exited":
                trouble = (
                    f"{name} is not started: {observed.message}" if entry.failure else exit_text(observed)
                )
            notes.append(BackendNote(name, entry.workload.owner, entry.health.ready, trouble))
        return notes

    def ended_workers(self, owner: Owner) -> tuple[str, ...]:
        """Return no worker, because `observed` holds every worker that has ended."""
        return ()

    def end_reported(self, owner: Owner, worker: str) -> None:
        """Do nothing, because `ended_workers` returns no worker."""

    def _observe(self, entry: _Entry) -> ObservedWorkload:
        child, health = entry.child, entry.health
        state: WorkloadState
        if entry.stopping is not None:
            state = "stopping"
        elif entry.exited:
            state = "exited"
        else:
            state = "running" if entry.workload.kind == "stage-worker" or health.warmed_up else "starting"
        message = entry.failure or (
            child.telling_line if child is not None and entry.exited else health.message
        )
        return ObservedWorkload(
            name=entry.workload.name,
            spec_hash=entry.workload.spec_hash,
            state=state,
            started_at=entry.started_at,
            restarts=entry.restarts,
            last_end=entry.last_end,
            exit_code=child.exit_code if child is not None else None,
            exited_at=child.exited_at if child is not None else entry.started_at,
            ready=health.ready if entry.workload.kind == "backend" else True,
            unready_since=health.unready_since,
            url=health.url,
            policy_version=health.policy_version,
            message=message,
            blocked=entry.blocked,
            draining_since=entry.draining_since,
            worker=entry.worker,
            ready_since=health.ready_since,
        )

    async def carry_out(self, owner: Owner, plan: Plan[Any]) -> None:
        """Start, drain and stop what the plan for one owner says. Stopping continues in the background."""
        for stop in plan.stop:
            self.stop(stop)
        for name, entry in self._entries.items():
            if entry.workload.owner == owner:
                since = entry.draining_since or datetime.now(UTC)
                entry.draining_since = since if name in plan.drain else None
        for launch in plan.launch:
            await self._launch(launch)

    async def _launch(self, launch: Launch) -> None:
        launch = self._replaced.counted(launch)
        workload = launch.workload
        before = self._entries.pop(workload.name, None)
        if before is not None and before.probe is not None:
            before.probe.cancel()
        entry = _Entry(workload, launch.restarts, None, datetime.now(UTC), last_end=launch.last_end)
        if workload.kind == "stage-worker":
            entry.worker = f"{workload.name}-{secrets.token_hex(4)}"
        self._entries[workload.name] = entry
        self._replaced.launched(workload.name)
        try:
            if workload.engine == "vllm":
                entry.child = await self._start_vllm(entry)
            else:
                module, *arguments = self._arguments(entry)
                entry.child = await self._ready.start(
                    module, workload.name, arguments, env=dict(workload.env), on_exit=self._wake
                )
        except CannotStart as lack:
            entry.blocked, entry.failure = True, str(lack)
            return
        except (HostError, OSError) as error:
            entry.failure = f"cannot be started: {error}"
            return
        if workload.kind == "backend":
            entry.probe = asyncio.create_task(self._watch(entry), name=f"health of {workload.name}")

    async def _start_vllm(self, entry: _Entry) -> Child:
        workload = entry.workload
        others = [other for other in self._entries.values() if not other.exited]
        if workload.gpus:
            self._visible = self._visible or await visible_gpus()
            taken = (gpu for other in others for gpu in other.gpus)
            entry.gpus = choose(workload.gpus, workload.index, self._visible, taken)
        port = free_port(self._options.host, {other.port for other in others})
        server = vllm_server(workload, self._options.host, port, entry.gpus)
        entry.port, entry.url = port, server.url
        return await Child.start(
            workload.name,
            server.arguments,
            self._folders,
            env=server.env,
            on_exit=self._wake,
            program=server.program,
            guarded=True,
        )

    async def _watch(self, entry: _Entry) -> None:
        def report(health: BackendHealth) -> None:
            changed = (health.ready, health.url) != (entry.health.ready, entry.health.url)
            entry.health = health
            if changed:
                self._wake()

        url = entry.url
        if not url:
            port_file = self._home.pids / f"{entry.workload.name}.port"
            url = await _listening(port_file, self._options.host)
        await watch_backend(url, entry.workload.model, self._http, report)

    def _arguments(self, entry: _Entry) -> Sequence[str]:
        workload = entry.workload
        if workload.kind == "backend":
            port_file = self._home.pids / f"{workload.name}.port"
            port_file.unlink(missing_ok=True)
            return [ENGINE, *engine_arguments(workload, self._options.host, 0, port_file)]
        # The worker works for one job only, and its token serves no other.
        token_file = self._home.worker_token_file(workload.name)
        write_private(token_file, self._worker_token(workload.owner))
        return [
            WORKER,
            *worker_arguments(workload, self._url, token_file),
            *("--run-dir", str(self._home.run), *self._options.sandbox_arguments()),
            *("--name", entry.worker),
        ]

    def stop(self, stop: Stop) -> None:
        """End a workload within its grace period, in the background. One that has ended is removed."""
        entry = self._entries.get(stop.name)
        if entry is None or entry.stopping is not None:
            return
        self._replaced.note(stop)
        if entry.probe is not None:
            entry.probe.cancel()
        if entry.exited:
            self._forget(entry)
            return
        entry.stopping = asyncio.create_task(self._end(entry, stop.grace_seconds), name=f"stop {stop.name}")

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.workload.name]
        self._home.worker_token_file(entry.workload.name).unlink(missing_ok=True)

    async def _end(self, entry: _Entry, grace_seconds: float) -> None:
        if entry.child is not None:
            insist = max(0.0, grace_seconds - HAND_OVER_SECONDS)
            worker = entry.workload.kind == "stage-worker"
            await entry.child.stop(grace_seconds, insist if worker else None)
        if self._entries.get(entry.workload.name) is entry:
            self._forget(entry)
        self._wake()

    async def stop_all(self, kind: str, grace_seconds: float) -> None:
        """End all workloads of a kind at the same time, within the grace period and five seconds."""
        ending = [entry for entry in self._entries.values() if entry.workload.kind == kind]
        for entry in ending:
            if entry.stopping is not None:
                entry.stopping.cancel()
                entry.stopping = None
            if entry.probe is not None:
                entry.probe.cancel()
        await asyncio.gather(*(self._end(entry, grace_seconds) for entry in ending))
