"""What all pods of the operator have in common: security, placement, resources, and the use of templates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from rollyard_crds.fields.pod_template import LocalReference, Placement, PodResources, PodTemplate

from rollyard_operator.errors import OperatorError
from rollyard_operator.kube.labels import Object
from rollyard_operator.settings import OperatorSettings

APP_USER = 10001
"""The user and group id of stage workers and backends."""
RESERVED_PREFIX = "rollyard-"
"""The prefix of the names of the operator's own volumes."""


class PodTemplateError(OperatorError, ValueError):
    """A pod template cannot be used. The message names the field."""

    reason = "InvalidPodTemplate"


def restricted(read_only_root: bool) -> Object:
    """Return the security context of a container that the pod security standard `restricted` requires."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": read_only_root,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def pod_security(user: int) -> Object:
    """Return the security context of a pod whose processes all run as `user`."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def resources(defaults: PodResources, chosen: PodResources) -> Object:
    """Return requests and limits. A default applies only if `chosen` does not name the resource at all."""
    named = chosen.requests.keys() | chosen.limits.keys()
    merged = {
        kind: {name: value for name, value in default.items() if name not in named} | own
        for kind, default, own in (
            ("requests", defaults.requests, chosen.requests),
            ("limits", defaults.limits, chosen.limits),
        )
    }
    return {kind: values for kind, values in merged.items() if values}


def with_placement(spec: Object, placement: Placement, secrets: Iterable[LocalReference]) -> None:
    """Add the placement of a pod to its spec: where it may run, and with which image pull secrets."""
    for key, value in (
        ("nodeSelector", placement.node_selector),
        ("tolerations", placement.tolerations),
        ("affinity", placement.affinity),
        ("priorityClassName", placement.priority_class_name),
        ("runtimeClassName", placement.runtime_class_name),
    ):
        if value:
            spec[key] = value
    names = dict.fromkeys(one.name for one in (*secrets, *placement.image_pull_secrets))
    if names:
        spec["imagePullSecrets"] = [{"name": name} for name in names]


def with_template(spec: Object, template: PodTemplate, field: str) -> None:
    """Add the environment, volumes and mounts of a template to a pod's spec.

    An environment variable of the template replaces one of the operator with the same name, and a mount
    replaces one at the same path.

    Args:
        field: The path of the template's field, for messages.

    Raises:
        PodTemplateError: An entry has no name or path or occurs twice, or a volume name is reserved.
    """
    container = spec["containers"][0]
    env = _named(template.env, "name", f"{field}.env")
    kept = [one for one in container.get("env", ()) if one["name"] not in env]
    container["env"] = [*kept, *env.values()]
    volumes = _named(template.volumes, "name", f"{field}.volumes")
    for name in volumes:
        if name.startswith(RESERVED_PREFIX):
            raise PodTemplateError(
                f"{field}.volumes: the name {name!r} begins with {RESERVED_PREFIX!r}; choose another"
            )
    mounts = _named(template.volume_mounts, "mountPath", f"{field}.volumeMounts")
    ours = [one for one in container.get("volumeMounts", ()) if one["mountPath"] not in mounts]
    container["volumeMounts"] = [*ours, *mounts.values()]
    spec["volumes"] = [*spec.get("volumes", ()), *volumes.values()]


def _named(entries: Iterable[Mapping[str, Any]], key: str, field: str) -> dict[str, Mapping[str, Any]]:
    by_name: dict[str, Mapping[str, Any]] = {}
    for index, entry in enumerate(entries):
        name = entry.get(key)
        if not isinstance(name, str) or not name:
            raise PodTemplateError(f"{field}[{index}]: {key!r} is missing; give it a text")
        if name in by_name:
            raise PodTemplateError(f"{field}[{index}]: {key} {name!r} is there twice; remove one")
        by_name[name] = entry
    return by_name


def foreign_pull_policy(settings: OperatorSettings) -> str:
    """Return the pull policy of images that do not belong to the installation."""
    return "Never" if settings.image_pull_policy == "Never" else "IfNotPresent"


def digest(*parts: object) -> str:
    """Return 16 hex digits that change with any of the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
