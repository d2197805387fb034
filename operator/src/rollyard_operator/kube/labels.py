"""The labels and annotations of the objects that the operator makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rollyard_drivers.reconcile.naming import QUEUE_LABEL

Object = dict[str, Any]
"""A Kubernetes object as JSON."""
Component = Literal["stage-worker", "backend", "sandbox"]

NAME = "app.kubernetes.io/name"
COMPONENT = "app.kubernetes.io/component"
MANAGED_BY = "app.kubernetes.io/managed-by"
INSTANCE = "rollyard.dev/instance"
JOB, JOB_UID = "rollyard.dev/job", "rollyard.dev/job-uid"
POOL, POOL_UID = "rollyard.dev/pool", "rollyard.dev/pool-uid"
STAGE = "rollyard.dev/stage"
SHAPE = "rollyard.dev/shape"
"""The label of a sandbox pod with the hash of all that it was made from.

Pods with the same hash are exchangeable.
"""
CLAIM = "rollyard.dev/claim"
WARM = "rollyard.dev/warm"
READY = "rollyard.dev/ready"
"""The label of a stage worker's pod that stands ready and has no job yet. The assignment removes it."""
QUEUE = QUEUE_LABEL

SPEC_HASH = "rollyard.dev/spec-hash"
RESTARTS = "rollyard.dev/restarts"
LAST_END = "rollyard.dev/last-end"
WORKLOAD = "rollyard.dev/workload"
"""The annotation of a pod that stood ready, with the name of the workload that it became."""
ASSIGNED_AT = "rollyard.dev/assigned-at"
ASSIGNMENT = "rollyard.dev/assignment"
"""The annotation of such a pod with the arguments of its worker, as a JSON list."""
DRAINING_SINCE = "rollyard.dev/draining-since"
NONCE = "rollyard.dev/nonce"
"""The annotation of a sandbox pod with its nonce.

The secret of a sandbox is derived from the key, its name and this nonce.
"""
TOKEN_HASH = "rollyard.dev/token-sha256"

MANAGER = "rollyard-operator"
READY_PREFIX = "rollyard-ready-"
"""The prefix of the names of pods that stand ready, and of the Secrets with their tokens."""
JOB_SECRET_PREFIX = "rollyard-job-"
"""The prefix of the names of the Secrets with the tokens of jobs. There is one Secret for each job."""


def own_labels(instance: str, component: Component) -> dict[str, str]:
    """Return the labels that every object made by the operator has."""
    return {NAME: "rollyard", COMPONENT: component, MANAGED_BY: MANAGER, INSTANCE: instance}


def selector(instance: str) -> str:
    """Return the selector for the objects of one installation."""
    return f"{INSTANCE}={instance}"


def label_of(obj: Mapping[str, Any], name: str) -> str:
    """Return the value of a label, or an empty string if the object does not have it."""
    return str((obj["metadata"].get("labels") or {}).get(name, ""))


def annotation_of(obj: Mapping[str, Any], name: str) -> str:
    """Return the value of an annotation, or an empty string if the object does not have it."""
    return str((obj["metadata"].get("annotations") or {}).get(name, ""))


def owner_reference(api_version: str, kind: str, name: str, uid: str) -> dict[str, Any]:
    """Return a controller reference. A foreground deletion of the owner waits until the child is gone."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
