"""The pods of sandboxes: a foreign image, the exec server mounted into it, and no access to anything else.

This module is pure. Pods made from the same shape, placement and settings are exchangeable; their hash is the
flavor.
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
"""The room for the runtime when it is copied into the pod, in bytes. It counts as the pod's own disk."""
NODE_LOST_SECONDS = 30
"""A sandbox on a node that does not answer is given up after this many seconds.

Its rollout then starts again in another sandbox.
"""
_COPY_TARGET = "/copy"


@dataclass(frozen=True, slots=True)
class SandboxOwner:
    """The RolloutJob object that sandboxes are made for."""

    namespace: str
    name: str
    uid: str
    queue: str = ""
    """The value of `kueue.x-k8s.io/queue-name`, or empty if the job has no queue."""
    placement: Placement = field(default_factory=Placement)


def owner_of_object(obj: Object, settings: OperatorSettings) -> SandboxOwner | None:
    """Return what sandboxes need of a RolloutJob object.

    The rest of the spec is not read, because it may hold thousands of tasks.

    Returns:
        The owner, or None if the object is being deleted or its sandbox template is refused.
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
        return None  # The loop of the job reports the reason.
    return SandboxOwner(
        meta["namespace"], meta["name"], meta["uid"], labels.label_of(obj, labels.QUEUE), placement
    )


def flavor_of(shape: SandboxShape, owner: SandboxOwner, settings: OperatorSettings) -> str:
    """Return the hash of everything that a sandbox pod is made from, except its owner. It fits a label."""
    return digest(
        shape.model_dump_json(),
        owner.queue,
        owner.placement.model_dump_json(exclude_defaults=True),
        (settings.images.sandbox, settings.images.sandbox_default, settings.image_pull_policy),
        [secret.name for secret in settings.image_pull_secrets],
        settings.image_volumes,
        settings.isolation.model_dump_json(),
        settings.sandbox.model_dump_json(),
        settings.pods.model_dump_json(exclude={"pod_security_context"}),
    )


def secret_of(key: str, namespace: str, name: str, nonce: str) -> str:
    """Return the secret of a pod's exec server, as 32 hex digits.

    It is derived, so a restart does not lose it.

    Args:
        key: A key that only the operator knows.
        nonce: A random value, which is different for each pod and is kept in the pod's annotations.
    """
    message = f"sandbox/{namespace}/{name}/{nonce}"
    return hmac.new(key.encode(), message.encode(), hashlib.sha256).hexdigest()[:32]


def token_hash(secret: str) -> str:
    """Return the hash of a secret, which the pod's spec contains instead of the secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def warm_owner_name(instance: str) -> str:
    """Return the name of the ConfigMap that owns the warm pods of a namespace."""
    return f"rollyard-{instance}-warm"


def warm_owner(namespace: str, settings: OperatorSettings) -> Object:
    """Return the ConfigMap that owns the unclaimed pods. Its deletion deletes them too."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": warm_owner_name(settings.instance),
            "namespace": namespace,
            "labels": labels.own_labels(settings.instance, "sandbox"),
        },
        "data": {"purpose": "Owns the warm sandbox pods of this namespace that are not claimed yet."},
    }


def job_reference(owner: SandboxOwner) -> Object:
    """Return the owner reference from a claimed pod to its job."""
    return labels.owner_reference(API_VERSION, "RolloutJob", owner.name, owner.uid)


def warm_reference(name: str, uid: str) -> Object:
    """Return the owner reference from an unclaimed pod to the ConfigMap of its namespace."""
    return labels.owner_reference("v1", "ConfigMap", name, uid)


def claim_labels(claim: str, owner: SandboxOwner) -> dict[str, str | None]:
    """Return the labels that a pod gets when it is claimed. A label with the value None is removed."""
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
    """Return a number of cores as a quantity in thousandths, which is at least 1m."""
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
    """Return the pod of a sandbox.

    Args:
        owner: The job that the pod is made for. A warm pod may be claimed by another job with the same
            flavor.
        nonce: The nonce from which the pod's secret was derived.
        token_sha256: The SHA-256 hash of the secret, as 64 hex digits.
        reference: The owner reference of the pod.
        claim: The id of the claim that the pod belongs to, or empty if it is warm.
        checks: The addresses that must be out of reach before the pod accepts connections, as `HOST:PORT`.
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
        # The exec server listens only after its isolation checks passed, so a pod that accepts connections is
        # ready.
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
    for index, folder in enumerate(shape.folders):
        container["volumeMounts"].append({"name": f"rollyard-folder-{index}", "mountPath": folder})
        spec["volumes"].append({"name": f"rollyard-folder-{index}", "emptyDir": {"sizeLimit": disk}})
    _mount_runtime(spec, settings)
    with_placement(spec, owner.placement, settings)
    tolerations = spec.get("tolerations", ())
    spec["tolerations"] = [*tolerations, *_node_lost(tolerations)]
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
    """Add the exec server to a pod's spec, as an image volume or as a copy made by an init container."""
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


def _node_lost(tolerations: Sequence[Object]) -> list[Object]:
    """Return short tolerations of an unreachable node, for the keys that the template does not name."""
    keys = {one.get("key") for one in tolerations}
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
