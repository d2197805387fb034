"""One pass over a job or a pool, as every driver makes it: reconcile, carry the plan out, report.

A driver says with a few actions what its workloads are and where a status is written; the order of the
steps, and what is reported, is decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Protocol, TypeVar

from rollyard_crds import (
    BackendPool,
    BackendPoolStatus,
    BackendStatus,
    RolloutJob,
    RolloutJobStatus,
)

from rollyard_drivers.reconcile import reconcile_pass
from rollyard_drivers.reconcile.job import reconcile_job
from rollyard_drivers.reconcile.plan import ObservedJob, ObservedPool, Plan, Profile
from rollyard_drivers.reconcile.pool import reconcile_pool

T = TypeVar("T")


class JobActions(Protocol):
    """What a driver does for one job in one pass."""

    def planned(self, plan: Plan[RolloutJobStatus]) -> None:
        """Note the plan before any other job is looked at: it may have admitted the job."""

    async def prepare(self, plan: Plan[RolloutJobStatus]) -> None:
        """Make what the workers need before they are launched."""

    async def carry_out(self, plan: Plan[RolloutJobStatus]) -> None:
        """Start and stop stage workers."""

    async def show(self, status: RolloutJobStatus) -> None:
        """Write the status to where the driver has the job from, if that is not the control plane."""

    async def cancel(self) -> None:
        """Have the control plane cancel every rollout that has not ended."""

    async def report(self, status: RolloutJobStatus) -> None:
        """Write the status to the control plane, where it does not know it yet."""


class PoolActions(Protocol):
    """What a driver does for one pool in one pass."""

    async def prepare(self, plan: Plan[BackendPoolStatus]) -> None:
        """Make what the backends need beside themselves."""

    async def carry_out(self, plan: Plan[BackendPoolStatus]) -> None:
        """Start, drain and stop backends."""

    async def report_backends(self, backends: Sequence[BackendStatus]) -> None:
        """Report the backends to the control plane, where it does not know them yet."""

    async def show(self, status: BackendPoolStatus) -> None:
        """Write the status to where the driver has the pool from, if that is not the control plane."""

    async def report(self, status: BackendPoolStatus) -> None:
        """Write the status to the control plane, where it does not know it yet."""


async def job_pass(
    job: RolloutJob, observed: ObservedJob, actions: JobActions, now: datetime, profile: Profile
) -> Plan[RolloutJobStatus]:
    """Brings a job's workers, its rollouts and its status to what the reconcile says; returns the plan.

    Raises:
        Exception: the first that an action raised; the next pass makes good what this one left undone.
    """
    plan = reconcile_job(job, observed, now, profile)
    actions.planned(plan)
    await actions.prepare(plan)
    # The status describes what was seen before this pass, so neither waits for the other.
    done = await asyncio.gather(actions.carry_out(plan), actions.show(plan.status), return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    if plan.cancel and not observed.cancelled:
        await actions.cancel()
    await actions.report(plan.status)
    return plan


async def pool_pass(
    pool: BackendPool, observed: ObservedPool, actions: PoolActions, now: datetime, profile: Profile
) -> Plan[BackendPoolStatus]:
    """Brings a pool's backends and its status to what the reconcile says; returns the plan.

    Raises:
        Exception: the first that an action raised; the next pass makes good what this one left undone.
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
    """Remembers which backends of one pool were last reported to the control plane.

    The control plane has its own say about versions and messages, so what it answers is not compared with
    what a driver sees, except for what rollouts are routed by.
    """

    def __init__(self) -> None:
        self._reported: list[tuple[object, ...]] | None = None

    async def send(
        self,
        backends: Sequence[BackendStatus],
        known: Sequence[BackendStatus],
        put: Callable[[Sequence[BackendStatus]], Awaitable[T]],
    ) -> T | None:
        """Reports the backends if they have changed; returns what `put` answered, None if nothing was sent.

        Args:
            known: the backends as the control plane knows them.
            put: sends them to the control plane.
        """
        seen = reconcile_pass.reported_backends(backends)
        if seen == self._reported and reconcile_pass.routed_by(backends) == reconcile_pass.routed_by(known):
            return None
        answer = await put(backends)
        self._reported = seen
        return answer
