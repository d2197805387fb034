"""The loop of one RolloutJob: it registers the job, keeps its workers and writes its status."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from rollyard_client import Conflict, Invalid, NotFound, TooMany
from rollyard_crds import RolloutJob, RolloutJobStatus
from rollyard_crds.fields.annotations import CANCEL_REASON, CLOSED
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.task import Task
from rollyard_drivers.loop.passes import Deaths, job_pass
from rollyard_drivers.reconcile import reconcile_pass
from rollyard_drivers.reconcile.conditions import holds
from rollyard_drivers.reconcile.naming import owner_of
from rollyard_drivers.reconcile.plan import Plan, PoolState
from rollyard_drivers.reconcile.workloads import earliest
from rollyard_tasks.task_list import TaskListError, parse_lines

from rollyard_operator.controllers.context import OperatorContext
from rollyard_operator.controllers.control_plane_view import POLL_SECONDS, thing_key
from rollyard_operator.controllers.object_loop import Life, ObjectLoop, Refused, refused_by
from rollyard_operator.controllers.resource import generation_of, is_leaving, registration
from rollyard_operator.controllers.worker_token import JobSecret
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import Key, uid_of
from rollyard_operator.pods.parts import digest
from rollyard_operator.pods.template_check import job_violations
from rollyard_operator.pods.workloads import needs_hub, worker_pod


@dataclass(slots=True)
class JobLife(Life):
    """The memory of one job."""

    final: RolloutJob | None = None
    """The last view of a finished job that the control plane returned."""


class JobLoop(ObjectLoop[RolloutJob, JobLife]):
    """The passes over one RolloutJob."""

    component = "stage-worker"
    counts_seconds = 2.0

    def __init__(self, key: Key, gate: asyncio.Semaphore, context: OperatorContext) -> None:
        super().__init__(key, gate, context, context.jobs, RolloutJob, JobLife)
        self._deaths = Deaths()
        self.pool: Key | None = None
        """The pool that the job samples from."""

    # The registration with the control plane

    async def _view(self, obj: Object, thing: RolloutJob) -> RolloutJob | None:
        reference = thing.spec.backend_ref
        self.pool = None if reference is None else (self.key[0], reference.name)
        plane, life = self.context.plane, self._life
        view = plane.unfinished.get(self.key, life.uid)
        unchanged = generation_of(obj) == thing.status.observed_generation
        if holds(thing.status.conditions, "Finished"):
            if view is None and life.final is None and (life.registered is not None or not unchanged):
                life.final = await plane.find_job(self.key, life.uid)
            if life.final is not None and not unchanged:
                life.final = await self._register(thing)  # The change may be another time to live.
            return view or life.final or _of_object(thing)
        if await self._followed(obj, thing, view):
            return None
        if self._registrable(obj, thing) != life.registered:
            view = await self._register(thing)
            life.registered, life.generation = self._registrable(obj, thing), view.metadata.generation or 0
        elif view is None:
            view = await plane.find_job(self.key, life.uid)
            if view is None:  # The control plane lost the job, which is still wanted.
                view = await self._register(thing)
                life.generation = view.metadata.generation or 0
            elif view.status.completion_time is not None:
                life.final = view
        return view

    def _changes(self, thing: RolloutJob, view: RolloutJob) -> Object:
        return {
            name: getattr(view.spec, name)
            for name in ("suspend", "priority")
            if getattr(view.spec, name) != getattr(thing.spec, name)
        }

    async def _register(self, job: RolloutJob) -> RolloutJob:
        plane, skipped = self.context.plane, SkippedRows()
        tasks = await self._tasks(job, skipped)
        with refused_by(Conflict, Invalid, TooMany):
            view = await plane.client.register_job(registration(job), tasks, skipped)
        if view.status.completion_time is None:
            plane.unfinished.learn(view)
        return view

    async def _tasks(self, job: RolloutJob, skipped: SkippedRows) -> list[Task] | None:
        """Return the tasks of the ConfigMap, or None if the control plane has read them already.

        The rows that the job leaves out are added to `skipped`.
        """
        source = job.spec.tasks.config_map_ref
        if source is None or await self.context.plane.find_job(self.key, self._life.uid) is not None:
            return None
        config_map = await self.context.kube.get("ConfigMap", self.key[0], source.name)
        if config_map is None:
            text = f"spec.tasks.configMapRef: there is no ConfigMap {source.name!r} in this namespace"
            raise Refused("ConfigMapNotFound", text)
        data = config_map.get("data") or {}
        lines = data.get(source.key)
        if lines is None:
            keys = ", ".join(sorted(data)) or "none"
            where = f"spec.tasks.configMapRef.key: ConfigMap {source.name!r} has no key {source.key!r}"
            raise Refused("ConfigMapKeyNotFound", f"{where}; its keys: {keys}")
        try:
            rows = io.StringIO(str(lines), newline=None)
            return await asyncio.to_thread(parse_lines, rows, job.spec.tasks, skipped=skipped)
        except TaskListError as error:
            raise Refused(error.reason, f"ConfigMap {source.name!r}, {source.key}: {error}") from error

    # The reconcile

    async def _reconcile(self, obj: Object, thing: RolloutJob, view: RolloutJob) -> float | None:
        context = self.context
        before = thing.status
        own = {k: v for k, v in thing.metadata.annotations.items() if k not in (CLOSED, CANCEL_REASON)}
        meta = thing.metadata.model_copy(update={"annotations": {**own, **view.metadata.annotations}})
        job = thing.model_copy(update={"metadata": meta, "status": with_counts(before, view.status)})
        pods = self.children.pods(self._life.uid, self.component)
        actions = _JobActions(self, obj, before, job, view, pods)
        if holds(before.conditions, "Finished") and _settled(job) and not pods:
            # Nothing remains but to wait for the end of its time to live.
            observed, profile = reconcile_pass.observed_job(job, (), None, 0), context.profile
        else:
            # This comes before the launches of the plan. The leases of a successor are never taken back.
            workloads = await self._deaths.noted(
                owner_of(job), self.children.observed(pods), context.plane.client.worker_died
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
        obj = self.context.pools.get(self.pool)
        if obj is None or is_leaving(obj):
            return None
        return self.context.pool_states.get(self.pool) or PoolState(False)

    def tokenizer(self) -> str:
        """Return the tokenizer of the job's pool, or an empty string if there is none."""
        obj = None if self.pool is None else self.context.pools.get(self.pool)
        spec = {} if obj is None else obj["spec"]
        return str(spec.get("tokenizer") or spec.get("model") or "")

    async def report(self, view: RolloutJob, status: RolloutJobStatus) -> None:
        """Report the status to the control plane, in its own generations, unless it has it already."""
        plane = self.context.plane
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

    async def _mirror(self, obj: Object, thing: RolloutJob, view: RolloutJob) -> float | None:
        wait = await super()._mirror(obj, thing, view)
        if view.status.completion_time is not None and not holds(view.status.conditions, "Finished"):
            # All rollouts have ended, so the polls leave the job out, but its driver has yet to report the
            # final status.
            return POLL_SECONDS
        return wait

    def _facts(self, status: RolloutJobStatus) -> tuple[object, ...]:
        conditions = [
            (one.type, one.status, one.reason, one.observed_generation) for one in status.conditions
        ]
        return status.phase, status.observed_generation, conditions

    # Refusal and deletion

    def _refused(
        self, status: RolloutJobStatus, generation: int, reason: str, message: str
    ) -> RolloutJobStatus:
        return reconcile_pass.refused(status, generation, reason, message, self.context.now())

    def _stop(self) -> None:
        self.context.admissions.leave(self.key)

    async def _unregister(self, uid: str) -> None:
        plane = self.context.plane
        if await plane.find_job(self.key, uid) is not None:
            with suppress(NotFound):
                await plane.client.delete_job(*self.key)
        plane.unfinished.forget(self.key)


@dataclass(slots=True)
class _JobActions:
    """One pass over a job whose workers are pods and whose status is written to its object first."""

    loop: JobLoop
    obj: Object
    before: RolloutJobStatus
    """The status of the object."""
    job: RolloutJob
    """The object with what the control plane knows."""
    view: RolloutJob
    """The job as the control plane knows it."""
    pods: Sequence[Object]
    """The job's pods at the beginning of the pass."""
    secret: JobSecret | None = None
    """The Secret that workers mount. If it is None, no workers are launched any more."""
    wait: float | None = None
    """The seconds until a postponed status has to be written."""

    def planned(self, plan: Plan[RolloutJobStatus]) -> None:
        job = self.job.model_copy(update={"status": plan.status})
        self.loop.context.admissions.note(thing_key(job), job)

    async def prepare(self, plan: Plan[RolloutJobStatus]) -> None:
        if self.secret is not None and plan.launch:
            await self.loop.context.token.ensure(self.job, self.secret)

    async def carry_out(self, plan: Plan[RolloutJobStatus]) -> None:
        if self.secret is None:
            return
        context, children = self.loop.context, self.loop.children
        settings, tokenizer = context.settings, self.loop.tokenizer()
        build = partial(
            worker_pod, job=self.job, settings=settings, secret=self.secret.name, tokenizer=tokenizer
        )
        # A worker that stands ready has neither the cache nor the token of the hub.
        take = None if needs_hub(tokenizer, settings) else partial(context.ready.take, job=self.job)
        await children.carry_out(self.job.metadata.namespace, plan, build, self.pods, take)
        for pod in children.pods(self.job.metadata.uid or "", self.loop.component):
            if not is_leaving(pod):
                await context.ready.offer(pod)

    async def show(self, status: RolloutJobStatus) -> None:
        self.wait = await self.loop.write(self.obj, self.before, status)

    async def cancel(self) -> None:
        with suppress(NotFound):
            await self.loop.context.plane.client.cancel(self.job)

    async def report(self, status: RolloutJobStatus) -> None:
        if self.wait is None:  # A status that the object does not show yet is not reported.
            await self.loop.report(self.view, status)


def with_counts(status: RolloutJobStatus, known: RolloutJobStatus) -> RolloutJobStatus:
    """Return the object's status with the counts of the control plane."""
    return status.model_copy(
        update={
            "counts": known.counts,
            "reward_mean": known.reward_mean,
            "reward_text": known.reward_text,
            "dynamic_sampling": known.dynamic_sampling,
            "skipped_rows": known.skipped_rows,
            "plugins": known.plugins,
            "advice": known.advice,
            "start_time": status.start_time or known.start_time,
            "completion_time": status.completion_time or known.completion_time,
        }
    )


def _settled(job: RolloutJob) -> bool:
    counts = job.status.counts
    return counts.succeeded + counts.failed + counts.cancelled == counts.total


def _of_object(job: RolloutJob) -> RolloutJob:
    """Return a closed view of a finished job that the control plane does not have."""
    meta = job.metadata.model_copy(
        update={"uid": None, "annotations": {**job.metadata.annotations, CLOSED: "true"}}
    )
    return job.model_copy(update={"metadata": meta})
