"""The loop of one RolloutJob: it registers the job, keeps its workers and writes its status."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from rollyard_client import Conflict, Invalid, NotFound, TooMany
from rollyard_crds import RolloutJob, RolloutJobStatus
from rollyard_crds.fields.annotations import CANCEL_REASON, CLOSED
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.reading.manifest import ManifestError
from rollyard_crds.task import Task
from rollyard_drivers.loop.passes import Deaths, job_pass
from rollyard_drivers.reconcile import reconcile_pass
from rollyard_drivers.reconcile.conditions import holds
from rollyard_drivers.reconcile.naming import owner_of
from rollyard_drivers.reconcile.placement import is_for
from rollyard_drivers.reconcile.plan import Plan, PoolState
from rollyard_drivers.reconcile.workloads import earliest
from rollyard_tasks.task_list import TaskListError, parse_lines

from rollyard_operator.controllers.children import Children
from rollyard_operator.controllers.context import DRIVER, OperatorContext
from rollyard_operator.controllers.control_plane_view import POLL_SECONDS, thing_key
from rollyard_operator.controllers.object_loop import ObjectLoop
from rollyard_operator.controllers.resource import (
    Reader,
    generation_of,
    is_leaving,
    mirrored,
    registration,
    write_status,
)
from rollyard_operator.controllers.worker_token import JobSecret
from rollyard_operator.errors import OperatorError
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import Key, uid_of
from rollyard_operator.pods.parts import digest
from rollyard_operator.pods.template_check import job_violations
from rollyard_operator.pods.workloads import worker_pod

COMPONENT = "stage-worker"
REFUSED_SECONDS = 15.0
"""The time until a refused job is tried again, in seconds.

A missing ConfigMap may exist after that time, or the queue may have room.
"""
COUNTS_SECONDS = 2.0
"""If only counts and messages have changed, the status is written at most once in this many seconds."""


class Refused(OperatorError):
    """The job cannot be registered now. `reason` is a CamelCase word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class _Life:
    """The memory of one object from its first sight to its end. The loop works without any of it."""

    uid: str = ""
    told: tuple[object, ...] | None = None
    """The generation, labels and annotations that were registered last."""
    generation: int = 0
    """The control plane's generation after that registration."""
    final: RolloutJob | None = None
    """The last view of a finished job that the control plane returned."""
    counts_written: float = 0.0
    left: bool = False
    """Whether the object was deleted and everything that belonged to it elsewhere was deleted too."""
    reader: Reader[RolloutJob] = field(default_factory=lambda: Reader(RolloutJob))


class JobLoop(ObjectLoop):
    """The passes over one RolloutJob."""

    def __init__(self, key: Key, gate: asyncio.Semaphore, context: OperatorContext) -> None:
        super().__init__(key, gate)
        self._context = context
        self._life = _Life()
        self._children = self._new_children()
        self._deaths = Deaths()
        self.pool: Key | None = None
        """The pool that the job samples from."""

    async def run_pass(self) -> float | None:
        """Reconcile the job once, and return the seconds until the next pass, if one is due."""
        obj = self._context.jobs.get(self.key)
        if obj is None or is_leaving(obj):
            return await self._leave(obj)
        if self._life.uid != uid_of(obj):
            self._life = _Life(uid_of(obj))
            self._children = self._new_children()
        try:
            job = self._life.reader.read(obj)
        except ManifestError as error:
            before = self._life.reader.status(obj)
            return await self._refuse(obj, before, Refused(error.reason, str(error)))
        reference = job.spec.backend_ref
        self.pool = None if reference is None else (self.key[0], reference.name)
        if not self._context.plane.seen.is_set():
            return POLL_SECONDS
        try:
            view = await self._view(obj, job)
        except Refused as refused:
            return await self._refuse(obj, job.status, refused)
        if view is None:
            return 0.0  # The object was changed to follow the control plane.
        if not is_for(job, DRIVER):
            return await self._mirror(obj, job, view)
        return await self._reconcile(obj, job, view)

    def _new_children(self) -> Children:
        return Children(self._context.kube, self._context.pods, self._context.settings.instance, self.wake)

    # The registration with the control plane

    async def _view(self, obj: Object, job: RolloutJob) -> RolloutJob | None:
        """Register changes and return the control plane's view, or None if the object was patched."""
        plane, life = self._context.plane, self._life
        view = plane.unfinished.get(self.key, life.uid)
        told = (generation_of(obj), job.metadata.labels, job.metadata.annotations)
        unchanged = generation_of(obj) == job.status.observed_generation
        if holds(job.status.conditions, "Finished"):
            if view is None and life.final is None and (life.told is not None or not unchanged):
                life.final = await plane.find_job(self.key, life.uid)
            if life.final is not None and not unchanged:
                life.final = await self._register(job)  # The change may be another time to live.
            return view or life.final or _of_object(job)
        known = life.told is not None or unchanged
        if view is not None and known and view.metadata.generation != life.generation:
            # The object is unchanged since its registration, but the control plane has another spec. It was
            # changed over REST.
            same = life.told is None or told == life.told
            if same and await self._follow(job, view):
                return None
            life.generation = view.metadata.generation or 0
        if told != life.told:
            view = await self._register(job)
            life.told, life.generation = told, view.metadata.generation or 0
        elif view is None:
            view = await plane.find_job(self.key, life.uid)
            if view is None:  # The control plane lost the job, which is still wanted.
                view = await self._register(job)
                life.generation = view.metadata.generation or 0
            elif view.status.completion_time is not None:
                life.final = view
        return view

    async def _follow(self, job: RolloutJob, view: RolloutJob) -> bool:
        """Copy a change that was made over REST into the object's spec. Return whether the specs differed."""
        spec = {
            name: getattr(view.spec, name)
            for name in ("suspend", "priority")
            if getattr(view.spec, name) != getattr(job.spec, name)
        }
        if not spec:
            return False
        fresh = await self._context.kube.patch("RolloutJob", *self.key, {"spec": spec}, uid=job.metadata.uid)
        if fresh is not None:
            self._context.jobs.put(fresh)
        return True

    async def _register(self, job: RolloutJob) -> RolloutJob:
        plane = self._context.plane
        manifest = registration(job)
        try:
            skipped = SkippedRows()
            tasks = await self._tasks(job, skipped)
            view = await plane.client.register_job(manifest, tasks, skipped)
        except (Conflict, Invalid) as error:
            lines = "; ".join(error.errors) or str(error)
            raise Refused(error.reason, lines) from error
        except TooMany as error:
            raise Refused(error.reason, str(error)) from error
        if view.status.completion_time is None:
            plane.unfinished.learn(view)
        return view

    async def _tasks(self, job: RolloutJob, skipped: SkippedRows) -> list[Task] | None:
        """Return the tasks of the ConfigMap, or None if the control plane has read them already.

        The rows that the job leaves out are added to `skipped`.
        """
        source = job.spec.tasks.config_map_ref
        if source is None or await self._context.plane.find_job(self.key, self._life.uid) is not None:
            return None
        found = await self._context.kube.get("ConfigMap", self.key[0], source.name)
        if found is None:
            text = f"spec.tasks.configMapRef: there is no ConfigMap {source.name!r} in this namespace"
            raise Refused("ConfigMapNotFound", text)
        lines = (found.get("data") or {}).get(source.key)
        if lines is None:
            keys = ", ".join(sorted(found.get("data") or {})) or "none"
            where = f"spec.tasks.configMapRef.key: ConfigMap {source.name!r} has no key {source.key!r}"
            raise Refused("ConfigMapKeyNotFound", f"{where}; its keys: {keys}")
        try:
            rows = io.StringIO(str(lines), newline=None)
            return await asyncio.to_thread(parse_lines, rows, job.spec.tasks, skipped=skipped)
        except TaskListError as error:
            raise Refused(error.reason, f"ConfigMap {source.name!r}, {source.key}: {error}") from error

    # The reconcile

    async def _reconcile(self, obj: Object, job: RolloutJob, view: RolloutJob) -> float | None:
        context = self._context
        before = job.status
        own = {k: v for k, v in job.metadata.annotations.items() if k not in (CLOSED, CANCEL_REASON)}
        meta = job.metadata.model_copy(update={"annotations": {**own, **view.metadata.annotations}})
        job = job.model_copy(update={"metadata": meta, "status": with_counts(before, view.status)})
        pods = self._children.pods(self._life.uid, COMPONENT)
        write, send = partial(self._write, obj, before), partial(self._report, view)
        actions = _JobActions(context, self._children, job, pods, write, send)
        if holds(before.conditions, "Finished") and _settled(job) and not pods:
            # Nothing remains but to wait for the end of its time to live.
            observed, profile = reconcile_pass.observed_job(job, (), None, 0), context.profile
        else:
            # This comes before the launches of the plan. The leases of a successor are never taken back.
            workloads = await self._deaths.noted(
                owner_of(job), self._children.observed(pods), context.plane.client.worker_died
            )
            observed = reconcile_pass.observed_job(
                job,
                workloads,
                self._pool_state(),
                context.admissions.others(self.key, job),
                "; ".join(job_violations(job, context.settings)),
            )
            actions.secret = context.token.of(job)
            # Workers that mount the Secret of an earlier token are replaced.
            profile = replace(context.profile, made_of=digest(context.profile.made_of, actions.secret.name))
        plan = await job_pass(job, observed, actions, context.now(), profile)
        if plan.delete:
            await context.kube.delete("RolloutJob", *self.key, uid=uid_of(obj))
        return earliest((plan.requeue_after, actions.wait))

    def _pool_state(self) -> PoolState | None:
        if self.pool is None:
            return None
        obj = self._context.pools.get(self.pool)
        if obj is None or is_leaving(obj):
            return None
        return self._context.pool_states.get(self.pool) or PoolState(False)

    async def _write(self, obj: Object, before: RolloutJobStatus, after: RolloutJobStatus) -> float | None:
        """Write the status to the object.

        Returns:
            The number of seconds until a postponed write of counts or messages is due, or None.
        """
        if before == after:
            return None
        now = asyncio.get_running_loop().time()
        if _facts(before) == _facts(after):
            left = COUNTS_SECONDS - (now - self._life.counts_written)
            if left > 0:
                return left
        self._life.counts_written = now
        await write_status(self._context.kube, self._context.recorder, self._context.jobs, obj, before, after)
        return None

    async def _report(self, view: RolloutJob, status: RolloutJobStatus) -> None:
        """Report the status to the control plane, in its own generations, unless it has it already."""
        plane = self._context.plane
        if view.metadata.uid is None:
            return  # The control plane no longer has this job.
        report = reconcile_pass.job_report(view, status)
        if report is None:
            return
        with suppress(NotFound):
            answer = await plane.client.put_job_status(view, report)
            if thing_key(answer) == self.key and answer.status.completion_time is None:
                plane.unfinished.learn(answer)
            elif self._life.final is not None:
                self._life.final = answer

    async def _mirror(self, obj: Object, job: RolloutJob, view: RolloutJob) -> float | None:
        """Show the status that another driver reported, because that driver runs the job."""
        after = mirrored(obj, view, job.status)
        wait = await self._write(obj, job.status, after)
        if view.status.completion_time is not None and not holds(after.conditions, "Finished"):
            # All rollouts have ended, so the polls leave the job out, but its driver has yet to report the
            # final status.
            return POLL_SECONDS
        return wait

    # Refusal and deletion

    async def _refuse(self, obj: Object, before: RolloutJobStatus, refused: Refused) -> float:
        after = reconcile_pass.refused(
            before, generation_of(obj), refused.reason, str(refused), self._context.now()
        )
        if reconcile_pass.in_words(before.conditions) != reconcile_pass.in_words(after.conditions):
            await write_status(
                self._context.kube, self._context.recorder, self._context.jobs, obj, before, after
            )
        return REFUSED_SECONDS

    async def _leave(self, obj: Object | None) -> float | None:
        """Delete the job and its workers, because the object is gone or is being deleted."""
        context, life = self._context, self._life
        uid = life.uid or (uid_of(obj) if obj is not None else "")
        context.admissions.leave(self.key)
        if not life.left and uid:
            if await context.plane.find_job(self.key, uid) is not None:
                with suppress(NotFound):
                    await context.plane.client.delete_job(*self.key)
            context.plane.unfinished.forget(self.key)
            life.left = True
        wait = await self._children.leave(uid, COMPONENT, context.profile.stop_seconds)
        if obj is None and wait is None:
            self.done = True
        return wait


@dataclass(slots=True)
class _JobActions:
    """One pass over a job whose workers are pods and whose status is written to its object first."""

    context: OperatorContext
    children: Children
    job: RolloutJob
    pods: Sequence[Object]
    """The job's pods at the beginning of the pass."""
    write: Callable[[RolloutJobStatus], Awaitable[float | None]]
    """Writes the object's status and returns the seconds until a postponed write is due, or None."""
    send: Callable[[RolloutJobStatus], Awaitable[None]]
    """Reports a status to the control plane."""
    secret: JobSecret | None = None
    """The Secret that workers mount. If it is None, no workers are launched any more."""
    wait: float | None = None
    """The seconds until a postponed status has to be written."""

    def planned(self, plan: Plan[RolloutJobStatus]) -> None:
        job = self.job.model_copy(update={"status": plan.status})
        self.context.admissions.note(thing_key(job), job)

    async def prepare(self, plan: Plan[RolloutJobStatus]) -> None:
        if self.secret is not None and plan.launch:
            await self.context.token.ensure(self.job, self.secret)

    async def carry_out(self, plan: Plan[RolloutJobStatus]) -> None:
        if self.secret is None:
            return
        build = partial(worker_pod, job=self.job, settings=self.context.settings, secret=self.secret.name)
        take = partial(self.context.ready.take, job=self.job)
        await self.children.carry_out(self.job.metadata.namespace, plan, build, self.pods, take)
        for pod in self.children.pods(self.job.metadata.uid or "", COMPONENT):
            if not is_leaving(pod):
                await self.context.ready.offer(pod)

    async def show(self, status: RolloutJobStatus) -> None:
        self.wait = await self.write(status)

    async def cancel(self) -> None:
        with suppress(NotFound):
            await self.context.plane.client.cancel(self.job)

    async def report(self, status: RolloutJobStatus) -> None:
        if self.wait is None:  # A status that the object does not show yet is not reported.
            await self.send(status)


def with_counts(status: RolloutJobStatus, known: RolloutJobStatus) -> RolloutJobStatus:
    """Return the object's status with the counts of the control plane."""
    return status.model_copy(
        update={
            "counts": known.counts,
            "reward_mean": known.reward_mean,
            "dynamic_sampling": known.dynamic_sampling,
            "skipped_rows": known.skipped_rows,
            "malformed_calls": known.malformed_calls,
            "start_time": status.start_time or known.start_time,
            "completion_time": status.completion_time or known.completion_time,
        }
    )


def _facts(status: RolloutJobStatus) -> tuple[object, ...]:
    """Return the fields of a status that are written at once when they change."""
    conditions = [(one.type, one.status, one.reason, one.observed_generation) for one in status.conditions]
    return (status.phase, status.observed_generation, conditions)


def _settled(job: RolloutJob) -> bool:
    counts = job.status.counts
    return counts.succeeded + counts.failed + counts.cancelled == counts.total


def _of_object(job: RolloutJob) -> RolloutJob:
    """Return a closed view of a finished job that the control plane does not have."""
    meta = job.metadata.model_copy(
        update={"uid": None, "annotations": {**job.metadata.annotations, CLOSED: "true"}}
    )
    return job.model_copy(update={"metadata": meta})
