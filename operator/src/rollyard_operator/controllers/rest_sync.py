"""Keep the control plane and the objects in the cluster in step.

A job or pool that was created over REST becomes an object. What is deleted on one side is deleted on the
other side too.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from rollyard_client import NotFound, RollyardError
from rollyard_crds import BackendPool, RolloutJob, RolloutJobStatus
from rollyard_crds.fields.annotations import CANCEL_REASON, CLOSED, DELETE_REQUESTED
from rollyard_drivers.reconcile import placement, reconcile_pass

from rollyard_operator.controllers.context import DRIVER, OperatorContext
from rollyard_operator.controllers.control_plane_view import object_uid, thing_key
from rollyard_operator.controllers.resource import ORIGIN, is_leaving
from rollyard_operator.kube import labels
from rollyard_operator.kube.client import TRY_AGAIN
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import Key, ObjectCache, key_of, uid_of

AT_ONCE = 8
"""The number of objects that are made at the same time."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Refusal:
    uid: str
    failures: int
    again_at: float


class RestSync:
    """Brings both sides together after each poll. All its steps may be repeated."""

    def __init__(self, context: OperatorContext) -> None:
        self._context = context
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._refused: dict[tuple[str, Key], _Refusal] = {}

    async def after_poll(self) -> None:
        """Carry out what the last poll requires."""
        plane = self._context.plane
        things: list[RolloutJob | BackendPool] = [*plane.pools.all(), *plane.unfinished.all()]
        here = {(thing.kind, thing_key(thing)) for thing in things}
        self._refused = {where: one for where, one in self._refused.items() if where in here}
        await asyncio.gather(*(self._one(thing) for thing in things if self._ours(thing)))
        for thing in things:
            await self._report_unserved(thing)

    async def sweep(self) -> None:
        """Catch up on what no operator saw: deleted objects, also of finished jobs, and ownerless pods."""
        with suppress(RollyardError):
            jobs = await self._context.plane.client.jobs()
            for job in jobs:
                if object_uid(job) and self._ours(job):
                    await self._one(job)
        await self._sweep_pods()

    def _ours(self, thing: RolloutJob | BackendPool) -> bool:
        # A job or pool with an object is deleted with that object, no matter which driver runs it.
        ours = bool(object_uid(thing)) or placement.is_for(thing, DRIVER)
        return ours and self._context.settings.looks_after(thing.metadata.namespace)

    def _nobodys(self, job: RolloutJob) -> bool:
        """Return whether a REST job has no driver because this operator does not serve its namespace."""
        elsewhere = not self._context.settings.looks_after(job.metadata.namespace)
        unspoken = not job.status.conditions and not object_uid(job)
        return elsewhere and unspoken and placement.is_for(job, DRIVER)

    async def _report_unserved(self, thing: RolloutJob | BackendPool) -> None:
        """Report why a job or pool does not start, if no driver would report it."""
        now, plane = self._context.now(), self._context.plane
        elsewhere = not placement.is_for(thing, DRIVER) and placement.is_unspoken(thing, now)
        try:
            # The next poll sees the reported status and wakes the loop of the object, if there is one.
            if isinstance(thing, BackendPool):
                if elsewhere:
                    await plane.client.put_pool_status(thing, placement.unserved_pool(thing, now))
            elif elsewhere:
                await plane.client.put_job_status(thing, placement.unserved_job(thing, now))
            elif self._nobodys(thing):
                plane.unfinished.learn(await plane.client.put_job_status(thing, self._not_served(thing)))
        except RollyardError as error:
            _log.warning("%s %s: %s", thing.kind, "/".join(thing_key(thing)), error)

    def _not_served(self, job: RolloutJob) -> RolloutJobStatus:
        served = ", ".join(self._context.settings.namespaces)
        text = (
            f"metadata.namespace: this operator does not serve {job.metadata.namespace!r}; it serves {served}"
        )
        return reconcile_pass.refused(
            job.status, job.metadata.generation or 0, "NamespaceNotServed", text, self._context.now()
        )

    def _cache(self, thing: RolloutJob | BackendPool) -> ObjectCache:
        return self._context.jobs if isinstance(thing, RolloutJob) else self._context.pools

    async def _one(self, thing: RolloutJob | BackendPool) -> None:
        key, uid = thing_key(thing), object_uid(thing)
        there = self._cache(thing).get(key)
        if uid and there is not None and uid_of(there) == uid and not _to_be_deleted(thing):
            return
        if not uid and (there is not None or _to_be_deleted(thing)):
            return  # The object's own loop registers it, or finds the difference.
        if uid and there is None and key[0] in self._context.access.denied:
            return  # The operator cannot see whether the object is gone.
        async with self._gate:
            try:
                if not uid:
                    await self._create(thing)
                elif there is not None and uid_of(there) == uid:
                    if not is_leaving(there):
                        await self._context.kube.delete(thing.kind, *key, uid=uid)
                else:
                    await self._gone(thing, key, uid)
            except (KubeError, RollyardError) as error:
                _log.warning("%s %s: %s", thing.kind, "/".join(key), error)

    async def _gone(self, thing: RolloutJob | BackendPool, key: Key, uid: str) -> None:
        """Delete a job or pool whose object is not in the caches, if the cluster does not have it either."""
        there = await self._context.kube.get(thing.kind, *key)
        if there is not None:
            self._cache(thing).put(there)
            return
        client = self._context.plane.client
        with suppress(NotFound):
            if isinstance(thing, RolloutJob):
                # The job is read again, because a job that was made since then has another object.
                if object_uid(await client.job(*key)) == uid:
                    await client.delete_job(*key)
                    _log.info("RolloutJob %s: its object is gone, so it is deleted", "/".join(key))
                self._context.plane.unfinished.forget(key)
            else:
                await client.delete_pool(*key)
                _log.info("BackendPool %s: its object is gone, so it is deleted", "/".join(key))
                self._context.plane.pools.forget(key)

    async def _create(self, thing: RolloutJob | BackendPool) -> None:
        """Make the object of a job or a pool that was created over REST."""
        where, now = (thing.kind, thing_key(thing)), asyncio.get_running_loop().time()
        known = self._refused.get(where)
        if known is not None and known.uid == thing.metadata.uid and now < known.again_at:
            return
        if isinstance(thing, RolloutJob):
            with suppress(NotFound):
                thing = await self._context.plane.client.job(*thing_key(thing))  # Includes inline tasks.
            if object_uid(thing):
                return
        try:
            made = await self._context.kube.create(object_of(thing))
        except KubeConflict:
            there = await self._context.kube.get(thing.kind, *thing_key(thing))
            if there is not None:
                self._cache(thing).put(there)
            return
        except KubeError as error:
            failures = 1 if known is None else known.failures + 1
            again_at = now + 4 * TRY_AGAIN.pause(failures + 1)
            self._refused[where] = _Refusal(thing.metadata.uid or "", failures, again_at)
            if failures == 1:
                _log.warning("%s %s: no object: %s", thing.kind, "/".join(thing_key(thing)), error)
            await self._report_refused(thing, error)
            return
        self._refused.pop(where, None)
        self._cache(thing).put(made)

    async def _report_refused(self, thing: RolloutJob | BackendPool, error: KubeError) -> None:
        now, generation = self._context.now(), thing.metadata.generation or 0
        text = f"no {thing.kind} object can be made of it: {error.message}"
        client = self._context.plane.client
        before = reconcile_pass.in_words(thing.status.conditions)
        if isinstance(thing, RolloutJob):
            job = reconcile_pass.refused(thing.status, generation, error.reason, text, now)
            if reconcile_pass.in_words(job.conditions) != before:
                await client.put_job_status(thing, job)
            return
        pool = reconcile_pass.refused_pool(thing.status, generation, error.reason, text, now)
        if reconcile_pass.in_words(pool.conditions) != before:
            await client.put_pool_status(thing, pool)

    async def _sweep_pods(self) -> None:
        """Delete workers and backends whose object disappeared unobserved and without garbage collection."""
        context = self._context
        owners = {uid_of(obj) for cache in (context.jobs, context.pools) for obj in cache}
        for pod in context.pods:
            if labels.label_of(pod, labels.COMPONENT) not in ("stage-worker", "backend") or is_leaving(pod):
                continue
            if labels.label_of(pod, labels.READY):
                continue  # It has no owner yet and is looked after by the loop of ready workers.
            job, pool = labels.label_of(pod, labels.JOB_UID), labels.label_of(pod, labels.POOL_UID)
            if (job or pool) in owners:
                continue
            kind, name = ("RolloutJob", labels.JOB) if job else ("BackendPool", labels.POOL)
            namespace = key_of(pod)[0]
            with suppress(KubeError):
                owner = await context.kube.get(kind, namespace, labels.label_of(pod, name))
                if owner is None or uid_of(owner) != (job or pool):
                    await context.kube.delete("Pod", *key_of(pod), uid=uid_of(pod))


def _to_be_deleted(thing: RolloutJob | BackendPool) -> bool:
    """Return whether the deletion was requested over REST.

    The object is deleted first, and its driver then completes the deletion.
    """
    annotations = thing.metadata.annotations
    return annotations.get(CANCEL_REASON) == "Deleted" or DELETE_REQUESTED in annotations


def object_of(thing: RolloutJob | BackendPool) -> Object:
    """Return the Kubernetes object for a job or pool that was created over REST."""
    meta = thing.metadata
    own = (CLOSED, CANCEL_REASON, DELETE_REQUESTED)
    annotations = {k: v for k, v in meta.annotations.items() if k not in own}
    return {
        "apiVersion": thing.api_version,
        "kind": thing.kind,
        "metadata": {
            "name": meta.name,
            "namespace": meta.namespace,
            "labels": dict(meta.labels),
            "annotations": annotations | {ORIGIN: "rest"},
        },
        "spec": thing.spec.to_json(),
    }
