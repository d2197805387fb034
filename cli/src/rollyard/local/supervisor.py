"""`rollyard up`: one control plane, and a reconcile loop over its jobs and pools.

Level-based: every turn looks at everything and acts on the difference. What wakes it
(a child's end, a backend's health, half a second) only decides when it looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import httpx
from rollyard_crds import (
    BackendPool,
    BackendPoolStatus,
    BackendStatus,
    RolloutJob,
    RolloutJobStatus,
)
from rollyard_operator import turn
from rollyard_operator.conditions import holds
from rollyard_operator.naming import owner_of
from rollyard_operator.plan import ObservedPool, Owner, PoolState, Profile, Stop
from rollyard_operator.pools import reconcile_pool
from rollyard_operator.reconcile import reconcile_job

from rollyard.errors import CliError
from rollyard.local.child import sweep
from rollyard.local.controlplane import ControlPlane
from rollyard.local.fleet import Fleet
from rollyard.local.home import Home
from rollyard.local.options import DEFAULT_POOL, Options, shipped_model
from rollyard.local.vllm import API_SERVER

TURN_SECONDS = 0.5
WORKER_GRACE_SECONDS = 8.0
BACKEND_GRACE_SECONDS = 3.0
CONTROL_PLANE_GRACE_SECONDS = 3.0
PROFILE = Profile(combine_stages=True, backoff_seconds=0.5, backoff_cap_seconds=30.0, stable_seconds=60.0)


class Store(Protocol):
    """What the driver asks of the control plane."""

    async def jobs(self) -> Sequence[RolloutJob]: ...
    async def pools(self) -> Sequence[BackendPool]: ...
    async def put_job_status(self, job: RolloutJob, status: RolloutJobStatus) -> None: ...
    async def put_pool_status(self, pool: BackendPool, status: BackendPoolStatus) -> None: ...
    async def put_backends(self, pool: BackendPool, backends: Sequence[BackendStatus]) -> None: ...
    async def cancel(self, job: RolloutJob) -> None: ...
    async def create_pool(self, pool: BackendPool) -> None: ...
    async def delete_pool(self, namespace: str, name: str) -> None: ...
    async def close(self) -> None: ...


class StoreTrouble(CliError):
    """A call to the control plane failed just now; the next turn tries again."""

    reason = "StoreTrouble"


@dataclass(frozen=True, slots=True)
class Ready:
    """What `rollyard up` tells when everything was started."""

    url: str
    token: str
    backend: str
    swept: tuple[str, ...]


def default_pool(options: Options) -> BackendPool:
    """The pool `default` that `rollyard up` makes: the given server, vLLM servers, or an embedded engine."""
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
        env = dict(options.engine_env)
        spec["engine"] = {"type": "vllm", "args": list(options.engine_args), "env": env}
        if options.vllm_python:
            spec["engine"]["command"] = [options.vllm_python, "-m", API_SERVER]
        if options.gpus:
            spec["engine"]["resources"] = {"gpu": options.gpus}
    return BackendPool.model_validate({"metadata": {"name": DEFAULT_POOL}, "spec": spec})


class Supervisor:
    """Runs one home until it is told to stop; leaves nothing behind."""

    def __init__(
        self,
        options: Options,
        make_store: Callable[[str, str], Store],
        on_ready: Callable[[Ready], None] = lambda ready: None,
        on_trouble: Callable[[str], None] = lambda trouble: None,
        sweep_sandboxes: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._options = options
        self._make_store = make_store
        self._on_ready = on_ready
        self._sweep_sandboxes = sweep_sandboxes
        self._home = Home(options.home)
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._on_trouble = on_trouble
        self._trouble = ""
        self._told: dict[Owner, list[tuple[object, ...]]] = {}

    def stop(self) -> None:
        """Ends `run`; everything is drained and stopped first."""
        self._stop.set()

    async def run(self) -> None:
        """Holds the home, starts everything, reconciles until stopped.

        Raises:
            HomeInUse: another supervisor runs on this home.
            StartFailed: the control plane does not become ready.
        """
        pool = default_pool(self._options)
        with self._home.locked():
            swept = sweep(self._home.pids)
            self._home.remove_context()
            self._home.write_supervisor(os.getpid())
            try:
                async with httpx.AsyncClient(trust_env=False) as http:
                    await self._serve(http, pool, tuple(swept))
            finally:
                self._home.remove_context()
                self._home.supervisor_file.unlink(missing_ok=True)

    async def _serve(self, http: httpx.AsyncClient, pool: BackendPool, swept: tuple[str, ...]) -> None:
        plane = ControlPlane(self._home, self._options, http)
        fleet: Fleet | None = None
        store: Store | None = None
        try:
            if not await self._unless_stopped(plane.start()):
                return
            fleet = Fleet(self._home, self._options, plane.url, http, self._wake.set)
            store = self._make_store(plane.url, plane.token("admin"))
            await self._make_pool(store, pool)
            self._home.write_context(plane.url)
            self._on_ready(
                Ready(plane.url, plane.token("admin"), self._options.backend_url or pool.spec.model, swept)
            )
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(plane.keep(self._wake.set), name="control plane")
                turning = group.create_task(self._loop(store, fleet), name="reconcile")
                await self._stop.wait()
                keeping.cancel()
                turning.cancel()
        finally:
            await self._shut_down(plane, fleet)
            if store is not None:
                await store.close()

    async def _unless_stopped(self, start: Awaitable[None]) -> bool:
        starting = asyncio.ensure_future(start)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return False
            await starting
            return True
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)

    async def _shut_down(self, plane: ControlPlane, fleet: Fleet | None) -> None:
        # Workers first: they hand over what they hold while somebody is there to take it.
        if fleet is not None:
            await fleet.stop_all("stage-worker", WORKER_GRACE_SECONDS)
            await fleet.stop_all("backend", BACKEND_GRACE_SECONDS)
        await plane.stop(CONTROL_PLANE_GRACE_SECONDS)
        if self._sweep_sandboxes is not None:
            await self._sweep_sandboxes()

    async def _make_pool(self, store: Store, pool: BackendPool) -> None:
        """The pool `default` as asked for now; one of an earlier `up` gives way to it."""
        meta = pool.metadata
        for old in await store.pools():
            same_name = (old.metadata.namespace, old.metadata.name) == (meta.namespace, meta.name)
            if same_name and old.spec != pool.spec:
                await store.delete_pool(meta.namespace, meta.name)
        await store.create_pool(pool)

    async def _loop(self, store: Store, fleet: Fleet) -> None:
        while True:
            self._wake.clear()
            with self._tolerant():
                await self._turn(store, fleet, datetime.now(UTC))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN_SECONDS):
                    await self._wake.wait()

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        # A control plane that does not answer is being restarted, and an object may vanish
        # between two calls: the children go on, and the next turn looks again.
        try:
            yield
        except StoreTrouble as trouble:
            if str(trouble) != self._trouble:
                self._trouble = str(trouble)
                self._on_trouble(self._trouble)

    async def _turn(self, store: Store, fleet: Fleet, now: datetime) -> None:
        jobs, pools = await store.jobs(), await store.pools()
        here = {owner_of(job) for job in jobs} | {owner_of(pool) for pool in pools}
        for owner in fleet.owners() - here:
            for seen in fleet.observed(owner):
                fleet.stop(Stop(seen.name, PROFILE.stop_seconds))
            self._told.pop(owner, None)
        for pool in pools:
            with self._tolerant():
                await self._pool_turn(store, fleet, pool, now)
        ready = {
            (pool.metadata.namespace, pool.metadata.name): turn.pool_state(pool.status) for pool in pools
        }
        active = {owner_of(job) for job in jobs if turn.is_active(job.status)}
        for job in sorted(jobs, key=turn.rank):
            with self._tolerant():
                await self._job_turn(store, fleet, job, ready, active, now)

    async def _pool_turn(self, store: Store, fleet: Fleet, pool: BackendPool, now: datetime) -> None:
        owner = owner_of(pool)
        external = pool.spec.engine.type == "external"
        observed = ObservedPool(
            workloads=fleet.observed(owner), external=tuple(pool.status.backends) if external else ()
        )
        plan = reconcile_pool(pool, observed, now, PROFILE)
        await fleet.carry_out(owner, plan)
        if not external:
            await self._report(store, owner, pool, plan.status.backends)
        if turn.pool_news(plan.status) != turn.pool_news(pool.status):
            await store.put_pool_status(pool, plan.status)
        pool.status = plan.status

    async def _report(
        self, store: Store, owner: Owner, pool: BackendPool, backends: Sequence[BackendStatus]
    ) -> None:
        # The control plane has its own say about versions and messages: what was told last counts,
        # and that it still knows of each backend what rollouts are routed by.
        told = turn.told_of(backends)
        unchanged = turn.routed_by(backends) == turn.routed_by(pool.status.backends)
        if told == self._told.get(owner) and unchanged:
            return
        await store.put_backends(pool, backends)
        self._told[owner] = told

    async def _job_turn(
        self,
        store: Store,
        fleet: Fleet,
        job: RolloutJob,
        pools: dict[tuple[str, str], PoolState],
        active: set[Owner],
        now: datetime,
    ) -> None:
        owner = owner_of(job)
        workloads = fleet.observed(owner)
        if holds(job.status.conditions, "Finished") and not workloads:
            return
        reference = job.spec.backend_ref
        pool = pools.get((job.metadata.namespace, reference.name)) if reference is not None else None
        observed = turn.observed_job(job, workloads, pool, len(active - {owner}))
        plan = reconcile_job(job, observed, now, PROFILE)
        await fleet.carry_out(owner, plan)
        if plan.cancel and not observed.cancelled:
            await store.cancel(job)
        if turn.job_news(plan.status) != turn.job_news(job.status):
            await store.put_job_status(job, plan.status)
        if turn.is_active(plan.status):
            active.add(owner)


def _key(pool: BackendPool) -> tuple[str, str]:
    return pool.metadata.namespace, pool.metadata.name


def install_signals(supervisor: Supervisor) -> None:
    """Ctrl-C, SIGTERM and a closed terminal stop the running loop's supervisor; a second changes nothing."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup: it is meant to outlive the terminal
        loop.add_signal_handler(number, supervisor.stop)
