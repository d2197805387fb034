"""The REST form of a RolloutJob: its manifest with live counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import orjson
import sqlalchemy as sa
from rollyard_crds.fields.annotations import CANCEL_REASON, CLOSED, OBJECT_UID
from rollyard_crds.fields.reward import rounded
from rollyard_tasks.harbor.dockerfiles import DOCKERFILE_IMAGE
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import loads, revision_of, unpack
from rollyard_api.core.conditions import timestamp
from rollyard_api.jobs.advice import advice_on, advice_on_harness_quota, advice_on_wait
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import unscored
from rollyard_api.rollouts.harness_quota import HarnessUse
from rollyard_api.storage import groups as group_rows
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.jobs import DELETED
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import jobs, rollouts
from rollyard_api.trajectories.records import fitting

_JOB_BYTES: Final = 1024
"""The approximate number of bytes that a job takes in a list in addition to its manifest."""
_SIZES: Final = sa.select(
    jobs.c.id,
    sa.type_coerce(
        sum((sa.func.length(column) for column in (jobs.c.metadata, jobs.c.spec, jobs.c.status)), _JOB_BYTES),
        sa.Integer,
    ).label("bytes"),
)
_WAITING: Final = (
    sa.select(rollouts.c.state, sa.func.count().label("n"))
    .where(rollouts.c.job_id == sa.bindparam("b_job"), rollouts.c.state < RolloutState.SUCCEEDED)
    .group_by(rollouts.c.state)
)
AHEAD: Final = 64
"""The number of tasks at the front of the Init queue whose images are named."""
_ROLLOUTS: Final = 4096
"""The largest number of rollouts that are read to find these tasks."""
_QUEUE: Final = (
    sa.select(rollouts.c.group_no)
    .where(
        rollouts.c.job_id == sa.bindparam("b_job"),
        rollouts.c.state == RolloutState.QUEUED_INIT,
        rollouts.c.node == "",
    )
    .order_by(rollouts.c.place)
    .limit(_ROLLOUTS)
)


def counts(conn: Connection, job: JobRow) -> dict[str, Any]:
    """Return the live RolloutCounts of a job."""
    waiting = {row.state: row.n for row in conn.execute(_WAITING, {"b_job": job.id})}
    if RolloutState.UNSCORED in waiting:
        # Nothing waits for a worker of Eval in such a job.
        waiting[RolloutState.QUEUED_EVAL] = waiting.pop(RolloutState.UNSCORED)
    return {
        "total": job.total,
        **{
            stage: {
                "queued": waiting.get(RolloutState.queued(stage), 0),
                "active": waiting.get(RolloutState.leased(stage), 0),
            }
            for stage in ("init", "run", "eval")
        },
        "succeeded": job.succeeded,
        "failed": job.failed,
        "cancelled": job.cancelled,
    }


def _dynamic_sampling(conn: Connection, job: JobRow) -> dict[str, int] | None:
    """Return the DynamicSamplingStatus of a job, or None if the job does not use it."""
    if job.limits.sampling is None:
        return None
    row = job_rows.sampling(conn, job.id)
    return {
        "targetGroups": row.target,
        "informativeGroups": row.informative,
        "uninformativeGroups": row.uninformative,
        "droppedGroups": row.dropped,
        "surplusGroups": row.surplus,
        "inFlightGroups": row.started - job.groups_ended,
        "waitingGroups": job.groups - row.started,
        "surplusRollouts": row.surplus_rollouts,
        "discardedTokens": row.discarded_tokens,
    }


def _without_tasks(spec: bytes) -> dict[str, Any]:
    document: dict[str, Any] = loads(spec)
    if "inline" in document["tasks"]:
        document["tasks"] = {"stream": True}
    return document


def document(
    conn: Connection, job: JobRow, *, bare: bool = False, harness_use: HarnessUse | None = None
) -> dict[str, Any]:
    """Return the whole RolloutJob as REST returns it, with live counts.

    Args:
        conn: The database.
        job: The job.
        bare: Whether inline tasks are left out.
        harness_use: How much of the quota of `leasing.grant` is in use, so that the job says when it waits
            for that. None leaves it out.
    """
    meta = loads(job.metadata)
    annotations = dict(meta.get("annotations") or {})
    annotations.pop(OBJECT_UID, None)  # Only registration sets it; its value in a manifest is ignored.
    if job.object_uid is not None:
        annotations[OBJECT_UID] = job.object_uid
    if job.closed:
        annotations[CLOSED] = "true"
    if job.cancel_reason is not None:
        annotations[CANCEL_REASON] = job.cancel_reason
    mean = job.reward_sum / job.succeeded if job.succeeded else None
    current = counts(conn, job)
    advice = advice_on(job)
    if job.unscored and (since := unscored.oldest(conn, job.id)) is not None:
        advice += advice_on_wait(job, current["eval"]["queued"], time.time() - since)
    if job.limits.harness and harness_use is not None and job.finished_at is None:
        running = harness_use.running.get(job.namespace, 0)
        advice += advice_on_harness_quota(current["run"]["queued"], running, harness_use.most)
    status = {
        "phase": "Pending",
        "conditions": [],
        "observedGeneration": 0,
        "message": "",
        **loads(job.status),
        "counts": current,
        "rewardMean": mean,
        "rewardText": None if mean is None else rounded(mean),
        "dynamicSampling": _dynamic_sampling(conn, job),
        "advice": advice or None,
        "startTime": timestamp(job.started_at),
        "completionTime": timestamp(job.finished_at),
    }
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {
            **meta,
            "annotations": annotations,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
            "generation": job.generation,
            "creationTimestamp": timestamp(job.created_at),
        },
        "spec": _without_tasks(job.spec) if bare else orjson.Fragment(job.spec),
        "status": {k: v for k, v in status.items() if v is not None},
    }


def _drivers_concern() -> sa.ColumnElement[bool]:
    """Return the condition that selects the jobs that drivers handle.

    These are the jobs that have not ended, and those whose object is still to be deleted.
    """
    leaving = sa.and_(jobs.c.object_uid.is_not(None), jobs.c.cancel_reason == DELETED)
    return sa.or_(jobs.c.finished_at.is_(None), leaving)


def unfinished(conn: Connection) -> dict[str, Any]:
    """Return UnfinishedJobs, which lists the jobs that drivers handle.

    The revision is a digest of the content of the list. Every replica therefore computes the same revision
    for the same list.
    """
    reason = sa.func.coalesce(jobs.c.cancel_reason, "")
    query = sa.select(jobs.c.namespace, jobs.c.name, jobs.c.uid, jobs.c.generation, reason)
    query = query.where(jobs.c.deleted_at.is_(None), _drivers_concern()).order_by(jobs.c.id)
    names = ("namespace", "name", "uid", "generation", "cancel_reason")
    listed_jobs = [dict(zip(names, row, strict=True)) for row in conn.execute(query)]
    return {"revision": revision_of(listed_jobs), "jobs": listed_jobs}


def listed(
    conn: Connection,
    namespace: str | None,
    limit: int,
    after: int,
    *,
    bare: bool,
    finished: bool | None,
    max_bytes: int,
    max_harness_runs: int,
) -> tuple[list[dict[str, Any]], int | None]:
    """Return the jobs created after the one with id `after`, and the id to continue after if there are more.

    The list holds at most `limit` jobs of about `max_bytes` bytes together, unless it holds a single job.
    """
    chosen = [jobs.c.deleted_at.is_(None), jobs.c.id > after]
    if namespace is not None:
        chosen.append(jobs.c.namespace == namespace)
    if finished is not None:
        chosen.append(jobs.c.finished_at.is_not(None) if finished else _drivers_concern())
    selected = list(conn.execute(_SIZES.where(*chosen).order_by(jobs.c.id).limit(limit + 1)))
    count = min(limit, fitting((row.bytes for row in selected), max_bytes))
    if not count:
        return [], None
    last = selected[count - 1].id
    query = sa.select(jobs).where(*chosen, jobs.c.id <= last).order_by(jobs.c.id)
    rows = [JobRow(*row) for row in conn.execute(query)]
    use = HarnessUse.of(conn, rows, max_harness_runs)
    documents = [document(conn, row, bare=bare, harness_use=use) for row in rows]
    return documents, last if count < len(selected) else None


def worker_spec(
    conn: Connection, namespace: str, name: str, uid: str | None, pinned: Sequence[str]
) -> dict[str, Any]:
    """Return the part of a job that a stage worker needs: a WorkerJobSpec without inline tasks.

    Inline tasks are left out because each lease carries its task.

    Args:
        pinned: The installer's entries that let hosts of sandboxes have addresses that are not public.

    Raises:
        NotFound: There is no such job, or another job of this name has replaced it.
    """
    job = job_rows.find(conn, namespace, name, uid=uid)
    spec = _without_tasks(job.spec)
    spec["pinnedHosts"] = list(pinned)
    spec["plugins"] = job_rows.plugins_of(conn, job.id)
    return {"uid": job.uid, "namespace": namespace, "name": name, "generation": job.generation, "spec": spec}


def plugin_text(conn: Connection, namespace: str, name: str, uid: str | None, sha256: str) -> bytes:
    """Return the text of a plugin of a job, as it was when the job was submitted.

    Raises:
        NotFound: There is no such job, another one has replaced it, or it uses no such plugin.
    """
    return job_rows.plugin_text(conn, job_rows.find(conn, namespace, name, uid=uid).id, sha256)


def waiting_images(conn: Connection, namespace: str, name: str, uid: str | None, max_bytes: int) -> list[str]:
    """Return the images of the next tasks in a job's Init queue, each once, in the order of the queue.

    Images that are built from Dockerfiles are left out, because the files come with the leases.

    Args:
        conn: The database.
        namespace: The namespace of the job.
        name: The name of the job.
        uid: The uid that the job must have, or None for any.
        max_bytes: The size of the tasks that are read, in bytes. At least one is read.

    Raises:
        NotFound: There is no such job, or another job of this name has replaced it.
    """
    job = job_rows.find(conn, namespace, name, uid=uid)
    numbers = dict.fromkeys(conn.execute(_QUEUE, {"b_job": job.id}).scalars())
    images: dict[str, None] = {}
    size = 0
    for number in list(numbers)[:AHEAD]:
        if size > max_bytes:
            break
        task = unpack(group_rows.named(conn, job.id, [number])[number].task)
        size += len(task)
        image = (orjson.loads(task).get("sandbox") or {}).get("image")
        if isinstance(image, str) and not image.startswith(DOCKERFILE_IMAGE):
            images[image] = None
    return list(images)
