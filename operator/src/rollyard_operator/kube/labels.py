"""Labels and annotations of the objects that the operator makes."""

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
"""Sandboxes: hash of all that their pod was made from; pods of one hash are exchangeable."""
CLAIM = "rollyard.dev/claim"
WARM = "rollyard.dev/warm"
QUEUE = QUEUE_LABEL

SPEC_HASH = "rollyard.dev/spec-hash"
RESTARTS = "rollyard.dev/restarts"
LAST_END = "rollyard.dev/last-end"
DRAINING_SINCE = "rollyard.dev/draining-since"
NONCE = "rollyard.dev/nonce"
"""Sandboxes: what their secret was derived from, beside the key and their name."""
TOKEN_HASH = "rollyard.dev/token-sha256"

MANAGER = "rollyard-operator"
JOB_SECRET_PREFIX = "rollyard-job-"
"""The names of the Secrets with the tokens of jobs, one for each job, begin so."""


def own_labels(instance: str, component: Component) -> dict[str, str]:
    """The labels of every child."""
    return {NAME: "rollyard", COMPONENT: component, MANAGED_BY: MANAGER, INSTANCE: instance}


def selector(instance: str) -> str:
    """Selects the children of one installation."""
    return f"{INSTANCE}={instance}"


def label_of(obj: Mapping[str, Any], name: str) -> str:
    """A label's value; empty if it is not there."""
    return str((obj["metadata"].get("labels") or {}).get(name, ""))


def annotation_of(obj: Mapping[str, Any], name: str) -> str:
    """An annotation's value; empty if it is not there."""
    return str((obj["metadata"].get("annotations") or {}).get(name, ""))


def owner_reference(api_version: str, kind: str, name: str, uid: str) -> dict[str, Any]:
    """A controller reference; its object cannot be gone in the foreground before the child is."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
