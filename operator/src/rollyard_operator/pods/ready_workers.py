"""Stage workers that stand ready before there is a job: their pods, and how many are made. This is pure.

A ready pod has imported everything, and holds a token that can only ask for an assignment. When it is
assigned, its labels, its owner and its annotations become those of a pod of the job; its spec cannot change.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from rollyard_crds import RolloutJob
from rollyard_crds.fields.pod_template import PodTemplate
from rollyard_crds.workers import AssignmentOffer
from rollyard_drivers.commands.worker import work_arguments
from rollyard_drivers.reconcile.plan import Launch, Workload

from rollyard_operator.kube import labels
from rollyard_operator.kube.labels import Object
from rollyard_operator.pods.status import created_at, observed_workload, worker_name
from rollyard_operator.pods.workloads import (
    TOKEN_FILE,
    owned_labels,
    owner_reference,
    stage_label,
    worker_spec,
)
from rollyard_operator.settings import OperatorSettings

START_SECONDS: Final = 300.0
"""A ready pod that does not run after this many seconds is replaced."""
ReadyState = Literal["starting", "running", "ended", "leaving"]


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A pod that stands ready, as it is observed."""

    namespace: str
    name: str
    uid: str
    shape: str
    """A digest of all that the pod was made from."""
    state: ReadyState
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ReadyPlan:
    """The ready pods to make and to delete now."""

    create: Mapping[str, int]
    """The number of pods to make, by namespace."""
    delete: tuple[ReadyWorker, ...]
    broken: frozenset[str]
    """The namespaces in which a ready pod ended or did not start although nobody had assigned it."""


def observed_ready(pod: Mapping[str, Any]) -> ReadyWorker:
    """Return a ready pod as it is observed."""
    meta, seen = pod["metadata"], observed_workload(pod)
    states: dict[str, ReadyState] = {
        "stopping": "leaving", "exited": "ended", "running": "running", "starting": "starting",
    }  # fmt: skip
    return ReadyWorker(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        shape=labels.label_of(pod, labels.SHAPE),
        state=states[seen.state],
        created_at=created_at(pod),
    )


def plan_ready(
    observed: Iterable[ReadyWorker],
    namespaces: Collection[str],
    count: int,
    shape: str,
    now: datetime,
    resting: Collection[str] = (),
) -> ReadyPlan:
    """Return the steps to `count` ready pods of the present shape in each namespace, and none elsewhere.

    Args:
        observed: The pods that stand ready, without those that were assigned.
        namespaces: The namespaces in which ready pods stand.
        count: The number of ready pods in each of them.
        shape: The digest of all that a ready pod is made from now.
        resting: The namespaces in which none is made now, because making them failed a moment ago.
    """
    delete: list[ReadyWorker] = []
    kept: dict[str, list[ReadyWorker]] = {namespace: [] for namespace in namespaces}
    broken: set[str] = set()
    for worker in sorted(observed, key=_preference):
        if worker.state == "leaving":
            continue
        late = worker.state == "starting" and (now - worker.created_at).total_seconds() > START_SECONDS
        current = worker.namespace in kept and worker.shape == shape
        if current and (late or worker.state == "ended"):
            broken.add(worker.namespace)
        good = current and not late and worker.state != "ended"
        if good and len(kept[worker.namespace]) < count:
            kept[worker.namespace].append(worker)
        else:
            delete.append(worker)
    missing = {
        namespace: count - len(there)
        for namespace, there in kept.items()
        if len(there) < count and namespace not in broken and namespace not in resting
    }
    return ReadyPlan(missing, tuple(delete), frozenset(broken))


def choose(
    observed: Iterable[ReadyWorker], namespace: str, shape: str, without: Collection[str] = ()
) -> ReadyWorker | None:
    """Return the ready pod that is assigned next, or None if there is none that runs.

    Args:
        without: The uids of pods that another operator has taken in the meantime.
    """
    fit = [
        worker
        for worker in observed
        if worker.namespace == namespace
        and worker.state == "running"
        and worker.shape == shape
        and worker.uid not in without
    ]
    return min(fit, key=_preference, default=None)


def _preference(worker: ReadyWorker) -> tuple[bool, datetime, str]:
    return worker.state != "running", worker.created_at, worker.name


def takes_ready(launch: Launch, job: RolloutJob) -> bool:
    """Return whether a ready pod can become this worker: a first start, from a template without changes.

    A job with a queue needs pods that the queue has admitted before they start.
    """
    default = PodTemplate()
    stages = job.spec.stages
    return (
        launch.restarts == 0
        and labels.QUEUE not in job.metadata.labels
        and all(getattr(stages, stage).template == default for stage in launch.workload.stages)
    )


def ready_pod(name: str, namespace: str, settings: OperatorSettings, shape: str, reference: Object) -> Object:
    """Return a pod that stands ready.

    Args:
        name: The name of the pod, of the Secret with its token, and of the ready worker.
        shape: The digest of all that the pod is made from.
        reference: The owner of pods that have no job yet.
    """
    work = ("--url", settings.control_plane_url, "--token-file", TOKEN_FILE, "--namespace", namespace)
    spec = worker_spec(work, ("--ready", name), PodTemplate(), settings, name, "workers")
    own = labels.own_labels(settings.instance, "stage-worker")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": own | {labels.READY: "true", labels.SHAPE: shape},
            "ownerReferences": [reference],
        },
        "spec": spec,
    }


def ready_secret(pod: Object, data: Iterable[tuple[str, bytes]], settings: OperatorSettings) -> Object:
    """Return the Secret with the token of a ready pod, which is deleted together with the pod."""
    meta = pod["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": meta["name"],
            "namespace": meta["namespace"],
            "labels": labels.own_labels(settings.instance, "stage-worker"),
            # A reference that blocks the deletion of the pod would need further rights.
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
            ],
        },
        "type": "Opaque",
        "immutable": True,
        "data": {key: base64.b64encode(value).decode() for key, value in data},
    }


def assigned(
    pod: Object, workload: Workload, job: RolloutJob, settings: OperatorSettings, now: datetime
) -> Object:
    """Return the patch that makes a ready pod a worker of the job."""
    arguments = [
        *work_arguments(workload),
        *("--name", worker_name(workload.name, pod["metadata"]["uid"])),
    ]
    own = owned_labels("stage-worker", job, settings)
    return {
        "metadata": {
            "labels": own | {labels.STAGE: stage_label(workload), labels.READY: None, labels.SHAPE: None},
            "annotations": {
                labels.SPEC_HASH: workload.spec_hash,
                labels.RESTARTS: "0",
                labels.WORKLOAD: workload.name,
                labels.ASSIGNED_AT: now.isoformat().replace("+00:00", "Z"),
                labels.ASSIGNMENT: json.dumps(arguments),
            },
            "ownerReferences": [owner_reference(job)],
        }
    }


def offer_of(pod: Object) -> AssignmentOffer | None:
    """Return the offer that a pod which stood ready needs, or None if it never stood ready.

    Raises:
        ValueError: Somebody has changed the annotation of the pod.
    """
    text = labels.annotation_of(pod, labels.ASSIGNMENT)
    if not text:
        return None
    meta = pod["metadata"]
    return AssignmentOffer.model_validate(
        {
            "namespace": meta["namespace"],
            "worker": meta["name"],
            "job": labels.label_of(pod, labels.JOB),
            "uid": labels.label_of(pod, labels.JOB_UID),
            "arguments": json.loads(text),
        }
    )
