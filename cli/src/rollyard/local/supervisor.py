"""The supervisor of `rollyard up`: one control plane, and a reconcile loop over its jobs and pools.

The loop is level-based: every pass compares the whole observed state with the desired state and acts on the
difference. The events that start a pass (a child's end, a change of a backend's health, half a second without
a pass) only decide when it runs. `run_supervisor` runs a supervisor in the foreground.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import httpx
from rollyard_api.options.declared import document
from rollyard_client.context import Context, verify
from rollyard_crds import BackendPool
from rollyard_crds.lease import HeartbeatRequest
from rollyard_crds.security.job_token import job_token
from rollyard_crds.workers import WorkerDied
from rollyard_drivers.host.child import Folders, sweep
from rollyard_drivers.host.control_plane import PROGRAM as CONTROL_PLANE
from rollyard_drivers.host.control_plane import ControlPlaneProcess, ControlPlaneSettings
from rollyard_drivers.host.home import Home, write_json
from rollyard_drivers.host.ready_processes import Program, ReadyProcesses
from rollyard_drivers.loop.driver import Driver, Store, StoreTrouble, replace_pool, run_passes, unless_stopped
from rollyard_drivers.reconcile.placement import is_for
from rollyard_drivers.reconcile.plan import Owner, Profile
from rollyard_process.log_text import one_line

from rollyard.local.fleet import ENGINE, WORKER, Fleet
from rollyard.local.options import DEFAULT_POOL, Options, shipped_model
from rollyard.local.vllm import API_SERVER

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
ENGINE_IMPORTS: Final = ("rollyard_engine.server", "onnxruntime_genai", "jinja2.filters")
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
    if options.engine == "vllm":
        env = {name: value for name, _, value in (pair.partition("=") for pair in options.engine_env)}
        spec["engine"] = {"type": "vllm", "args": list(options.engine_args), "env": env}
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
                turning = group.create_task(self._loop(driver, fleet), name="reconcile")
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
        own = [backend for backend in backends if backend.owner.name == DEFAULT_POOL]
        ready = bool(self._options.backend_url or not self._options.replicas or any(o.ready for o in own))
        trouble = "" if ready else "; ".join(backend.trouble for backend in own if backend.trouble)
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

    async def _loop(self, driver: Driver, fleet: Fleet) -> None:
        async def run_pass() -> None:
            # This comes before the pass, which restarts a backend that has ended.
            self._note_backends(fleet)
            await driver.run_pass(datetime.now(UTC))

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
