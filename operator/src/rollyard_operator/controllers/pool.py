"""The loop of one BackendPool: it registers the pool, keeps and reports its backends, and writes a status."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rollyard_client import Conflict, Invalid, NotFound
from rollyard_crds import BackendPool, BackendPoolStatus, BackendStatus
from rollyard_drivers.health import PoolHealth
from rollyard_drivers.loop.passes import BackendReports, pool_pass
from rollyard_drivers.reconcile import reconcile_pass
from rollyard_drivers.reconcile.plan import ObservedPool, Plan
from rollyard_drivers.reconcile.workloads import earliest

from rollyard_operator.controllers.context import OperatorContext
from rollyard_operator.controllers.control_plane_view import object_uid
from rollyard_operator.controllers.object_loop import Life, ObjectLoop, refused_by
from rollyard_operator.controllers.resource import registration
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import Key, uid_of
from rollyard_operator.pods.template_check import pool_violations
from rollyard_operator.pods.workloads import backend_pod, pool_service


@dataclass(slots=True)
class PoolLife(Life):
    """The memory of one pool."""

    reports: BackendReports = field(default_factory=BackendReports)
    service: int = -1
    """The generation for which the service was applied."""


class PoolLoop(ObjectLoop[BackendPool, PoolLife]):
    """The passes over one BackendPool."""

    component = "backend"
    counts_seconds = 10.0

    def __init__(self, key: Key, gate: asyncio.Semaphore, context: OperatorContext) -> None:
        super().__init__(key, gate, context, context.pools, BackendPool, PoolLife)
        self._probes = PoolHealth(context.http, self.wake)

    async def run(self) -> None:
        """Make passes like every loop, and close the health probes at the end."""
        try:
            await super().run()
        finally:
            await self._probes.close()

    # The registration with the control plane

    async def _view(self, obj: Object, thing: BackendPool) -> BackendPool | None:
        plane, life = self.context.plane, self._life
        view = plane.pools.get(self.key, life.uid)
        if await self._followed(obj, thing, view):
            return None
        current = self._registrable(obj, thing)
        if current != life.registered or view is None:
            with refused_by(Conflict, Invalid):
                view = await plane.client.register_pool(registration(thing))
            plane.pools.learn(view)
            life.registered, life.generation = current, view.metadata.generation or 0
        return view

    def _changes(self, thing: BackendPool, view: BackendPool) -> Object:
        changes: Object = difference(thing.spec.to_json(), view.spec.to_json())
        return changes

    # The reconcile

    async def _reconcile(self, obj: Object, thing: BackendPool, view: BackendPool) -> float | None:
        context = self.context
        pool = thing.model_copy(update={"status": with_backends(thing.status, view.status)})
        pods = self.children.pods(self._life.uid, self.component)
        refused = "; ".join(pool_violations(pool, context.settings))
        observed = replace(self._observed(pods, pool), refused=refused)
        served = pool.spec.engine.type != "external" and not refused
        actions = _PoolActions(self, self._life, obj, thing.status, pool, view, pods, served)
        plan = await pool_pass(pool, observed, actions, context.now(), context.profile)
        self._shown(plan.status)
        return earliest((plan.requeue_after, actions.wait))

    def _observed(self, pods: Sequence[Object], pool: BackendPool) -> ObservedPool:
        seen = self.children.observed(pods)
        uids = {pod["metadata"]["name"]: uid_of(pod) for pod in pods}
        running = [(uids[one.name], one.url) for one in seen if one.state == "running" and one.url]
        self._probes.keep(running, pool.spec.model)
        workloads = tuple(self._probes.seen(uids[one.name], one) if one.name in uids else one for one in seen)
        external = pool.spec.engine.type == "external"
        return ObservedPool(workloads, tuple(pool.status.backends) if external else ())

    def _shown(self, status: BackendPoolStatus) -> None:
        state = reconcile_pass.pool_state(status)
        if self.context.pool_states.get(self.key) != state:
            self.context.pool_states[self.key] = state
            self.context.pool_changed(self.key)

    def _facts(self, status: BackendPoolStatus) -> tuple[object, ...]:
        routed = reconcile_pass.routed_by(status.backends)
        weights = {(one.url, one.weights, one.policy_version) for one in status.backends}
        whole = (status.conditions, status.observed_generation, status.replicas, status.selector)
        return (*whole, status.policy_version, status.paused, routed, weights)

    async def report(self, view: BackendPool, status: BackendPoolStatus) -> None:
        """Report the status to the control plane, in its own generations, unless it has it already."""
        report = reconcile_pass.pool_report(view, status)
        if report is None:
            return
        with suppress(NotFound):
            self.context.plane.pools.learn(await self.context.plane.client.put_pool_status(view, report))

    # Refusal and deletion

    def _refused(
        self, status: BackendPoolStatus, generation: int, reason: str, message: str
    ) -> BackendPoolStatus:
        types = ("Ready", "Progressing")
        return reconcile_pass.refused_pool(status, generation, reason, message, self.context.now(), types)

    def _stop(self) -> None:
        self._probes.keep((), "")

    async def _unregister(self, uid: str) -> None:
        context = self.context
        if any(object_uid(one) == uid for one in await context.plane.client.pools()):
            with suppress(NotFound):
                await context.plane.client.delete_pool(*self.key)
        context.plane.pools.forget(self.key)
        if context.pool_states.pop(self.key, None) is not None:
            context.pool_changed(self.key)


@dataclass(slots=True)
class _PoolActions:
    """One pass over a pool whose backends are pods and whose status is written to its object first."""

    loop: PoolLoop
    life: PoolLife
    obj: Object
    before: BackendPoolStatus
    """The status of the object."""
    pool: BackendPool
    """The object with what the control plane knows."""
    view: BackendPool
    """The pool as the control plane knows it."""
    pods: Sequence[Object]
    """The pool's pods at the beginning of the pass."""
    served: bool
    """Whether the backends are the operator's own pods behind a service."""
    wait: float | None = None
    """The seconds until a postponed status has to be written."""

    async def prepare(self, plan: Plan[BackendPoolStatus]) -> None:
        context, generation = self.loop.context, self.pool.metadata.generation or 0
        if self.served and self.life.service != generation:
            await context.kube.apply(pool_service(self.pool, context.settings))
            self.life.service = generation

    async def carry_out(self, plan: Plan[BackendPoolStatus]) -> None:
        build = partial(backend_pod, pool=self.pool, settings=self.loop.context.settings)
        await self.loop.children.carry_out(self.pool.metadata.namespace, plan, build, self.pods)

    async def report_backends(self, backends: Sequence[BackendStatus]) -> None:
        plane = self.loop.context.plane
        put = partial(plane.client.put_backends, self.view)
        answer = await self.life.reports.send(backends, self.view.status.backends, put)
        if answer is not None:
            plane.pools.learn(answer)

    async def show(self, status: BackendPoolStatus) -> None:
        self.wait = await self.loop.write(self.obj, self.before, status)

    async def report(self, status: BackendPoolStatus) -> None:
        await self.loop.report(self.view, status)


def with_backends(status: BackendPoolStatus, known: BackendPoolStatus) -> BackendPoolStatus:
    """Return the object's status with the weights and backends that the control plane knows."""
    return status.model_copy(
        update={
            "backends": known.backends,
            "policy_version": known.policy_version,
            "paused": known.paused,
        }
    )


def difference(before: Any, after: Any) -> Any:
    """Return the merge patch (RFC 7386) that turns one JSON object into another, or {} if they are equal."""
    patch: dict[str, Any] = {}
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            patch[name] = difference(old, new)
        else:
            patch[name] = new
    return patch
