"""The supervisor of `rollyard up`: one control plane, and a reconcile loop over its jobs and pools.

The loop is level-based: every pass compares the whole observed state with the desired state and acts on the
difference. The events that start a pass (a child's end, a change of a backend's health, half a second without
a pass) only decide when it runs. `run_supervisor` runs a supervisor in the foreground. The stage workers and
backends are subprocesses, which the plans start and stop through a `Fleet`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from rollyard_api.options.declared import document
from rollyard_client.context import Context, verify
from rollyard_crds import BackendPool
from rollyard_crds.lease import HeartbeatRequest
from rollyard_crds.security.job_token import job_token
from rollyard_crds.workers import WorkerDied
from rollyard_drivers.commands import ENGINE_MODULE, WORKER_MODULE, engine_arguments, worker_arguments
from rollyard_drivers.health import BackendHealth, watch_backend
from rollyard_drivers.host.child import Child, Folders, sweep
from rollyard_drivers.host.control_plane import PROGRAM as CONTROL_PLANE
from rollyard_drivers.host.control_plane import ControlPlaneProcess, ControlPlaneSettings
from rollyard_drivers.host.downloads import Downloads
from rollyard_drivers.host.errors import HostError
from rollyard_drivers.host.home import Home, write_json
from rollyard_drivers.host.private_files import write_private
from rollyard_drivers.host.ready_processes import Program, ReadyProcesses
from rollyard_drivers.loop.driver import Driver, Store, StoreTrouble, replace_pool, run_passes, unless_stopped
from rollyard_drivers.reconcile.placement import is_for
from rollyard_drivers.reconcile.plan import (
    Launch,
    ObservedWorkload,
    Owner,
    Plan,
    Profile,
    Stop,
    Workload,
    WorkloadState,
)
from rollyard_drivers.reconcile.reconcile_pass import pool_state
from rollyard_drivers.reconcile.workloads import Replacements, exit_text
from rollyard_process.log_text import one_line

from rollyard.errors import CannotStart
from rollyard.local.options import DEFAULT_POOL, Options, engine_variables, shipped_model
from rollyard.local.vllm import API_SERVER, choose, free_port, visible_gpus, vllm_server

WORKER: Final = WORKER_MODULE[1]
"""The package that is run as a stage worker."""
ENGINE: Final = ENGINE_MODULE[1]
"""The package that is run as the embedded engine."""
HAND_OVER_SECONDS: Final = 6.0
"""A stage worker gets a second SIGTERM this many seconds before its grace period ends. It then immediately
gives back the rollouts that it holds."""
PORT_CHECK_SECONDS: Final = 0.1
"""The time between two checks for the port of an embedded engine, in seconds."""


TURN_SECONDS: Final = 0.5
WORKER_GRACE_SECONDS: Final = 8.0
BACKEND_GRACE_SECONDS: Final = 3.0
CONTROL_PLANE_GRACE_SECONDS: Final = 3.0
WORKER_IMPORTS: Final = (
    "aiohttp",
    "encodings.idna",
    "encodings.unicode_escape",
)
"""The modules that a stage worker imports for its first requests."""
ENGINE_IMPORTS: Final = ("rollyard_engine.server", "rollyard_engine.generation.runtime", "jinja2.filters")
"""The modules that the engine imports after it has read its arguments."""
PLANE_IMPORTS: Final = ("uvloop", "httptools", "anyio.streams.tls")
"""The modules that the control plane imports when it begins to serve."""
REPLACEMENTS_AFTER: Final = 30.0
"""The seconds after which a ready control plane, engine and second worker are started. What has just begun
needs the processor more. If one of them dies earlier, its successor is made ready at once."""
PROFILE: Final = Profile(
    combine_stages=True, backoff_seconds=0.5, backoff_cap_seconds=30.0, stable_seconds=60.0
)
SWEEP_SECONDS: Final = 15.0
REPORT_SECONDS: Final = 5.0
"""The time that the control plane has to take note of the sandboxes that end, in seconds."""


def default_pool(options: Options) -> BackendPool:
    """Return the pool `default` of `rollyard up`: the given server, vLLM servers, or an embedded engine."""
    spec: dict[str, Any]
    if options.backend_url:
        spec = {
            "model": options.model,
            "engine": {"type": "external", "external": {"urls": [options.backend_url.rstrip("/")]}},
        }
        if options.tokenizer:
            spec["tokenizer"] = options.tokenizer
    else:
        spec = {"model": options.model or str(shipped_model()), "replicas": options.replicas}
        spec["engine"] = {
            "type": options.engine,
            "args": list(options.engine_args),
            "env": engine_variables(options.engine_env),
        }
    if options.engine == "vllm":
        if options.vllm_python:
            spec["engine"]["command"] = [options.vllm_python, "-m", API_SERVER]
        if options.gpus:
            spec["engine"]["resources"] = {"gpu": options.gpus}
    return BackendPool.model_validate({"metadata": {"name": DEFAULT_POOL}, "spec": spec})


def opens_docs(options: Options) -> bool:
    """Return whether `/docs` needs no token.

    If no option decides it, this is so on loopback, where only this machine reaches it.
    """
    if "open_docs" in options.model_fields_set:
        return options.open_docs
    return options.host in ("127.0.0.1", "::1", "localhost")


def plane_settings(options: Options) -> ControlPlaneSettings:
    """Return the settings of the control plane for these options."""
    changes: dict[str, Any] = {
        "open_docs": opens_docs(options),
        "verify_python": options.verify_python or options.vllm_python,
    }
    if options.prorl:
        changes["prorl_tokenizer"] = options.prorl_tokenizer or _tokenizer(options)
    return ControlPlaneSettings(options.host, options.port, document(options.model_copy(update=changes)))


def _tokenizer(options: Options) -> str:
    return options.tokenizer or default_pool(options).spec.model


def _known(options: Options) -> tuple[str, ...]:
    """Return the options of workers that apply to every job: their sandboxes and the usual tokenizer."""
    run_dir = Home(options.home).run
    known = ("--run-dir", str(run_dir), *options.sandbox_arguments())
    return (*known, "--chat-format", _tokenizer(options))


def ready_programs(options: Options) -> tuple[Program, ...]:
    """Return the programs for which there are ready processes.

    With `--ready-workers 0` there are none. Otherwise there is also a control plane, after a while, and an
    engine if the backends are embedded engines, so that each of them is restarted quickly.
    """
    if options.ready_workers == 0:
        return ()
    worker = Program(
        WORKER, WORKER_IMPORTS, options.ready_workers, _known(options), second_after=REPLACEMENTS_AFTER
    )
    plane = Program(CONTROL_PLANE, PLANE_IMPORTS, first_after=REPLACEMENTS_AFTER)
    if options.backend_url or options.engine != "embedded":
        return (worker, plane)
    return (worker, plane, Program(ENGINE, ENGINE_IMPORTS, first_after=REPLACEMENTS_AFTER))


class Supervisor:
    """Runs the processes of one home until it is stopped, and leaves no process behind.

    Args:
        options: The options of `rollyard up`.
        say: Called with each line for the user.
    """

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._home = Home(options.home)
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._troubles: dict[str, str] = {}
        """The last reported end of each backend."""
        self._noted: dict[str, Any] = {}

    def stop(self) -> None:
        """Make `run` return after it has drained and stopped everything."""
        self._stop.set()

    async def run(self) -> None:
        """Lock the home, start everything, and reconcile until stopped.

        Raises:
            HostError: Another supervisor runs on this home.
            StartFailed: The control plane does not become ready.
        """
        pool = default_pool(self._options)
        with self._home.locked():
            swept = sweep(self._home.pids)
            self._home.remove_context()
            self._home.backends_file.unlink(missing_ok=True)
            self._home.write_supervisor(os.getpid())
            try:
                # Its own control plane may have a certificate whose authority is in ROLLYARD_CA_FILE.
                trusted = verify(Context("https:" if self._options.tls_cert else "http:", ""))
                async with (
                    httpx.AsyncClient(trust_env=False) as http,
                    httpx.AsyncClient(trust_env=False, verify=trusted) as own,
                ):
                    await self._serve(http, own, pool, tuple(swept))
            finally:
                self._home.remove_context()
                self._home.backends_file.unlink(missing_ok=True)
                self._home.supervisor_file.unlink(missing_ok=True)

    async def _serve(
        self, http: httpx.AsyncClient, own: httpx.AsyncClient, pool: BackendPool, swept: tuple[str, ...]
    ) -> None:
        ready = ReadyProcesses(Folders(self._home.logs, self._home.pids), ready_programs(self._options))
        plane = ControlPlaneProcess(self._home, plane_settings(self._options), own, ready)
        fleet: Fleet | None = None
        store: Store | None = None
        try:
            if not await unless_stopped(plane.start(), self._stop):
                return
            fleet = Fleet(
                self._home, self._options, plane.url, http, self._wake.set, ready, self._worker_token(plane)
            )
            store = Store(plane.url, plane.token("admin"))
            await replace_pool(store, pool)
            self._home.write_context(plane.url, plane.tokens_file)
            self._say_ready(plane, pool, swept)
            async with asyncio.TaskGroup() as group:
                standing = group.create_task(ready.keep(), name="ready processes")
                keeping = group.create_task(plane.keep(self._wake.set), name="control plane")
                mine = partial(is_for, driver="local")
                driver = Driver(store, fleet, PROFILE, self._say_trouble, takes=mine, serves=mine)
                turning = group.create_task(self._loop(driver, fleet, store), name="reconcile")
                watching = group.create_task(store.watch(self._wake.set), name="new jobs")
                await self._stop.wait()
                standing.cancel()
                watching.cancel()
                keeping.cancel()
                turning.cancel()
        finally:
            await self._shut_down(plane, fleet, store)

    def _say_ready(self, plane: ControlPlaneProcess, pool: BackendPool, swept: Sequence[str]) -> None:
        options, say = self._options, self._say
        if swept:
            say(f"removed what an earlier run left: {', '.join(swept)}")
        docs = f"  (API: {plane.url}/docs)" if opens_docs(options) else ""
        say(f"Rollyard runs at {plane.url}{docs}")
        say(f"  backend  {options.backend_url or pool.spec.model}")
        say(f"  sandbox  {options.sandbox}")
        if plane.prorl_url:
            say(f"  ProRL    {plane.prorl_url}  (no token: whoever reaches it can use it)")
        say(f"  home     {options.home}  (logs in {self._home.logs})")
        say("Submit with `rollyard submit -f job.yaml`; look with `rollyard open`; stop with Ctrl-C.")

    def _say_trouble(self, trouble: str) -> None:
        self._say(one_line(f"trouble: {trouble}"))

    def _worker_token(self, plane: ControlPlaneProcess) -> Callable[[Owner], str]:
        """Return a function that makes the token of the workers of one RolloutJob."""
        return lambda owner: job_token(plane.token("worker"), owner.namespace, owner.name, owner.uid)

    def _note_backends(self, fleet: Fleet) -> None:
        """Report why backends end, once for each different end, and note how their start proceeds."""
        backends = fleet.backends()
        for backend in backends:
            if backend.trouble and self._troubles.get(backend.name) != backend.trouble:
                self._troubles[backend.name] = backend.trouble
                self._say_trouble(backend.trouble)
        if self._options.backend_url:
            return  # The control plane asks the server, see `_note_server`.
        own = [backend for backend in backends if backend.owner.name == DEFAULT_POOL]
        ready = not self._options.replicas or any(backend.ready for backend in own)
        self._note(ready, "" if ready else "; ".join(backend.trouble for backend in own if backend.trouble))

    async def _note_server(self, store: Store) -> None:
        """Note whether the control plane has found the server of `--backend` ready."""
        with contextlib.suppress(StoreTrouble):  # The next pass looks again.
            pools = await store.pools()
            own = [pool for pool in pools if pool.metadata.name == DEFAULT_POOL]
            self._note(any(pool_state(pool.status).ready for pool in own), "")

    def _note(self, ready: bool, trouble: str) -> None:
        """Write how the backends of the default pool start, for `rollyard up --detach`."""
        noted = {"ready": ready, "trouble": trouble}
        if noted != self._noted:
            self._noted = noted
            write_json(self._home.backends_file, noted)

    async def _shut_down(self, plane: ControlPlaneProcess, fleet: Fleet | None, store: Store | None) -> None:
        # The workers end first, while the control plane can still take back the rollouts that they hold.
        try:
            if fleet is not None:
                await self._end_work(plane, fleet, store)
        finally:
            await plane.stop(CONTROL_PLANE_GRACE_SECONDS)
            if store is not None:
                await store.close()

    async def _end_work(self, plane: ControlPlaneProcess, fleet: Fleet, store: Store | None) -> None:
        workers = [
            WorkerDied(namespace=owner.namespace, job=owner.name, worker=workload.worker)
            for owner in fleet.owners()
            for workload in fleet.observed(owner)
            if workload.worker
        ]
        await fleet.stop_all("stage-worker", WORKER_GRACE_SECONDS)
        await fleet.stop_all("backend", BACKEND_GRACE_SECONDS)
        if store is not None:
            # A worker had no time to hand over what it was granted while it stopped.
            with contextlib.suppress(StoreTrouble, TimeoutError):
                async with asyncio.timeout(CONTROL_PLANE_GRACE_SECONDS):
                    await asyncio.gather(*(store.worker_died(worker) for worker in workers))
        await end_sandboxes(self._home, self._options.sandbox, plane.url, plane.token("worker"))

    async def _loop(self, driver: Driver, fleet: Fleet, store: Store) -> None:
        async def run_pass() -> None:
            # This comes before the pass, which restarts a backend that has ended.
            self._note_backends(fleet)
            await driver.run_pass(datetime.now(UTC))
            if self._options.backend_url and not self._noted.get("ready"):
                await self._note_server(store)

        await run_passes(run_pass, self._wake, TURN_SECONDS)


def install_signals(supervisor: Supervisor) -> None:
    """Stop the supervisor on Ctrl-C, SIGTERM and a closed terminal. A second signal changes nothing."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # Under nohup, the supervisor is meant to outlive the terminal.
        loop.add_signal_handler(number, supervisor.stop)


async def end_sandboxes(home: Home, provider_name: str, url: str, token: str) -> None:
    """End every sandbox of this home, after the control plane has queued the rollouts that need them at Init.

    A sandbox that cannot be removed ends when its own lease expires. A control plane that does not answer is
    left alone: an attempt of each of these rollouts then fails.
    """
    if not (home.run / "sandboxes").is_dir():
        return
    from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable
    from rollyard_pipeline.control_plane.rest import RestControlPlane
    from rollyard_pipeline.errors import ControlPlaneRefused
    from rollyard_pipeline.sandboxes import open_provider

    node = socket.gethostname()
    provider = open_provider(provider_name, run_dir=home.run, node=node)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SWEEP_SECONDS):
            sandboxes = provider.claimed()
            beat = HeartbeatRequest(worker=node, node=node, leases=[], ending=sandboxes)
            with contextlib.suppress(ControlPlaneUnavailable, ControlPlaneRefused, TimeoutError):
                async with RestControlPlane(url, token) as control, asyncio.timeout(REPORT_SECONDS):
                    await control.heartbeat(beat)
            for sandbox in sandboxes:
                await provider.release(sandbox)
            await provider.sweep()
            await provider.aclose()
            # Every worker has ended, so no process uses the files that are left here.
            shutil.rmtree(home.run / "sandboxes", ignore_errors=True)


async def run_supervisor(options: Options, say: Callable[[str], None]) -> None:
    """Run `rollyard up` in the foreground until Ctrl-C, SIGTERM or a failure to start.

    Raises:
        HostError: Another supervisor runs on this home.
        StartFailed: The control plane does not become ready.
    """

    supervisor = Supervisor(options, say)
    install_signals(supervisor)
    await supervisor.run()
    say("stopped; nothing is left running")


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
    waits: str = ""
    """What has to come before the process can be started, such as the model."""
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
        self._downloads = Downloads(self._folders, wake)
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
        elif entry.waits:
            state = "starting"
        elif entry.exited:
            state = "exited"
        else:
            state = "running" if entry.workload.kind == "stage-worker" or health.warmed_up else "starting"
        message = (
            entry.failure
            or entry.waits
            or (child.telling_line if child is not None and entry.exited else health.message)
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
            pending=bool(entry.waits),
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
        for entry in list(self._entries.values()):
            if entry.waits and entry.workload.owner == owner and entry.stopping is None:
                await self._begin(entry)

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
        await self._begin(entry)

    async def _begin(self, entry: _Entry) -> None:
        """Start the process of a workload, unless it has to wait for its model."""
        workload, folder = entry.workload, ""
        entry.waits, entry.started_at = "", datetime.now(UTC)
        try:
            if workload.kind == "backend" and workload.engine != "external":
                model = await self._downloads.folder(workload.model, workload.engine)
                folder, entry.waits = model.path, model.waits
                if entry.waits:
                    return
            if workload.engine == "vllm":
                entry.child = await self._start_vllm(entry, folder)
            else:
                module, *arguments = self._arguments(entry, folder)
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

    async def _start_vllm(self, entry: _Entry, folder: str) -> Child:
        workload = entry.workload
        others = [other for other in self._entries.values() if not other.exited]
        if workload.gpus:
            self._visible = self._visible or await visible_gpus()
            taken = (gpu for other in others for gpu in other.gpus)
            entry.gpus = choose(workload.gpus, workload.index, self._visible, taken)
        port = free_port(self._options.host, {other.port for other in others})
        server = vllm_server(workload, self._options.host, port, entry.gpus, folder)
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

    def _arguments(self, entry: _Entry, folder: str) -> Sequence[str]:
        workload = entry.workload
        if workload.kind == "backend":
            port_file = self._home.pids / f"{workload.name}.port"
            port_file.unlink(missing_ok=True)
            return [ENGINE, *engine_arguments(workload, self._options.host, 0, port_file, folder)]
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
        if kind == "backend":
            await self._downloads.stop()
        await asyncio.gather(*(self._end(entry, grace_seconds) for entry in ending))
