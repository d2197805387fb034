"""Stage workers that stand ready before there is a job: their pods. This is pure.

A ready pod has imported everything, and holds a token that can only ask for an assignment. When it is
assigned, its labels, its owner and its annotations become those of a pod of the job; its spec cannot change.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from rollyard_crds import RolloutJob
from rollyard_crds.fields.pod_template import PodTemplate
from rollyard_crds.workers import AssignmentOffer
from rollyard_drivers.commands import work_arguments
from rollyard_drivers.reconcile.plan import Launch, Workload
from rollyard_drivers.reconcile.ready_workers import ReadyState, ReadyWorker

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


def observed_ready(pod: Mapping[str, Any]) -> ReadyWorker:
    """Return a ready pod as it is observed."""
    meta, workload = pod["metadata"], observed_workload(pod)
    states: dict[str, ReadyState] = {
        "starting": "starting",
        "running": "running",
        "stopping": "leaving",
        "exited": "ended",
    }
    return ReadyWorker(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        shape=labels.label_of(pod, labels.SHAPE),
        state=states[workload.state],
        created_at=created_at(pod),
    )


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
