"""A cluster and a control plane in memory, as strict as the real ones where the operator relies on it."""

from __future__ import annotations

import asyncio
import builtins
import copy
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rollyard_client import Conflict, DriverClient, Invalid, NotFound, ServerUnavailable
from rollyard_crds import (
    STAGES,
    BackendPool,
    BackendPoolStatus,
    BackendStatus,
    RolloutJob,
    RolloutJobStatus,
    Task,
)
from rollyard_crds.fields.annotations import CANCEL_REASON, CLOSED, OBJECT_UID
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.unfinished import UnfinishedJob, UnfinishedJobs
from rollyard_crds.workers import AssignmentOffer, AssignmentOffered, WorkerDeath, WorkerDied
from rollyard_operator.controllers.control_plane_view import object_uid, thing_key
from rollyard_operator.kube.client import KubeClient, WatchError, WatchEvent
from rollyard_operator.kube.errors import KubeConflict, KubeError

Object = dict[str, Any]
Where = tuple[str, str, str]


def _merge(document: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), value)
    return merged


def stamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _labels(selector: str) -> dict[str, str]:
    return dict(part.split("=") for part in selector.split(",") if part)


def _chosen(obj: Object, namespace: str | None, wanted: dict[str, str]) -> bool:
    labels = obj["metadata"].get("labels") or {}
    return namespace in (None, obj["metadata"]["namespace"]) and wanted.items() <= labels.items()


class FakeKube(KubeClient):
    """An API server: uids, generations, resource versions, preconditions, owners, a watch, and refusals."""

    def __init__(self) -> None:
        self.objects: dict[Where, Object] = {}
        self.events: list[tuple[str, str, str, str]] = []
        """Kind and name, type, reason and message of each event."""
        self.calls: list[tuple[str, str, str]] = []
        """Verb, kind and name of each call."""
        self.refuse: Callable[[str, Object], KubeError | None] = lambda verb, obj: None
        self.watchers: list[Callable[[str, Object], None]] = []
        self.deaf = False
        """Whether watches miss what happens."""
        self._watches: list[tuple[str, str | None, dict[str, str], asyncio.Queue[WatchEvent | None]]] = []
        self._versions = itertools.count(1000)
        self._uids = itertools.count(1)

    # What tests do as kubectl, the kubelet or the garbage collector.

    def put(self, obj: Object) -> Object:
        """Apply an object as another user of kubectl."""
        where = self._where(obj)
        if where in self.objects:
            old = self.objects[where]
            return self._save({**old, **{k: v for k, v in obj.items() if k not in ("metadata", "status")}})
        return self._insert(obj)

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Remove an object, and the pods that it owned."""
        gone = self.objects.pop((kind, namespace, name))
        gone["metadata"]["resourceVersion"] = str(next(self._versions))
        self._tell("DELETED", gone)
        for where, one in list(self.objects.items()):
            owners = one["metadata"].get("ownerReferences") or ()
            if where in self.objects and any(o["uid"] == gone["metadata"]["uid"] for o in owners):
                self.remove(*where)

    def pod_status(self, namespace: str, name: str, status: Object) -> None:
        """Set a pod's status as the kubelet does."""
        pod = copy.deepcopy(self.objects[("Pod", namespace, name)])
        pod["status"] = status
        self._save(pod)

    def of(self, kind: str) -> list[Object]:
        return [obj for (one, _, _), obj in sorted(self.objects.items()) if one == kind]

    def list_version(self) -> int:
        """Return the resource version of a list that is made now."""
        return next(self._versions)

    def names(self, kind: str) -> list[str]:
        return [obj["metadata"]["name"] for obj in self.of(kind)]

    def break_watches(self) -> None:
        """Answer all watches that their resource version is too old."""
        for _, _, _, queue in self._watches:
            queue.put_nowait(None)

    # What the operator calls.

    async def snapshot(
        self, kind: str, namespace: str | None, selector: str = ""
    ) -> tuple[builtins.list[Object], str]:
        listed = await self.list(kind, namespace, selector)
        return listed, str(self.list_version())

    async def watch(
        self, kind: str, namespace: str | None, selector: str, version: str
    ) -> AsyncGenerator[WatchEvent, None]:
        await self._enter("watch", {"kind": kind, "metadata": {"namespace": namespace, "name": ""}})
        queue: asyncio.Queue[WatchEvent | None] = asyncio.Queue()
        wanted = _labels(selector)
        # What happened between the list and the watch comes first.
        for obj in self.of(kind):
            if _chosen(obj, namespace, wanted) and int(obj["metadata"]["resourceVersion"]) > int(version):
                queue.put_nowait(WatchEvent("MODIFIED", copy.deepcopy(obj)))
        mine = (kind, namespace, wanted, queue)
        self._watches.append(mine)
        try:
            while True:
                event = await queue.get()
                if event is None:
                    raise WatchError(410, "Expired", "too old resource version")
                yield event
        finally:
            self._watches.remove(mine)

    async def apply(self, obj: Object) -> Object:
        await self._enter("apply", obj)
        where = self._where(obj)
        if where not in self.objects:
            return copy.deepcopy(self._insert(obj))
        return copy.deepcopy(self._save(_merge(self.objects[where], obj)))

    async def create(self, obj: Object) -> Object:
        await self._enter("create", obj)
        if self._where(obj) in self.objects:
            raise KubeConflict(409, "AlreadyExists", f"{obj['metadata']['name']} already exists")
        return copy.deepcopy(self._insert(obj))

    async def delete(
        self, kind: str, namespace: str, name: str, *, grace: int | None = None, uid: str | None = None
    ) -> None:
        await self._enter("delete", {"kind": kind, "metadata": {"namespace": namespace, "name": name}})
        there = self.objects.get((kind, namespace, name))
        if there is None or uid not in (None, there["metadata"]["uid"]):
            return
        ended = (there.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if kind == "Pod" and grace != 0 and not ended:
            self._save(_merge(there, {"metadata": {"deletionTimestamp": stamp()}}))
        else:
            self.remove(kind, namespace, name)

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        await self._enter("get", {"kind": kind, "metadata": {"namespace": namespace, "name": name}})
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Object]:
        await self._enter("list", {"kind": kind, "metadata": {"namespace": namespace, "name": ""}})
        wanted = _labels(selector)
        return [copy.deepcopy(obj) for obj in self.of(kind) if _chosen(obj, namespace, wanted)]

    async def patch(
        self,
        kind: str,
        namespace: str,
        name: str,
        body: Object,
        *,
        uid: str | None = None,
        version: str | None = None,
    ) -> Object | None:
        return await self._patch("patch", (kind, namespace, name), body, uid, version)

    async def patch_status(
        self, kind: str, namespace: str, name: str, status: Object, *, version: str
    ) -> Object | None:
        return await self._patch("patch_status", (kind, namespace, name), {"status": status}, None, version)

    async def event(self, obj: Object, type: str, reason: str, message: str) -> None:
        await asyncio.sleep(0)
        self.events.append((f"{obj['kind']}/{obj['metadata']['name']}", type, reason, message))

    # How it works.

    async def _patch(
        self, verb: str, where: Where, body: Object, uid: str | None, version: str | None
    ) -> Object | None:
        kind, namespace, name = where
        await self._enter(verb, {"kind": kind, "metadata": {"namespace": namespace, "name": name}})
        there = self.objects.get(where)
        if there is None or uid not in (None, there["metadata"]["uid"]):
            return None
        # Nothing else happens between this comparison and the write, as in the real one.
        if version not in (None, there["metadata"]["resourceVersion"]):
            raise KubeConflict(409, "Conflict", "the object has been modified")
        return copy.deepcopy(self._save(_merge(there, body)))

    async def _enter(self, verb: str, obj: Object) -> None:
        await asyncio.sleep(0)
        self.calls.append((verb, obj["kind"], obj["metadata"]["name"]))
        refusal = self.refuse(verb, obj)
        if refusal is not None:
            raise refusal

    @staticmethod
    def _where(obj: Object) -> Where:
        return obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"]

    def _insert(self, obj: Object) -> Object:
        obj = json.loads(json.dumps(obj))
        number = next(self._uids)
        obj["metadata"] |= {
            "uid": f"{number:08x}-0000-4000-8000-000000000000",
            "generation": 1,
            "creationTimestamp": stamp(),
        }
        obj.pop("status", None)
        self.objects[self._where(obj)] = obj
        return self._stamp(obj, "ADDED")

    def _save(self, obj: Object) -> Object:
        obj, old = json.loads(json.dumps(obj)), self.objects[self._where(obj)]
        if obj == old:
            return old
        if obj.get("spec") != old.get("spec"):
            obj["metadata"]["generation"] = old["metadata"]["generation"] + 1
        self.objects[self._where(obj)] = obj
        return self._stamp(obj, "MODIFIED")

    def _stamp(self, obj: Object, verb: str) -> Object:
        obj["metadata"]["resourceVersion"] = str(next(self._versions))
        self._tell(verb, obj)
        return obj

    def _tell(self, verb: str, obj: Object) -> None:
        for watcher in self.watchers:
            watcher(verb, copy.deepcopy(obj))
        for kind, namespace, wanted, queue in () if self.deaf else self._watches:
            if kind == obj["kind"] and _chosen(obj, namespace, wanted):
                queue.put_nowait(WatchEvent(verb, copy.deepcopy(obj)))


def _told(thing: Any, status: Any, *names: str) -> Any:
    """Return the thing with what its driver says of it."""
    told = {name: getattr(status, name) for name in ("conditions", "observed_generation", *names)}
    return thing.model_copy(update={"status": thing.status.model_copy(update=told)})


def _new() -> dict[str, Any]:
    """Return metadata of what was made just now."""
    return {"generation": 1, "creation_timestamp": datetime.now(UTC)}


class FakeControlPlane(DriverClient):
    """Jobs and pools as the control plane keeps them; rollouts are only counts."""

    def __init__(self) -> None:
        self.all_jobs: dict[tuple[str, str], RolloutJob] = {}
        self.all_pools: dict[tuple[str, str], BackendPool] = {}
        self.tasks: dict[tuple[str, str], list[Task]] = {}
        self.deleted: list[str] = []
        self.down = False
        self.passes = 0
        """How often all pools were asked for, as in each pass of an operator over the store."""
        self.deaths: list[WorkerDied] = []
        self.offers: dict[str, AssignmentOffer] = {}
        """The jobs that were offered, by ready worker."""
        self.useful: set[str] = set()
        """The names of the workers that completed a stage before they died."""
        self.refuse: Callable[[RolloutJob], Exception | None] = lambda job: None
        self._uids = itertools.count(1)

    # What tests do as users of REST, or as the rollouts.

    def post_job(self, job: RolloutJob) -> None:
        self._insert(job, None)

    def post_pool(self, pool: BackendPool) -> None:
        self._insert_pool(pool)

    def counts(self, key: tuple[str, str], **counts: Any) -> None:
        job = self.all_jobs[key]
        known = job.status.counts.model_dump() | counts
        changes: dict[str, Any] = {"counts": known}
        if known["succeeded"]:
            changes |= {"reward_mean": 0.5, "reward_text": "0.500"}
        if known["succeeded"] + known["failed"] + known["cancelled"] == known["total"]:
            changes["completion_time"] = datetime.now(UTC)
        status = RolloutJobStatus.model_validate(job.status.model_dump() | changes)
        self.all_jobs[key] = job.model_copy(update={"status": status})

    def change(self, key: tuple[str, str], **spec: Any) -> None:
        """Send a PATCH over REST."""
        self.all_jobs[key] = self._changed(self.all_jobs[key], spec)

    def change_pool(self, key: tuple[str, str], **spec: Any) -> None:
        self.all_pools[key] = self._changed(self.all_pools[key], spec)

    @staticmethod
    def _changed(thing: Any, spec: dict[str, Any]) -> Any:
        meta = thing.metadata.model_copy(update={"generation": thing.metadata.generation + 1})
        return thing.model_copy(update={"metadata": meta, "spec": thing.spec.model_copy(update=spec)})

    def delete_over_rest(self, key: tuple[str, str]) -> None:
        self.all_jobs[key].metadata.annotations[CANCEL_REASON] = "Deleted"

    # What the operator calls.

    async def _enter(self) -> None:
        await asyncio.sleep(0)
        if self.down:
            raise ServerUnavailable("nobody listens")

    async def jobs(self) -> list[RolloutJob]:
        await self._enter()
        return [job.model_copy(deep=True) for job in self.all_jobs.values()]

    async def unfinished_jobs(self) -> list[RolloutJob]:
        return [job for job in await self.jobs() if job.status.completion_time is None]

    async def unfinished(self, revision: int | None = None, wait: float = 0.0) -> UnfinishedJobs:
        deadline = asyncio.get_running_loop().time() + wait
        while True:
            found = [
                UnfinishedJob(
                    namespace=job.metadata.namespace,
                    name=job.metadata.name,
                    uid=job.metadata.uid or "",
                    generation=job.metadata.generation or 0,
                    cancel_reason=job.metadata.annotations.get(CANCEL_REASON, ""),
                )
                for job in await self.unfinished_jobs()
            ]
            answer = UnfinishedJobs(revision=hash(repr(found)) & (2**53 - 1), jobs=found)
            if answer.revision != revision or asyncio.get_running_loop().time() >= deadline:
                return answer
            await asyncio.sleep(0.005)

    async def job(self, namespace: str, name: str) -> RolloutJob:
        await self._enter()
        if (namespace, name) not in self.all_jobs:
            raise NotFound("no such job", reason="JobNotFound", status=404)
        return self.all_jobs[namespace, name].model_copy(deep=True)

    async def register_job(
        self,
        job: RolloutJob,
        tasks: Sequence[Task | Mapping[str, Any]] | None = None,
        skipped: SkippedRows | None = None,
    ) -> RolloutJob:
        await self._enter()
        refusal = self.refuse(job)
        if refusal is not None:
            raise refusal
        key, there = thing_key(job), self.all_jobs.get(thing_key(job))
        if there is not None and object_uid(there) not in ("", object_uid(job)):
            await self.delete_job(*key)
            there = None
        if there is None:
            if job.spec.tasks.config_map_ref is not None and tasks is None:
                raise Invalid("tasks: is required", reason="InvalidTasks", status=422)
            made = self._insert(job, tasks)
            made.status.skipped_rows = skipped if skipped is not None and skipped.count else None
            return made.model_copy(deep=True)
        if there.spec.handler != job.spec.handler:
            raise Conflict("another spec stands", reason="AlreadyExists", status=409)
        if there.spec != job.spec:
            there = self._changed(
                there, {name: getattr(job.spec, name) for name in type(job.spec).model_fields}
            )
        annotations = {**there.metadata.annotations, OBJECT_UID: object_uid(job)}
        meta = there.metadata.model_copy(update={"annotations": annotations})
        self.all_jobs[key] = there.model_copy(update={"metadata": meta})
        return self.all_jobs[key].model_copy(deep=True)

    def _insert(self, job: RolloutJob, tasks: Sequence[Task | Mapping[str, Any]] | None) -> RolloutJob:
        given = [
            Task.model_validate(task)
            for task in (tasks if tasks is not None else job.spec.tasks.inline or ())
        ]
        total = len(given) * job.spec.samples_per_task
        annotations = dict(job.metadata.annotations)
        if not job.spec.tasks.stream:
            annotations[CLOSED] = "true"
        meta = job.metadata.model_copy(
            update={"annotations": annotations, "uid": f"plane-{next(self._uids)}", **_new()}
        )
        status = RolloutJobStatus.model_validate(
            {"counts": {"total": total, "init": {"queued": total}}, "startTime": datetime.now(UTC)}
        )
        made = job.model_copy(update={"metadata": meta, "status": status}, deep=True)
        self.all_jobs[thing_key(job)] = made
        self.tasks[thing_key(job)] = given
        return made

    async def delete_job(self, namespace: str, name: str) -> None:
        await self._enter()
        if self.all_jobs.pop((namespace, name), None) is None:
            raise NotFound("no such job", status=404)
        self.deleted.append(f"RolloutJob/{name}")

    async def put_job_status(self, job: RolloutJob, status: RolloutJobStatus) -> RolloutJob:
        await self._enter()
        known = self.all_jobs.get(thing_key(job))
        if known is None:
            raise NotFound("no such job", status=404)
        told = {
            name: getattr(status, name) for name in ("phase", "conditions", "message", "observed_generation")
        }
        self.all_jobs[thing_key(job)] = known.model_copy(
            update={"status": known.status.model_copy(update=told)}
        )
        return self.all_jobs[thing_key(job)].model_copy(deep=True)

    async def worker_died(self, report: WorkerDied) -> WorkerDeath:
        await self._enter()
        self.deaths.append(report)
        return WorkerDeath(returned=0, completed=report.worker in self.useful)

    async def offer(self, offered: AssignmentOffer) -> AssignmentOffered:
        await self._enter()
        job = self.all_jobs.get((offered.namespace, offered.job))
        if job is None or offered.uid not in (job.metadata.uid, job.metadata.annotations.get(OBJECT_UID)):
            raise NotFound("no such job", status=404, reason="JobNotFound")
        there = self.offers.setdefault(offered.worker, offered)
        if there.uid != offered.uid:
            raise Conflict("another job", status=409, reason="AlreadyAssigned")
        return AssignmentOffered(taken=False)

    async def cancel(self, job: RolloutJob) -> RolloutJob:
        await self._enter()
        key = thing_key(job)
        self.all_jobs[key].metadata.annotations.setdefault(CANCEL_REASON, "Cancelled")
        counts = self.all_jobs[key].status.counts
        ended = counts.succeeded + counts.failed
        none = {"queued": 0, "active": 0}
        self.counts(key, cancelled=counts.total - ended, **dict.fromkeys(STAGES, none))
        return self.all_jobs[key].model_copy(deep=True)

    async def pools(self) -> list[BackendPool]:
        self.passes += 1
        await self._enter()
        return [pool.model_copy(deep=True) for pool in self.all_pools.values()]

    async def register_pool(self, pool: BackendPool) -> BackendPool:
        await self._enter()
        key, there = thing_key(pool), self.all_pools.get(thing_key(pool))
        if there is None:
            return self._insert_pool(pool).model_copy(deep=True)
        if there.spec != pool.spec:
            there = self._changed(
                there, {name: getattr(pool.spec, name) for name in type(pool.spec).model_fields}
            )
        meta = there.metadata.model_copy(update={"annotations": dict(pool.metadata.annotations)})
        self.all_pools[key] = there.model_copy(update={"metadata": meta})
        return self.all_pools[key].model_copy(deep=True)

    def _insert_pool(self, pool: BackendPool) -> BackendPool:
        meta = pool.metadata.model_copy(update={"uid": f"plane-{next(self._uids)}", **_new()})
        made = pool.model_copy(update={"metadata": meta, "status": BackendPoolStatus()}, deep=True)
        self.all_pools[thing_key(pool)] = made
        return made

    async def delete_pool(self, namespace: str, name: str) -> None:
        await self._enter()
        if self.all_pools.pop((namespace, name), None) is None:
            raise NotFound("no such pool", status=404)
        self.deleted.append(f"BackendPool/{name}")

    async def put_pool_status(self, pool: BackendPool, status: BackendPoolStatus) -> BackendPool:
        await self._enter()
        known = self.all_pools[thing_key(pool)]
        told = {
            name: getattr(status, name)
            for name in ("conditions", "observed_generation", "replicas", "selector")
        }
        self.all_pools[thing_key(pool)] = known.model_copy(
            update={"status": known.status.model_copy(update=told)}
        )
        return self.all_pools[thing_key(pool)].model_copy(deep=True)

    async def put_backends(self, pool: BackendPool, backends: Sequence[BackendStatus]) -> BackendPool:
        await self._enter()
        known = self.all_pools[thing_key(pool)]
        ready = sum(one.ready for one in backends)
        status = known.status.model_copy(update={"backends": list(backends), "ready_replicas": ready})
        self.all_pools[thing_key(pool)] = known.model_copy(update={"status": status})
        return self.all_pools[thing_key(pool)].model_copy(deep=True)
