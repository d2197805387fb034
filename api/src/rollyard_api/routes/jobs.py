"""RolloutJobs: submit, get, list, change, cancel and delete them, push tasks to streams, and upload files.

Jobs name an uploaded file by its SHA-256 instead of by a URL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from rollyard_crds.base import NAME_PATTERN, Model
from rollyard_crds.fields import signals
from rollyard_crds.fields.dynamic_sampling import MAX_STEP_GROUPS
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.reading.manifest import ManifestError, parse
from rollyard_crds.reading.yaml_text import YamlError, load_one
from rollyard_crds.rolloutjob import RolloutJob, RolloutJobStatus
from rollyard_crds.unfinished import UnfinishedJobs
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core.codec import malformed_body, validated
from rollyard_api.core.problems import ApiError, Invalid, NotFound, TooLarge
from rollyard_api.core.wakeups import UNFINISHED
from rollyard_api.jobs import blobs, job_views, jobs, manifests, registration, tasks
from rollyard_api.jobs.manifests import NewJob
from rollyard_api.jobs.tasks import TaskRow
from rollyard_api.rollouts.harness_quota import HarnessUse
from rollyard_api.routes.common import (
    Call,
    DefaultNamespace,
    Named,
    Plane,
    RestCall,
    StrictRoute,
    Wait,
    answer,
    body_schema,
    page_answer,
)
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows

router = APIRouter(prefix="/v1/rolloutjobs", tags=["rolloutjobs"], route_class=StrictRoute)
of_drivers = APIRouter(prefix="/v1/unfinished", tags=["rolloutjobs"], route_class=StrictRoute)
of_blobs = APIRouter(prefix="/v1/blobs", tags=["blobs"], route_class=StrictRoute)


class JobPatch(Model):
    """The fields of a job that may be changed."""

    suspend: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None


class Cancel(Model):
    """What to cancel: the job, one of its groups, or one rollout."""

    group: str | None = None
    rollout: str | None = None


class Target(Model, strict=True):
    """A step of a stream with dynamic sampling."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=128)]
    """A name that the trainer chooses. The same name again means the same step."""
    groups: Annotated[int, Field(ge=1, le=MAX_STEP_GROUPS)] | None = None
    """The number of groups with a signal that the step needs; default: the job's `targetGroups`."""


MAX_TASKS_READ: Final = 32
"""The largest number of tasks that one request may read."""
MAX_YAML_BYTES: Final = 4 << 20


async def manifest_of(
    call: RestCall, kind: Literal["RolloutJob", "BackendPool"], namespace: str | None
) -> Any:
    """Return the JSON or YAML body as a checked manifest, with `namespace` as the default namespace."""
    if "yaml" in call.request.headers.get("content-type", ""):
        body = await call.request.body()
        if len(body) > MAX_YAML_BYTES:
            raise TooLarge(f"a manifest in YAML may have {MAX_YAML_BYTES} bytes; send JSON")
        try:
            # YAML is parsed in a thread, because it takes seconds where JSON takes milliseconds.
            document = await call.plane.parsing.run(partial(load_one, body), namespace or "")
        except YamlError as error:
            raise malformed_body(f"the body is not YAML that is accepted: {error}") from error
    else:
        document = await call.document()
    return checked(document, kind, namespace)


def checked(document: Any, kind: Literal["RolloutJob", "BackendPool"], namespace: str | None) -> Any:
    """Return a document as a manifest of this kind, with `namespace` as the default namespace.

    Raises:
        Invalid: The document is refused; `errors` names each field.
    """
    if namespace and isinstance(document, dict) and isinstance(document.get("metadata"), dict):
        document["metadata"].setdefault("namespace", namespace)
    try:
        manifest = parse(document)
    except ManifestError as error:
        raise Invalid.of(*error.problems, reason=error.reason) from error
    if manifest.kind != kind:
        raise Invalid.of(f"kind: this call takes a {kind} (got {manifest.kind})", reason="InvalidManifest")
    return manifest


def registered(
    document: Any, kind: Literal["RolloutJob", "BackendPool"], namespace: str | None, name: str
) -> Any:
    """Return the manifest of a PUT, with the metadata that is kept.

    Its name and namespace must be those of the request.

    Raises:
        Invalid: The document is refused; `errors` names each field.
    """
    manifest = checked(document, kind, namespace)
    meta = manifest.metadata
    problems = [
        f"metadata.{field}: must be {expected!r}, as the call says (got {actual!r})"
        for field, expected, actual in (
            ("name", name, meta.name),
            ("namespace", namespace or meta.namespace, meta.namespace),
        )
        if expected != actual
    ]
    if problems:
        raise Invalid.of(*problems, reason="InvalidManifest")
    return manifest.model_copy(update={"metadata": registration.of_object(meta)})


def _read(
    conn: Connection, namespace: str, name: str, *, bare: bool = False, max_harness_runs: int | None = None
) -> dict[str, Any]:
    job = job_rows.find(conn, namespace, name)
    use = None if max_harness_runs is None else HarnessUse.of(conn, [job], max_harness_runs)
    return job_views.document(conn, job, bare=bare, harness_use=use)


async def _tasks(
    plane: ControlPlane, job: RolloutJob, skipped: SkippedRows, listed: Any = None
) -> Sequence[TaskRow]:
    """Return the tasks of a new job; `listed` is what its driver read from a ConfigMap."""
    source = job.spec.tasks
    if listed is not None:
        return await plane.parsing.run(partial(tasks.read_list, listed), job.metadata.namespace)
    if source.url is not None:
        return await plane.task_reader.read(source.url, job.metadata.namespace, source, skipped)
    if source.inline is not None:
        return tasks.rows(source.inline, "spec.tasks.inline", source)
    if source.config_map_ref is not None:
        raise Invalid.of(
            "spec.tasks.configMapRef: only a driver on Kubernetes reads ConfigMaps: apply the job there with "
            "kubectl, or give 'url', 'inline' or 'stream: true'",
            reason="InvalidTasks",
        )
    return []


async def _complete(
    plane: ControlPlane, job: RolloutJob, bare: NewJob, skipped: SkippedRows, listed: Any = None
) -> NewJob:
    """Return a new job with its tasks, after a check of all that it needs; `listed` is as for `_tasks`.

    Raises:
        Invalid: The job needs what nothing offers, names what the installer does not allow, or can provably
            not reach the target of its dynamic sampling; `errors` names each field.
    """
    used = await plane.extensions.used_by(job.spec)
    plane.sandbox_hosts.check(job.spec)
    plane.reward_services.check(job.spec, job.metadata.namespace)
    rows = await _tasks(plane, job, skipped, listed)
    problems = signals.problems(job.spec, None if job.spec.tasks.stream else len(rows))
    if problems:
        raise Invalid.of(*problems, reason=signals.OUT_OF_REACH)
    return replace(bare, tasks=rows, skipped=skipped, plugins=used)


@router.post("", openapi_extra=body_schema(RolloutJob))
async def submit(call: Call, namespace: DefaultNamespace = None) -> Response:
    """Submit a manifest: 201 created, 200 the same job exists, 409 it has another spec, 422 refused."""
    plane = call.plane
    job: RolloutJob = await manifest_of(call, "RolloutJob", namespace)
    # A repeat is answered before its tasks are read, because their file may have been removed since.
    bare = manifests.prepare(job)
    repeated = await plane.database.read(partial(jobs.same, new=bare))
    if repeated:
        created = False
    else:
        new = await _complete(plane, job, bare, SkippedRows())
        created = await plane.database.write(
            partial(jobs.create, new=new, quota=plane.settings.rollout_quota)
        )
    read = partial(_read, namespace=bare.namespace, name=bare.name)
    document = await plane.database.read(read)
    if repeated:
        await _mark_edited(plane, job, document)
    return answer(document, 201 if created else 200)


async def _mark_edited(plane: ControlPlane, job: RolloutJob, document: dict[str, Any]) -> None:
    """Mark each plugin of a job whose text the job would not get if it were submitted now."""
    kept = document["status"].get("plugins")
    if not kept:
        return
    try:
        current = {plugin.sha256 for plugin in await plane.extensions.used_by(job.spec)}
    except Invalid:
        current = set()  # What the plugin offered is gone, or the plugin is broken.
    except ApiError:
        return  # The files cannot be read now.
    for plugin in kept:
        if plugin["sha256"] not in current:
            plugin["edited"] = True


class Registration(Model):
    """A job as its driver reports it."""

    manifest: dict[str, Any]
    """The RolloutJob. Its status is ignored."""
    tasks: list[dict[str, Any]] | None = None
    """The content of the ConfigMap that `spec.tasks.configMapRef` names. It is read only for a new job."""
    skipped: SkippedRows | None = None
    """The rows of the ConfigMap that the driver left out, where `spec.tasks.onBadRow` is `skip`."""


@router.put("/{name}", openapi_extra=body_schema(Registration))
async def register(call: Call, name: str, namespace: DefaultNamespace = None) -> Response:
    """Register a driver's job: 201 created, 200 exists and updated, 409 another job exists, 422 refused.

    The annotation `rollyard.dev/object-uid` distinguishes a new job with the same name, which replaces the
    old one, from a changed one. The answer omits inline tasks (`spec.tasks` then has `stream`).
    """
    plane = call.plane
    body = await call.body(Registration)
    job: RolloutJob = registered(body.manifest, "RolloutJob", namespace, name)
    for field, value in (("tasks", body.tasks), ("skipped", body.skipped)):
        if value is not None and job.spec.tasks.config_map_ref is None:
            raise Invalid.of(
                f"{field}: belong to a job whose spec.tasks is a configMapRef", reason="InvalidTasks"
            )
    new = replace(manifests.prepare(job), object_uid=registration.object_uid(job.metadata))
    op = partial(registration.register_job, quota=plane.settings.rollout_quota)
    result = await plane.database.write(partial(op, new=new))
    if result.made is None:
        if body.tasks is None and job.spec.tasks.config_map_ref is not None:
            raise Invalid.of(
                "tasks: is required where spec.tasks is a configMapRef and the job is not there yet",
                reason="InvalidTasks",
            )
        new = await _complete(plane, job, new, body.skipped or SkippedRows(), body.tasks)
        result = await plane.database.write(partial(op, new=new))
    if result.replaced is not None:
        await plane.cancel_rest(result.replaced)
    read = partial(_read, namespace=new.namespace, name=new.name, bare=True)
    return answer(await plane.database.read(read), 201 if result.made else 200)


@router.get("")
async def list_jobs(
    call: Call,
    namespace: Annotated[str | None, Query(max_length=63)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 500,
    after: Annotated[str, Query(alias="continue", pattern=r"^[0-9]*$", max_length=18)] = "",
    omit: Literal["", "tasks"] = "",
    finished: bool | None = None,
) -> Response:
    """List the jobs of one namespace, or of all. `metadata.continue` is the `continue` of the next page.

    `finished=false` selects the jobs that a driver has to handle: they have unfinished rollouts, an open
    stream, or an object that is to be deleted. `finished=true` selects those that have ended.
    `omit=tasks` omits inline tasks (`spec.tasks` then has `stream`), for drivers that list jobs often.
    Viewers never see inline tasks.
    """
    items, more = await call.plane.database.read(
        partial(
            job_views.listed,
            namespace=namespace,
            limit=limit,
            after=int(after or 0),
            bare=omit == "tasks" or call.caller.role == "viewer",
            finished=finished,
            max_bytes=call.plane.settings.page_bytes,
            max_harness_runs=call.plane.settings.max_harness_runs_per_namespace,
        )
    )
    kind = {"apiVersion": "rollyard.dev/v1alpha1", "kind": "RolloutJobList"}
    return page_answer(items, None if more is None else str(more), **kind)


@router.get("/{name}")
async def get_job(job: Named) -> Response:
    """Return a job, with live counts in its status.

    Viewers do not see inline tasks, which hold answers and hidden tests: `spec.tasks` then has `stream`.
    """
    most = job.plane.settings.max_harness_runs_per_namespace
    read = partial(_read, bare=job.caller.role == "viewer", max_harness_runs=most)
    return answer(await job.read(read))


@router.delete("/{name}", status_code=202)
async def delete_job(call: Named) -> Response:
    """Cancel a job and remove it. Its records in the trajectory store are kept.

    A job that is registered for a Kubernetes object is cancelled but stays (`"deleted": false`) until its
    driver, which deletes the object, deletes the job too.
    """
    job_id = await call.write(registration.delete_job if call.caller.role != "driver" else jobs.delete)
    await call.plane.cancel_rest(job_id)
    job = await call.plane.database.read(partial(job_rows.by_id, job_id=job_id))
    deleted = job is None or job.deleted_at is not None
    return answer({"name": call.name, "namespace": call.namespace, "deleted": deleted}, 202)


@router.patch("/{name}", openapi_extra=body_schema(JobPatch))
async def patch_job(job: Named) -> Response:
    """Suspend or resume a job, or change its priority."""
    body = await job.body(JobPatch)
    await job.write(jobs.patch, suspend=body.suspend, priority=body.priority)
    return answer(await job.read(_read))


@router.put("/{name}/status", openapi_extra=body_schema(RolloutJobStatus))
async def put_status(job: Named) -> Response:
    """Take the driver's report: phase, conditions, observedGeneration and message."""
    document = await job.document()
    status = validated(RolloutJobStatus, document)
    reported = {
        k: v for k, v in status.to_json().items() if k in document or k.lower() in ("phase", "conditions")
    }
    await job.write(jobs.put_status, reported)
    return answer(await job.read(_read))


@router.post("/{name}/tasks")
async def push_tasks(job: Named) -> Response:
    """Push tasks to a stream, as NDJSON or {"tasks": [...]}. Repeats are harmless because of the task ids."""
    if "ndjson" in job.request.headers.get("content-type", ""):
        try:
            text = (await job.request.body()).decode()
        except UnicodeDecodeError as error:
            raise malformed_body(f"the body is not UTF-8: {error}") from error
        read = partial(tasks.read_lines, text)
    else:
        document = await job.document()
        read = partial(tasks.read_list, document.get("tasks") if isinstance(document, dict) else None)
    rows = await job.plane.parsing.run(read, job.namespace)
    bounds = job.plane.settings
    return answer(await job.write(jobs.push, rows, bounds.rollout_quota, bounds.max_unread))


@router.get("/{name}/tasks")
async def get_tasks(
    job: Named, task_id: Annotated[list[str], Query(alias="id", min_length=1, max_length=MAX_TASKS_READ)]
) -> Response:
    """Return the tasks with these ids as NDJSON, with their answers and hidden tests.

    Unknown ids are left out. The answer may hold fewer tasks than were asked for, because it is limited in
    bytes too; ask again for the others.
    """
    lines = await job.look(jobs.tasks_of, task_id, job.plane.settings.page_bytes)
    return Response(b"".join(line + b"\n" for line in lines), media_type="application/x-ndjson")


@router.post("/{name}/targets", openapi_extra=body_schema(Target))
async def open_target(job: Named) -> Response:
    """Open a step of a stream with dynamic sampling: 201 opened, 200 it is open or met, 409 another number.

    The answer is {id, groups, goal, met, opened}. The step is met when the job has `goal` groups with a
    signal. Groups that had not ended when the step before was met count for this one.
    """
    body = await job.body(Target)
    step = await job.write(jobs.open_step, body.id, body.groups, job.plane.settings.max_unread)
    return answer(step, 201 if step["opened"] else 200)


@router.post("/{name}/close")
async def close(job: Named) -> Response:
    """Close a stream. The job takes no more tasks and ends with those that it has."""
    await job.write(jobs.close)
    return answer(await job.read(_read))


@router.post("/{name}/cancel", openapi_extra=body_schema(Cancel))
async def cancel(job: Named) -> Response:
    """Cancel the job ({}), one group ({"group": id}) or one rollout ({"rollout": id})."""
    body = await job.body(Cancel)
    if body.group is not None and body.rollout is not None:
        raise Invalid("give 'group' or 'rollout', not both", errors=["group: not together with 'rollout'"])
    if body.group is None and body.rollout is None:
        await job.plane.cancel_rest(await job.write(jobs.cancel, "Cancelled"))
    else:
        await job.write(jobs.cancel_part, group=body.group, rollout=body.rollout)
    return answer(await job.read(_read))


@of_drivers.get("", responses={200: {"model": UnfinishedJobs}})
async def unfinished(
    call: Call, revision: Annotated[int | None, Query(ge=0)] = None, wait: Wait = 0.0
) -> Response:
    """List the jobs of all namespaces that drivers have to handle, by name, generation and cancel reason.

    With the `revision` of the last answer, the call waits up to `wait` seconds for a change of this list.
    """
    # A call without a revision gets the first answer.
    changed = await call.poll(
        "", UNFINISHED, job_views.unfinished, lambda listing: listing["revision"] != revision, wait
    )
    return answer(changed)


Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]
# No job can have a namespace with another name, so no job could use such an upload.
BlobNamespace = Annotated[str, Query(pattern=NAME_PATTERN, max_length=63)]

_RAW: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def _blob(namespace: str, sha256: str) -> dict[str, Any]:
    return {"namespace": namespace, "sha256": sha256, "url": f"blob:sha256:{sha256}"}


@of_blobs.put("/{sha256}", openapi_extra=_RAW)
async def put_blob(
    request: Request, plane: Plane, sha256: Sha256, namespace: BlobNamespace = "default"
) -> Response:
    """Upload a file: 201 if it is new, 200 if it exists, 422 if its SHA-256 differs. Repeats are harmless.

    The answer's `url` is used as `spec.tasks.url` of jobs of this namespace. An upload that no job uses is
    removed after a while. A HEAD request restarts that time.
    """
    created = await plane.uploads.take(namespace, sha256, request.stream())
    return answer(_blob(namespace, sha256), 201 if created else 200)


@of_blobs.head("/{sha256}", include_in_schema=False)
@of_blobs.get("/{sha256}")
async def get_blob(plane: Plane, sha256: Sha256, namespace: BlobNamespace = "default") -> Response:
    """Return the size of an upload in bytes, never its content; 404 if the namespace does not have it."""
    touch = partial(blobs.touch, namespace=namespace, sha256=sha256)
    row = await plane.database.write(touch, durable=False)
    if row is None:
        raise NotFound(f"this namespace has no upload sha256:{sha256}", reason="BlobNotFound")
    return answer({**_blob(namespace, sha256), "size": row.size})
