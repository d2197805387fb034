"""One pass over a job or a pool, which is the same for every driver: reconcile, carry out the plan, report.

A driver implements a few actions, which define what its workloads are and where a status is written. This
module decides the order of the steps and what is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Protocol, TypeVar

from rollyard_crds import (
    BackendPool,
    BackendPoolStatus,
    BackendStatus,
    RolloutJob,
    RolloutJobStatus,
)
from rollyard_crds.workers import WorkerDeath, WorkerDied

from rollyard_drivers.reconcile import reconcile_pass
from rollyard_drivers.reconcile.job import reconcile_job
from rollyard_drivers.reconcile.plan import ObservedJob, ObservedPool, ObservedWorkload, Owner, Plan, Profile
from rollyard_drivers.reconcile.pool import reconcile_pool

T = TypeVar("T")


class JobActions(Protocol):
    """The actions of a driver for one job in one pass."""

    def planned(self, plan: Plan[RolloutJobStatus]) -> None:
        """Note the plan before any other job is reconciled, because the plan may have admitted the job."""

    async def prepare(self, plan: Plan[RolloutJobStatus]) -> None:
        """Create what the workers need before they are launched."""

    async def carry_out(self, plan: Plan[RolloutJobStatus]) -> None:
        """Start and stop the stage workers of the plan."""

    async def show(self, status: RolloutJobStatus) -> None:
        """Write the status to the place that the job was read from, if it is not the control plane."""

    async def cancel(self) -> None:
        """Ask the control plane to cancel every rollout that has not ended."""

    async def report(self, status: RolloutJobStatus) -> None:
        """Write the status to the control plane, unless the control plane knows it already."""


class PoolActions(Protocol):
    """The actions of a driver for one pool in one pass."""

    async def prepare(self, plan: Plan[BackendPoolStatus]) -> None:
        """Create what the backends need in addition to their own processes."""

    async def carry_out(self, plan: Plan[BackendPoolStatus]) -> None:
        """Start, drain and stop the backends of the plan."""

    async def report_backends(self, backends: Sequence[BackendStatus]) -> None:
        """Report the backends to the control plane, unless the control plane knows them already."""

    async def show(self, status: BackendPoolStatus) -> None:
        """Write the status to the place that the pool was read from, if it is not the control plane."""

    async def report(self, status: BackendPoolStatus) -> None:
        """Write the status to the control plane, unless the control plane knows it already."""


async def job_pass(
    job: RolloutJob, observed: ObservedJob, actions: JobActions, now: datetime, profile: Profile
) -> Plan[RolloutJobStatus]:
    """Reconcile a job, carry out and report the plan, and return it.

    The pass covers the job's workers, its rollouts and its status.

    Raises:
        Exception: The first exception that an action raised. The next pass completes what this one left
            undone.
    """
    plan = reconcile_job(job, observed, now, profile)
    actions.planned(plan)
    await actions.prepare(plan)
    # The status describes what was seen before this pass, so neither step waits for the other.
    results = await asyncio.gather(actions.carry_out(plan), actions.show(plan.status), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    if plan.cancel and not observed.cancelled:
        await actions.cancel()
    await actions.report(plan.status)
    return plan


async def pool_pass(
    pool: BackendPool, observed: ObservedPool, actions: PoolActions, now: datetime, profile: Profile
) -> Plan[BackendPoolStatus]:
    """Reconcile a pool, carry out and report the plan, and return it.

    The pass covers the pool's backends and its status.

    Raises:
        Exception: The first exception that an action raised. The next pass completes what this one left
            undone.
    """
    plan = reconcile_pool(pool, observed, now, profile)
    await actions.prepare(plan)
    await actions.carry_out(plan)
    if pool.spec.engine.type != "external":
        await actions.report_backends(plan.status.backends)
    await actions.show(plan.status)
    await actions.report(plan.status)
    return plan


class BackendReports:
    """A record of the backends of one pool that were last reported to the control plane.

    The control plane changes versions and messages itself. Its answer is therefore compared with what the
    driver sees only in the fields that rollouts are routed by.
    """

    def __init__(self) -> None:
        self._reported: list[tuple[object, ...]] | None = None

    async def send(
        self,
        backends: Sequence[BackendStatus],
        known: Sequence[BackendStatus],
        put: Callable[[Sequence[BackendStatus]], Awaitable[T]],
    ) -> T | None:
        """Report the backends if they have changed, and return the answer of `put`.

        Args:
            backends: The backends as the driver sees them.
            known: The backends as the control plane knows them.
            put: Sends the backends to the control plane.

        Returns:
            The answer of `put`, or None if nothing was sent.
        """
        current = reconcile_pass.reported_backends(backends)
        routed_alike = reconcile_pass.routed_by(backends) == reconcile_pass.routed_by(known)
        if routed_alike and current == self._reported:
            return None
        answer = await put(backends)
        self._reported = current
        return answer


Report = Callable[[WorkerDied], Awaitable[WorkerDeath]]
"""Reports a death."""


class Deaths:
    """A record of the dead workers that one driver has reported, as long as it observes them.

    The control plane takes back the leases of a dead worker at once and answers whether the worker completed
    any stage. A worker that did is not crash-looping.
    """

    def __init__(self) -> None:
        self._useful: dict[Owner, dict[str, bool]] = {}

    async def noted(
        self, owner: Owner, workloads: Sequence[ObservedWorkload], report: Report
    ) -> tuple[ObservedWorkload, ...]:
        """Report the workers of a job that have died since the last call, and return all workloads.

        A dead worker that completed a stage of a rollout is returned as `useful`.

        Raises:
            Exception: What `report` raised. The next call reports the same death again.
        """
        before, known = self._useful.pop(owner, {}), {}
        dead = [workload.worker for workload in workloads if workload.state == "exited" and workload.worker]
        try:
            for worker in dead:
                known[worker] = (
                    before[worker] if worker in before else await _is_useful(owner, worker, report)
                )
        finally:
            if known:
                self._useful[owner] = known
        return tuple(
            replace(workload, useful=True)
            if workload.state == "exited" and known.get(workload.worker)
            else workload
            for workload in workloads
        )


async def _is_useful(owner: Owner, worker: str, report: Report) -> bool:
    answer = await report(WorkerDied(namespace=owner.namespace, job=owner.name, worker=worker))
    return answer.completed
