"""The loop of one BackendPool: it registers the pool, keeps and reports its backends, and writes a status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rollyard_client import Conflict, Invalid, NotFound
from rollyard_crds import BackendPool, BackendPoolStatus, BackendStatus
from rollyard_crds.reading.manifest import ManifestError
from rollyard_drivers.health import PoolHealth
from rollyard_drivers.loop.passes import BackendReports, pool_pass
from rollyard_drivers.reconcile import reconcile_pass
from rollyard_drivers.reconcile.conditions import ConditionUpdate, updated
from rollyard_drivers.reconcile.placement import is_for
from rollyard_drivers.reconcile.plan import ObservedPool, Plan
from rollyard_drivers.reconcile.workloads import earliest

from rollyard_operator.controllers.children import Children
from rollyard_operator.controllers.context import DRIVER, OperatorContext
from rollyard_operator.controllers.control_plane_view import POLL_SECONDS, object_uid
from rollyard_operator.controllers.object_loop import ObjectLoop
from rollyard_operator.controllers.resource import (
    Reader,
    generation_of,
    is_leaving,
    mirrored,
    registration,
    write_status,
)
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import Key, uid_of
from rollyard_operator.pods.template_check import pool_violations
from rollyard_operator.pods.workloads import backend_pod, pool_service

COMPONENT = "backend"
REFUSED_SECONDS = 15.0
COUNTS_SECONDS = 10.0
"""Numbers of single backends are written to the object at most once in this many seconds."""


@dataclass(slots=True)
class _Life:
    """The memory of one object from its first sight to its end. The loop works without any of it."""

    uid: str = ""
    registered: tuple[object, ...] | None = None
    """The generation, labels and annotations that were registered last."""
    generation: int = 0
    """The control plane's generation after that registration."""
    reports: BackendReports = field(default_factory=BackendReports)
    counts_written: float = 0.0
    service: int = -1
    """The generation for which the service was applied."""
    left: bool = False
    """Whether the object was deleted and everything that belonged to it elsewhere was deleted too."""
    reader: Reader[BackendPool] = field(default_factory=lambda: Reader(BackendPool))


class PoolLoop(ObjectLoop):
    """The passes over one BackendPool."""

    def __init__(self, key: Key, gate: asyncio.Semaphore, context: OperatorContext) -> None:
        super().__init__(key, gate)
        self._context = context
        self._life = _Life()
        self._children = self._new_children()
        self._probes = PoolHealth(context.http, self.wake)

    async def run(self) -> None:
        """Make passes like every loop, and close the health probes at the end."""
        try:
            await super().run()
        finally:
            await self._probes.close()

    async def run_pass(self) -> float | None:
        """Reconcile the pool once, and return the seconds until the next pass, if one is due."""
        obj = self._context.pools.get(self.key)
        if obj is None or is_leaving(obj):
            return await self._leave(obj)
        if self._life.uid != uid_of(obj):
            self._life = _Life(uid_of(obj))
            self._children = self._new_children()
        try:
            pool = self._life.reader.read(obj)
        except ManifestError as error:
            return await self._refuse(obj, self._life.reader.status(obj), error.reason, str(error))
        if not self._context.plane.seen.is_set():
            return POLL_SECONDS
        try:
            view = await self._view(obj, pool)
        except (Conflict, Invalid) as error:
            lines = "; ".join(error.errors) or str(error)
            return await self._refuse(obj, pool.status, error.reason, lines)
        if view is None:
            return 0.0  # The object was changed to follow the control plane.
        if not is_for(pool, DRIVER):
            return await self._mirror(obj, pool, view)
        return await self._reconcile(obj, pool, view)

    def _new_children(self) -> Children:
        return Children(self._context.kube, self._context.pods, self._context.settings.instance, self.wake)

    # The registration with the control plane

    async def _view(self, obj: Object, pool: BackendPool) -> BackendPool | None:
        """Register changes and return the control plane's view, or None if the object was patched."""
        plane, life = self._context.plane, self._life
        view = plane.pools.get(self.key, life.uid)
        told = (generation_of(obj), pool.metadata.labels, pool.metadata.annotations)
        known = life.registered is not None or generation_of(obj) == pool.status.observed_generation
        if view is not None and known and view.metadata.generation != life.generation:
            # The object is unchanged since its registration, but the control plane has another spec. It was
            # changed over REST.
            same = life.registered is None or told == life.registered
            if same and await self._follow(pool, view):
                return None
            life.generation = view.metadata.generation or 0
        if told != life.registered or view is None:
            view = await plane.client.register_pool(registration(pool))
            plane.pools.learn(view)
            life.registered, life.generation = told, view.metadata.generation or 0
        return view

    async def _follow(self, pool: BackendPool, view: BackendPool) -> bool:
        """Copy a change that was made over REST into the object's spec. Return whether the specs differed."""
        changes = difference(pool.spec.to_json(), view.spec.to_json())
        if not changes:
            return False
        body = {"spec": changes}
        fresh = await self._context.kube.patch("BackendPool", *self.key, body, uid=pool.metadata.uid)
        if fresh is not None:
            self._context.pools.put(fresh)
        return True

    # The reconcile

    async def _reconcile(self, obj: Object, pool: BackendPool, view: BackendPool) -> float | None:
        context, life = self._context, self._life
        before = pool.status
        pool = pool.model_copy(update={"status": with_backends(before, view.status)})
        pods = self._children.pods(life.uid, COMPONENT)
        refused = "; ".join(pool_violations(pool, context.settings))
        observed = replace(self._observed(pods, pool), refused=refused)
        write, send = partial(self._write, obj, before), partial(self._report, view)
        served = pool.spec.engine.type != "external" and not refused
        actions = _PoolActions(context, self._children, pool, view, pods, served, life, write, send)
        plan = await pool_pass(pool, observed, actions, context.now(), context.profile)
        self._tell_jobs(plan.status)
        return earliest((plan.requeue_after, actions.wait))

    async def _mirror(self, obj: Object, pool: BackendPool, view: BackendPool) -> float | None:
        """Show the status that another driver reported, because that driver starts the backends."""
        after = mirrored(obj, view, pool.status)
        wait = await self._write(obj, pool.status, after)
        self._tell_jobs(after)
        return wait

    def _observed(self, pods: Sequence[Object], pool: BackendPool) -> ObservedPool:
        seen = self._children.observed(pods)
        uids = {pod["metadata"]["name"]: uid_of(pod) for pod in pods}
        running = [(uids[one.name], one.url) for one in seen if one.state == "running" and one.url]
        self._probes.keep(running, pool.spec.model)
        workloads = tuple(self._probes.seen(uids[one.name], one) if one.name in uids else one for one in seen)
        external = pool.spec.engine.type == "external"
        return ObservedPool(workloads, tuple(pool.status.backends) if external else ())

    def _tell_jobs(self, status: BackendPoolStatus) -> None:
        state = reconcile_pass.pool_state(status)
        if self._context.pool_states.get(self.key) != state:
            self._context.pool_states[self.key] = state
            self._context.pool_changed(self.key)

    async def _write(self, obj: Object, before: BackendPoolStatus, after: BackendPoolStatus) -> float | None:
        """Write the status to the object.

        Returns:
            The number of seconds until a postponed write of numbers is due, or None.
        """
        if before == after:
            return None
        now = asyncio.get_running_loop().time()
        if _news(before) == _news(after):
            left = COUNTS_SECONDS - (now - self._life.counts_written)
            if left > 0:
                return left
        self._life.counts_written = now
        await write_status(
            self._context.kube, self._context.recorder, self._context.pools, obj, before, after
        )
        return None

    async def _report(self, view: BackendPool, status: BackendPoolStatus) -> None:
        """Report the status to the control plane, in its own generations, unless it has it already."""
        report = reconcile_pass.pool_report(view, status)
        if report is None:
            return
        with suppress(NotFound):
            self._context.plane.pools.learn(await self._context.plane.client.put_pool_status(view, report))

    # Refusal and deletion

    async def _refuse(self, obj: Object, before: BackendPoolStatus, reason: str, message: str) -> float:
        claims = (
            ConditionUpdate("Ready", False, reason, message),
            ConditionUpdate("Progressing", False, reason, message),
        )
        conditions = updated(before.conditions, claims, generation_of(obj), self._context.now())
        after = before.model_copy(update={"conditions": conditions})
        if reconcile_pass.in_words(before.conditions) != reconcile_pass.in_words(conditions):
            await write_status(
                self._context.kube, self._context.recorder, self._context.pools, obj, before, after
            )
            self._tell_jobs(after)
        return REFUSED_SECONDS

    async def _leave(self, obj: Object | None) -> float | None:
        """Delete the pool and its backends, because the object is gone or is being deleted."""
        context, life = self._context, self._life
        uid = life.uid or (uid_of(obj) if obj is not None else "")
        self._probes.keep((), "")
        if not life.left and uid:
            if any(object_uid(one) == uid for one in await context.plane.client.pools()):
                with suppress(NotFound):
                    await context.plane.client.delete_pool(*self.key)
            context.plane.pools.forget(self.key)
            if context.pool_states.pop(self.key, None) is not None:
                context.pool_changed(self.key)
            life.left = True
        wait = await self._children.leave(uid, COMPONENT, context.profile.stop_seconds)
        if obj is None and wait is None:
            self.done = True
        return wait


@dataclass(slots=True)
class _PoolActions:
    """One pass over a pool whose backends are pods and whose status is written to its object first."""

    context: OperatorContext
    children: Children
    pool: BackendPool
    view: BackendPool
    """The pool as the control plane knows it."""
    pods: Sequence[Object]
    """The pool's pods at the beginning of the pass."""
    served: bool
    """Whether the backends are the operator's own pods behind a service."""
    life: _Life
    write: Callable[[BackendPoolStatus], Awaitable[float | None]]
    """Writes the object's status and returns the seconds until a postponed write is due, or None."""
    send: Callable[[BackendPoolStatus], Awaitable[None]]
    """Reports a status to the control plane."""
    wait: float | None = None
    """The seconds until a postponed status has to be written."""

    async def prepare(self, plan: Plan[BackendPoolStatus]) -> None:
        generation = self.pool.metadata.generation or 0
        if self.served and self.life.service != generation:
            await self.context.kube.apply(pool_service(self.pool, self.context.settings))
            self.life.service = generation

    async def carry_out(self, plan: Plan[BackendPoolStatus]) -> None:
        build = partial(backend_pod, pool=self.pool, settings=self.context.settings)
        await self.children.carry_out(self.pool.metadata.namespace, plan, build, self.pods)

    async def report_backends(self, backends: Sequence[BackendStatus]) -> None:
        put = partial(self.context.plane.client.put_backends, self.view)
        answer = await self.life.reports.send(backends, self.view.status.backends, put)
        if answer is not None:
            self.context.plane.pools.learn(answer)

    async def show(self, status: BackendPoolStatus) -> None:
        self.wait = await self.write(status)

    async def report(self, status: BackendPoolStatus) -> None:
        await self.send(status)


def with_backends(status: BackendPoolStatus, known: BackendPoolStatus) -> BackendPoolStatus:
    """Return the object's status with the weights and backends that the control plane knows."""
    return status.model_copy(
        update={
            "backends": known.backends,
            "policy_version": known.policy_version,
            "paused": known.paused,
        }
    )


def _news(status: BackendPoolStatus) -> tuple[object, ...]:
    """Return the fields of a status that are written at once when they change."""
    routed = reconcile_pass.routed_by(status.backends)
    weights = {(one.url, one.weights, one.policy_version) for one in status.backends}
    whole = (status.conditions, status.observed_generation, status.replicas, status.selector)
    return (*whole, status.policy_version, status.paused, routed, weights)


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
