"""The driver of the jobs and pools in the control plane's store.

A call to the control plane that fails affects only the current pass; the driver continues to run.

The driver is level-based: every pass looks at the whole state and acts on the difference. The next pass
therefore corrects what an earlier pass failed to do or never did.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from rollyard_client import DriverClient, Retry, RollyardError
from rollyard_crds import BackendPool, BackendPoolStatus, BackendStatus, RolloutJob, RolloutJobStatus
from rollyard_crds.workers import AssignmentOffer, WorkerDeath, WorkerDied
from rollyard_process.waiting import first_of

from rollyard_drivers.host.errors import HostError
from rollyard_drivers.loop.passes import BackendReports, Deaths, job_pass, pool_pass
from rollyard_drivers.reconcile import placement, reconcile_pass
from rollyard_drivers.reconcile.conditions import holds
from rollyard_drivers.reconcile.naming import owner_of
from rollyard_drivers.reconcile.plan import (
    ObservedPool,
    ObservedWorkload,
    Owner,
    Plan,
    PoolState,
    Profile,
    Stop,
)
from rollyard_drivers.reconcile.ready_workers import JOB_OVER

T = TypeVar("T")
WATCH_SECONDS: Final = 30.0
"""The duration of one long poll, in seconds."""
AGAIN_SECONDS: Final = 2.0
"""The pause in seconds after a call that the control plane did not answer, since it may be restarting."""


class StoreTrouble(HostError):
    """A call to the control plane has failed; the next pass repeats it."""

    reason = "StoreTrouble"


class Store:
    """The control plane as a driver uses it. Every call may raise StoreTrouble.

    Args:
        url: The base URL of the control plane.
        token: The bearer token of the driver role.
        tls: The certificate authorities to trust for `https:` URLs. The default is the file that
            ROLLYARD_CA_FILE names, or the usual authorities if it is not set.
    """

    def __init__(self, url: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        # The next pass is the retry. A pass that waits for long would notice late that child processes have
        # ended.
        self._client = DriverClient(url, token, timeout=10.0, retry=Retry(attempts=2), tls=tls)

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RollyardError as error:
            raise StoreTrouble(f"{error.reason}: {error}") from error

    async def jobs(self) -> Sequence[RolloutJob]:
        """Return the jobs that concern the driver."""
        return await self._ask(self._client.jobs())

    async def pools(self) -> Sequence[BackendPool]:
        """Return the pools that concern the driver."""
        return await self._ask(self._client.pools())

    async def put_job_status(self, job: RolloutJob, status: RolloutJobStatus) -> None:
        """Write the driver's part of a job's status."""
        await self._ask(self._client.put_job_status(job, status))

    async def put_pool_status(self, pool: BackendPool, status: BackendPoolStatus) -> None:
        """Write the driver's part of a pool's status."""
        await self._ask(self._client.put_pool_status(pool, status))

    async def put_backends(self, pool: BackendPool, backends: Sequence[BackendStatus]) -> None:
        """Report the backends of a pool."""
        await self._ask(self._client.put_backends(pool, backends))

    async def cancel(self, job: RolloutJob) -> None:
        """Cancel a job."""
        await self._ask(self._client.cancel(job))

    async def worker_died(self, report: WorkerDied) -> WorkerDeath:
        """Report the death of a worker, so that its leases return at once."""
        return await self._ask(self._client.worker_died(report))

    async def offer(self, offered: AssignmentOffer) -> str:
        """Offer a job to a worker that stands ready, and return why the worker cannot have it, or nothing.

        The end of the job is not such a reason, because its workers are stopped anyway.
        """
        try:
            await self._client.offer(offered)
        except RollyardError as error:
            message = f"{error.reason}: {error}"
            if error.status is None or error.status >= 500 or error.status == 429:
                raise StoreTrouble(message) from error
            return "" if error.reason in JOB_OVER else message
        return ""

    async def create_pool(self, pool: BackendPool) -> None:
        """Create a pool."""
        await self._ask(self._client.create_pool(pool))

    async def delete_pool(self, namespace: str, name: str) -> None:
        """Delete a pool."""
        await self._ask(self._client.delete_pool(namespace, name))

    async def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a job was added, ended, or changed in anything but its rollouts.

        This method never returns. While the control plane does not answer, the request is repeated.
        """
        revision: int | None = None
        while True:
            try:
                unfinished = await self._client.unfinished(revision, WATCH_SECONDS)
            except RollyardError:
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if unfinished.revision != revision:
                revision = unfinished.revision
                wake()

    async def close(self) -> None:
        """Close the HTTP client."""
        await self._client.close()


class Workloads(Protocol):
    """The component that carries out plans and observes the workloads that it has started."""

    def owners(self) -> set[Owner]:
        """Return the jobs and pools that have workloads."""

    def observed(self, owner: Owner) -> tuple[ObservedWorkload, ...]:
        """Return the workloads of a job or pool as they are now."""

    def ended_workers(self, owner: Owner) -> tuple[str, ...]:
        """Return the stage workers of a job whose ends are to be reported and that `observed` leaves out.

        They have certainly ended. Each is returned until `end_reported` is called.
        """

    def end_reported(self, owner: Owner, worker: str) -> None:
        """Note that the end of such a worker was reported."""

    async def carry_out(self, owner: Owner, plan: Plan[Any]) -> None:
        """Launch and delete what a plan asks for."""

    def stop(self, stop: Stop) -> None:
        """Stop one workload."""


class Driver:
    """A driver that reconciles jobs, pools and their workloads, pass by pass.

    Args:
        store: The control plane.
        workloads: Starts, stops and observes the workloads.
        profile: The settings in which drivers differ.
        on_trouble: Called each time the control plane's trouble changes.
        takes: Returns whether a job belongs to this driver. The driver does not touch the jobs of other
            drivers.
        serves: Returns whether this driver starts the backends of a pool.
        alone: Whether this driver belongs to the control plane. Such a driver also reports jobs and pools
            that wait for a driver that does not run.
    """

    def __init__(
        self,
        store: Store,
        workloads: Workloads,
        profile: Profile,
        on_trouble: Callable[[str], None] = lambda trouble: None,
        takes: Callable[[RolloutJob], bool] = lambda job: True,
        serves: Callable[[BackendPool], bool] = lambda pool: True,
        alone: bool = True,
    ) -> None:
        self._store = store
        self._workloads = workloads
        self._profile = profile
        self._takes = takes
        self._serves = serves
        self._alone = alone
        self._on_trouble = on_trouble
        self._trouble = ""
        self._reports: dict[Owner, BackendReports] = {}
        self._deaths = Deaths()

    async def run_pass(self, now: datetime) -> None:
        """Run one pass.

        A call that the control plane refuses is reported once and repeated in the next pass.
        """
        with self._tolerant():
            await self._run_pass(now)

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        # A control plane that does not answer may be restarting, and an object may vanish between two calls.
        # The workloads keep running, and the next pass looks again.
        try:
            yield
        except StoreTrouble as trouble:
            if str(trouble) != self._trouble:
                self._trouble = str(trouble)
                self._on_trouble(self._trouble)

    async def _run_pass(self, now: datetime) -> None:
        known = await self._store.jobs()
        jobs = [job for job in known if self._takes(job)]
        pools = await self._store.pools()
        served = [pool for pool in pools if self._serves(pool)]
        here = {owner_of(job) for job in jobs} | {owner_of(pool) for pool in served}
        for owner in self._workloads.owners() - here:
            for workload in self._workloads.observed(owner):
                self._workloads.stop(Stop(workload.name, self._profile.stop_seconds))
            self._reports.pop(owner, None)
        for pool in served:
            with self._tolerant():
                await self._pool_pass(pool, now)
        ready = {
            (pool.metadata.namespace, pool.metadata.name): reconcile_pass.pool_state(pool.status)
            for pool in pools
        }
        active = {owner_of(job) for job in jobs if reconcile_pass.is_active(job.status)}
        for job in sorted(jobs, key=reconcile_pass.rank):
            with self._tolerant():
                await self._job_pass(job, ready, active, now)
        if self._alone:
            with self._tolerant():
                await self._tell_unserved(known, pools, now)

    async def _pool_pass(self, pool: BackendPool, now: datetime) -> None:
        owner = owner_of(pool)
        observed = ObservedPool(
            workloads=self._workloads.observed(owner),
            external=tuple(pool.status.backends) if pool.spec.engine.type == "external" else (),
        )
        reports = self._reports.setdefault(owner, BackendReports())
        actions = _PoolActions(self._store, self._workloads, reports, pool)
        plan = await pool_pass(pool, observed, actions, now, self._profile)
        pool.status = plan.status

    async def _tell_unserved(
        self, jobs: Sequence[RolloutJob], pools: Sequence[BackendPool], now: datetime
    ) -> None:
        """Report the jobs and pools of other drivers that no driver has reported on yet."""
        for pool in pools:
            if not self._serves(pool) and placement.is_unspoken(pool, now):
                await self._store.put_pool_status(pool, placement.unserved_pool(pool, now))
        for job in jobs:
            if not self._takes(job) and placement.is_unspoken(job, now):
                await self._store.put_job_status(job, placement.unserved_job(job, now))

    async def _job_pass(
        self, job: RolloutJob, pools: dict[tuple[str, str], PoolState], active: set[Owner], now: datetime
    ) -> None:
        owner = owner_of(job)
        for worker in self._workloads.ended_workers(owner):
            await self._store.worker_died(
                WorkerDied(namespace=owner.namespace, job=owner.name, worker=worker)
            )
            self._workloads.end_reported(owner, worker)
        workloads = self._workloads.observed(owner)
        if holds(job.status.conditions, "Finished") and not workloads:
            return
        # This comes before the launches of the plan. The leases of a successor are never taken back.
        workloads = await self._deaths.noted(owner, workloads, self._store.worker_died)
        reference = job.spec.backend_ref
        pool = pools.get((job.metadata.namespace, reference.name)) if reference is not None else None
        observed = reconcile_pass.observed_job(job, workloads, pool, len(active - {owner}))
        actions = _JobActions(self._store, self._workloads, job, active)
        await job_pass(job, observed, actions, now, self._profile)


@dataclass(frozen=True, slots=True)
class _JobActions:
    """The actions for a job that exists only in the control plane."""

    store: Store
    workloads: Workloads
    job: RolloutJob
    active: set[Owner]
    """The jobs that are admitted and not finished."""

    def planned(self, plan: Plan[RolloutJobStatus]) -> None:
        if reconcile_pass.is_active(plan.status):
            self.active.add(owner_of(self.job))

    async def prepare(self, plan: Plan[RolloutJobStatus]) -> None:
        return

    async def carry_out(self, plan: Plan[RolloutJobStatus]) -> None:
        await self.workloads.carry_out(owner_of(self.job), plan)

    async def show(self, status: RolloutJobStatus) -> None:
        return

    async def cancel(self) -> None:
        await self.store.cancel(self.job)

    async def report(self, status: RolloutJobStatus) -> None:
        report = reconcile_pass.job_report(self.job, status)
        if report is not None:
            await self.store.put_job_status(self.job, report)


@dataclass(frozen=True, slots=True)
class _PoolActions:
    """The actions for a pool that exists only in the control plane."""

    store: Store
    workloads: Workloads
    reports: BackendReports
    pool: BackendPool

    async def prepare(self, plan: Plan[BackendPoolStatus]) -> None:
        return

    async def carry_out(self, plan: Plan[BackendPoolStatus]) -> None:
        await self.workloads.carry_out(owner_of(self.pool), plan)

    async def report_backends(self, backends: Sequence[BackendStatus]) -> None:
        await self.reports.send(
            backends, self.pool.status.backends, partial(self.store.put_backends, self.pool)
        )

    async def show(self, status: BackendPoolStatus) -> None:
        return

    async def report(self, status: BackendPoolStatus) -> None:
        report = reconcile_pass.pool_report(self.pool, status)
        if report is not None:
            await self.store.put_pool_status(self.pool, report)


async def replace_pool(store: Store, pool: BackendPool) -> None:
    """Create a pool. A pool of the same name with another spec is deleted first.

    Raises:
        StoreTrouble: The control plane refused the request.
    """
    meta = pool.metadata
    for old in await store.pools():
        same_name = (old.metadata.namespace, old.metadata.name) == (meta.namespace, meta.name)
        if same_name and old.spec != pool.spec:
            await store.delete_pool(meta.namespace, meta.name)
    await store.create_pool(pool)


async def run_passes(
    run_pass: Callable[[], Awaitable[float | None]],
    wake: asyncio.Event,
    most_seconds: float,
    done: Callable[[], bool] = lambda: False,
) -> None:
    """Make one pass after the other until cancelled. This is the loop of every driver.

    The events only decide when a pass begins, because each pass looks at the whole state.

    Args:
        run_pass: Makes one pass, and returns the number of seconds until the next one is due, or None if it
            has no time of its own.
        wake: Begins the next pass at once when it is set. It is cleared before each pass, so that a change
            during a pass begins another one.
        most_seconds: The longest pause between two passes, in seconds.
        done: Returns whether to end the loop. It is asked before each pass.
    """
    while not done():
        wake.clear()
        due = await run_pass()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_seconds if due is None else min(due, most_seconds)):
                await wake.wait()


async def unless_stopped(start: Awaitable[None], stop: asyncio.Event) -> bool:
    """Wait until `start` has completed. Return False if `stop` was set before that."""
    number, ended = await first_of(start, stop.wait())
    if number == 0:
        ended.result()  # It raises what `start` raised.
    return number == 0
