"""How a job's manifest, a PATCH or a driver's report sets the columns of the job, without any I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic.fields import FieldInfo
from rollyard_crds.base import IMMUTABLE
from rollyard_crds.claims import shape_of
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.reading.plugin import Plugin
from rollyard_crds.rolloutjob import RolloutJob, RolloutJobSpec

from rollyard_api.core.codec import dumps, loads
from rollyard_api.core.conditions import differs, merge_status, stored_metadata, stored_spec
from rollyard_api.jobs.tasks import TaskRow
from rollyard_api.machine.limits import Limits
from rollyard_api.storage.rows import JobRow


def _is_fixed(field: FieldInfo) -> bool:
    """Return whether the schema of a field of a job's spec says that it is immutable."""
    inner = (part.__metadata__ for part in get_args(field.annotation) if get_origin(part) is Annotated)
    return any(
        getattr(annotation, "json_schema_extra", None) == IMMUTABLE for annotation in (field, *chain(*inner))
    )


_FIXED: Final = frozenset(
    field.alias or name for name, field in RolloutJobSpec.model_fields.items() if _is_fixed(field)
)
"""The fields of a job's spec that define what the job is, and therefore cannot change."""
_SKIPPED_ROWS: Final = "skippedRows"
_PLUGINS: Final = "plugins"
_KEPT: Final = (_SKIPPED_ROWS, _PLUGINS)
"""The keys of a stored status whose values are known when a job is created, and never change."""
_REPORTED: Final = ("phase", "conditions", "observedGeneration", "message")


@dataclass(frozen=True, slots=True)
class NewJob:
    """A checked manifest in the form in which it is stored, and the tasks of the job."""

    namespace: str
    name: str
    metadata: bytes
    spec: RolloutJobSpec
    spec_json: bytes
    digest: str
    tasks: Sequence[TaskRow] | None = None
    """The tasks, or None before they are read."""
    object_uid: str | None = None
    """The uid of the Kubernetes object for which the job is registered."""
    skipped: SkippedRows | None = None
    """The rows of the task list that were left out."""
    plugins: Sequence[Plugin] = ()
    """The plugins that the job uses, as they are now."""


def prepare(job: RolloutJob) -> NewJob:
    """Return what is stored of a manifest, without its tasks."""
    meta, spec = job.metadata, stored_spec(job.spec.to_json())
    digest = hashlib.sha256(spec).hexdigest()
    return NewJob(meta.namespace, meta.name, stored_metadata(meta), job.spec, spec, digest)


def created(new: NewJob, now: float, blob_id: int | None) -> dict[str, Any]:
    """Return the columns of a new job, which keeps this upload as long as it exists."""
    spec, skipped = new.spec, new.skipped
    status: dict[str, Any] = {_SKIPPED_ROWS: skipped.to_json()} if skipped and skipped.count else {}
    if new.plugins:
        status[_PLUGINS] = [{"file": plugin.file, "sha256": plugin.sha256} for plugin in new.plugins]
    return {
        "namespace": new.namespace,
        "name": new.name,
        "metadata": new.metadata,
        "spec": new.spec_json,
        "digest": new.digest,
        "limits": Limits.of(spec),
        "ttl_seconds": spec.ttl_seconds_after_finished,
        "status": dumps(status),
        "pool": None if spec.backend_ref is None else spec.backend_ref.name,
        "priority": spec.priority,
        "closed": not spec.tasks.stream,
        "object_uid": new.object_uid,
        "warm": _warm(spec),
        "blob_id": blob_id,
        **_admission(spec.suspend, now, spec.active_deadline_seconds),
    }


def _admission(suspend: bool, started: float, seconds: int | None) -> dict[str, Any]:
    """Return the columns of a job that is suspended, or was admitted at `started` with this deadline.

    A suspended job has no deadline.
    """
    late = None if suspend or seconds is None else started + seconds
    return {"suspended": suspend, "started_at": None if suspend else started, "deadline_at": late}


def _warm(spec: RolloutJobSpec) -> bytes | None:
    """Return the shape and number of sandboxes that a driver on Kubernetes keeps warm, or None."""
    keeps_warm = spec.sandbox.warm > 0 and spec.needs_early_sandboxes
    if not keeps_warm or spec.placement not in (None, "kubernetes"):
        return None
    return dumps({"shape": shape_of(spec.sandbox).model_dump(), "count": spec.sandbox.warm})


def patched(job: JobRow, now: float, *, suspend: bool | None, priority: int | None) -> dict[str, Any]:
    """Return the columns that change when a job is suspended or resumed, or gets another priority."""
    spec = loads(job.spec)
    values: dict[str, Any] = {}
    if suspend is not None and suspend != job.suspended:
        spec["suspend"] = suspend
        values = _admission(suspend, now, job.limits.deadline_seconds)
    if priority is not None and priority != job.priority:
        spec["priority"] = priority
        values["priority"] = priority
    if not values:
        return {}
    return values | {"spec": stored_spec(spec), "generation": job.generation + 1}


def registered(job: JobRow, new: NewJob, now: float) -> dict[str, Any]:
    """Return the columns that change when the driver of a job reports this manifest.

    Raises:
        Conflict: A field differs that cannot change.
    """
    reported: dict[str, Any] = {"spec": new.spec_json, "metadata": new.metadata, "warm": _warm(new.spec)}
    if new.object_uid is not None:
        reported["object_uid"] = new.object_uid
    values = {name: value for name, value in reported.items() if getattr(job, name) != value}
    if "spec" not in values:
        return values
    before, after = loads(job.spec), loads(new.spec_json)
    differing = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    fixed = sorted(differing & _FIXED)
    hosts = [spec["stages"]["eval"].get("allowedHosts") for spec in (before, after)]
    if hosts[0] != hosts[1]:  # They were checked against the installer's list when the job was created.
        fixed.append("stages.eval.allowedHosts")
    if fixed:
        raise differs(
            "RolloutJob",
            job.namespace,
            job.name,
            [f"spec.{name}: differs and cannot be changed" for name in fixed],
        )
    values |= {
        "generation": job.generation + 1,
        "digest": new.digest,
        "limits": Limits.of(new.spec),
        "ttl_seconds": new.spec.ttl_seconds_after_finished,
        "priority": new.spec.priority,
    }
    if job.finished_at is None:
        admitted = None if new.spec.suspend != job.suspended else job.started_at
        seconds = new.spec.active_deadline_seconds
        values |= _admission(new.spec.suspend, now if admitted is None else admitted, seconds)
    return values


def reported_status(job: JobRow, status: dict[str, Any]) -> dict[str, Any] | None:
    """Return the status after a driver's report, or None if it is the same."""
    before = loads(job.status)
    after = merge_status(before, status, _REPORTED)
    after |= {k: before[k] for k in _KEPT if k in before}
    return None if after == before else after
