"""The pods of sandboxes: a foreign image, the exec server mounted in, and nothing else within reach. Pure.

Pods made from the same shape, placement and settings are exchangeable; their hash is the flavor.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError
from rollyard_crds.base import API_VERSION
from rollyard_crds.claims import (
    COPY_ARGV,
    EXEC_LISTEN,
    EXEC_PORT,
    EXEC_SERVER_ARGV,
    SandboxShape,
)
from rollyard_crds.fields.pod_template import Placement
from rollyard_crds.names import RUNTIME_PATH

from rollyard_operator.kube import labels
from rollyard_operator.kube.labels import Object
from rollyard_operator.pods.parts import digest, foreign_pull_policy, pod_security, restricted, with_placement
from rollyard_operator.pods.template_check import sandbox_violations
from rollyard_operator.settings import OperatorSettings

WORK_FOLDER = "/work"
RUNTIME_BYTES = 256 << 20
"""Room for the runtime where it is copied into the pod; counts as the pod's own disk."""
NODE_LOST_SECONDS = 30
"""A sandbox on a node that does not answer is given up after so long: its rollout starts over elsewhere."""
_COPY_TARGET = "/copy"


@dataclass(frozen=True, slots=True)
class SandboxOwner:
    """The RolloutJob object that sandboxes are made for."""

    namespace: str
    name: str
    uid: str
    queue: str = ""
    """Value of `kueue.x-k8s.io/queue-name`; empty: none."""
    placement: Placement = field(default_factory=Placement)


def owner_of_object(obj: Object, settings: OperatorSettings) -> SandboxOwner | None:
    """What of a RolloutJob object its sandboxes need; None where it goes, or has a template that is refused.

    Reads only that: a job's spec may hold thousands of tasks.
    """
    meta = obj["metadata"]
    template = ((obj.get("spec") or {}).get("sandbox") or {}).get("template") or {}
    if meta.get("deletionTimestamp"):
        return None
    try:
        placement = Placement.model_validate(template)
    except ValidationError:
        return None
    if sandbox_violations(placement, meta["namespace"], settings):
        return None  # the job's loop says why
    return SandboxOwner(
        meta["namespace"], meta["name"], meta["uid"], labels.label_of(obj, labels.QUEUE), placement
    )


def flavor_of(shape: SandboxShape, owner: SandboxOwner, settings: OperatorSettings) -> str:
    """Hash of all that a sandbox's pod is made from, but not whose it is; a label's value."""
    return digest(
        shape.model_dump_json(),
        owner.queue,
        owner.placement.model_dump_json(exclude_defaults=True),
        (settings.images.sandbox, settings.images.sandbox_default, settings.image_pull_policy),
        [secret.name for secret in settings.image_pull_secrets],
        settings.image_volumes,
        settings.isolation.model_dump_json(),
        settings.sandbox.model_dump_json(),
    )


def secret_of(key: str, namespace: str, name: str, nonce: str) -> str:
    """The secret of a pod's exec server, 32 hex digits: derived, so that no restart forgets it.

    Args:
        key: only the operator knows it.
        nonce: random, new for each pod; it stands in the pod's annotations.
    """
    message = f"sandbox/{namespace}/{name}/{nonce}"
    return hmac.new(key.encode(), message.encode(), hashlib.sha256).hexdigest()[:32]


def token_hash(secret: str) -> str:
    """What the pod's spec holds of its secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def warm_owner_name(instance: str) -> str:
    """Name of the ConfigMap that owns the warm pods of a namespace."""
    return f"rollyard-{instance}-warm"


def warm_owner(namespace: str, settings: OperatorSettings) -> Object:
    """The ConfigMap that unclaimed pods belong to: deleting it deletes them."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": warm_owner_name(settings.instance),
            "namespace": namespace,
            "labels": labels.own_labels(settings.instance, "sandbox"),
        },
        "data": {"purpose": "Owns the warm sandbox pods of this namespace that nobody has claimed yet."},
    }


def job_reference(owner: SandboxOwner) -> Object:
    """Reference of a claimed pod to its job."""
    return labels.owner_reference(API_VERSION, "RolloutJob", owner.name, owner.uid)


def warm_reference(name: str, uid: str) -> Object:
    """Reference of an unclaimed pod to its namespace's ConfigMap."""
    return labels.owner_reference("v1", "ConfigMap", name, uid)


def claim_labels(claim: str, owner: SandboxOwner) -> dict[str, str | None]:
    """Labels that a pod gets when it is claimed; None: taken away."""
    return {labels.CLAIM: claim, labels.JOB: owner.name, labels.JOB_UID: owner.uid, labels.WARM: None}


def _resources(shape: SandboxShape, settings: OperatorSettings) -> Object:
    disk = shape.disk_bytes + (0 if settings.image_volumes else RUNTIME_BYTES)
    limits = {"cpu": milli(shape.cpu), "memory": str(shape.memory_bytes), "ephemeral-storage": str(disk)}
    requests = {
        "cpu": milli(shape.cpu * settings.sandbox.cpu_request_fraction),
        "memory": str(max(1, int(shape.memory_bytes * settings.sandbox.memory_request_fraction))),
        "ephemeral-storage": str(disk),
    }
    return {"requests": requests, "limits": limits}


def milli(cores: float) -> str:
    """Cores as a quantity, at least a thousandth of one."""
    return f"{max(1, round(cores * 1000))}m"


def sandbox_pod(
    name: str,
    shape: SandboxShape,
    owner: SandboxOwner,
    settings: OperatorSettings,
    *,
    nonce: str,
    token_sha256: str,
    reference: Object,
    claim: str = "",
    checks: Sequence[str] = (),
) -> Object:
    """The pod of a sandbox.

    Args:
        owner: the job that it is made for; a warm one may be claimed by another of the same flavor.
        nonce: what its secret was derived from.
        token_sha256: of its secret, 64 hex digits.
        reference: its owner reference.
        claim: whose it is; empty: it is warm.
        checks: `HOST:PORT`, by address, that must be out of reach before it takes connections.
    """
    flavor = flavor_of(shape, owner, settings)
    own = labels.own_labels(settings.instance, "sandbox") | {labels.SHAPE: flavor}
    if claim:
        own |= {key: value for key, value in claim_labels(claim, owner).items() if value is not None}
    else:
        own[labels.WARM] = "true"
    if owner.queue:
        own[labels.QUEUE] = owner.queue
    arguments = ["--listen", EXEC_LISTEN, "--workdir", WORK_FOLDER, "--token-sha256", token_sha256]
    for check in checks:
        arguments += ["--isolation-check", check]
    if checks:
        arguments += ["--isolation-seconds", f"{settings.isolation.seconds:g}"]
    disk = str(shape.disk_bytes)
    container: Object = {
        "name": "sandbox",
        "image": shape.image or settings.images.sandbox_default,
        "imagePullPolicy": foreign_pull_policy(settings) if shape.image else settings.image_pull_policy,
        "command": list(EXEC_SERVER_ARGV),
        "args": arguments,
        "workingDir": WORK_FOLDER,
        "env": [{"name": "HOME", "value": WORK_FOLDER}, {"name": "TMPDIR", "value": "/tmp"}],
        "ports": [{"name": "exec", "containerPort": EXEC_PORT, "protocol": "TCP"}],
        "resources": _resources(shape, settings),
        "securityContext": restricted(read_only_root=False),
        "volumeMounts": [
            {"name": "rollyard-runtime", "mountPath": RUNTIME_PATH, "readOnly": True},
            {"name": "rollyard-work", "mountPath": WORK_FOLDER},
            {"name": "rollyard-tmp", "mountPath": "/tmp"},
        ],
        # It listens once its isolation was seen to hold: taking connections is being ready.
        "readinessProbe": {
            "tcpSocket": {"port": "exec"},
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": 30,
        },
    }
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.sandbox.termination_grace_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": pod_security(settings.sandbox.run_as_user),
        "containers": [container],
        "volumes": [
            {"name": "rollyard-work", "emptyDir": {"sizeLimit": disk}},
            {"name": "rollyard-tmp", "emptyDir": {"sizeLimit": disk}},
        ],
    }
    _mount_runtime(spec, settings)
    with_placement(spec, owner.placement, settings.image_pull_secrets)
    given = spec.get("tolerations", ())
    spec["tolerations"] = [*given, *_node_lost(given)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": {**owner.placement.labels, **own},
            "annotations": {
                **owner.placement.annotations,
                labels.NONCE: nonce,
                labels.TOKEN_HASH: token_sha256,
            },
            "ownerReferences": [reference],
        },
        "spec": spec,
    }


def _mount_runtime(spec: Object, settings: OperatorSettings) -> None:
    """Bring the exec server in: as an image volume, or copied by an init container."""
    image, policy = settings.images.sandbox, settings.image_pull_policy
    if settings.image_volumes:
        spec["volumes"].append(
            {"name": "rollyard-runtime", "image": {"reference": image, "pullPolicy": policy}}
        )
        return
    spec["volumes"].append({"name": "rollyard-runtime", "emptyDir": {"sizeLimit": str(RUNTIME_BYTES)}})
    spec["initContainers"] = [
        {
            "name": "runtime",
            "image": image,
            "imagePullPolicy": policy,
            "command": list(COPY_ARGV),
            "args": [_COPY_TARGET],
            "securityContext": restricted(read_only_root=True),
            "resources": {
                "requests": {"cpu": "10m", "memory": "32Mi", "ephemeral-storage": str(RUNTIME_BYTES)},
                "limits": {"cpu": "1", "memory": "128Mi", "ephemeral-storage": str(RUNTIME_BYTES)},
            },
            "volumeMounts": [{"name": "rollyard-runtime", "mountPath": _COPY_TARGET}],
        }
    ]


def _node_lost(given: Sequence[Object]) -> list[Object]:
    """Tolerations of a node that does not answer, for a short time, where the template says nothing."""
    keys = {one.get("key") for one in given}
    return [
        {
            "key": key,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": NODE_LOST_SECONDS,
        }
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if key not in keys
    ]
