"""What all pods of the operator have in common: security, placement, resources, and the use of templates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from rollyard_crds.fields.pod_template import Placement, PodResources, PodSecurityContext, PodTemplate

from rollyard_operator.errors import OperatorError
from rollyard_operator.kube.labels import Object
from rollyard_operator.settings import OperatorSettings

APP_USER = 10001
"""The user and group id of stage workers and backends."""
RESERVED_PREFIX = "rollyard-"
"""The prefix of the names of the operator's own volumes."""
INIT_VOLUME = "rollyard-init"
"""The volume that a template's init containers have at /tmp, and that no other container sees."""


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


def chosen_security(installation: PodSecurityContext, template: PodSecurityContext) -> Object:
    """Return the security context of a stage worker's or a backend's pod.

    The user and groups are those of the template, else those of the installation, else the operator's. The
    rest cannot be chosen.
    """
    chosen = [one.model_dump(by_alias=True, exclude_defaults=True) for one in (installation, template)]
    return {**pod_security(APP_USER), **chosen[0], **chosen[1]}


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


def with_placement(spec: Object, placement: Placement, settings: OperatorSettings) -> None:
    """Add the placement of a pod to its spec: where it may run, and with which image pull secrets."""
    spread = placement.topology_spread_constraints or settings.pods.topology_spread_constraints
    for key, value in (
        ("nodeSelector", placement.node_selector),
        ("tolerations", placement.tolerations),
        ("affinity", placement.affinity),
        ("priorityClassName", placement.priority_class_name),
        ("runtimeClassName", placement.runtime_class_name),
        ("schedulerName", placement.scheduler_name or settings.pods.scheduler_name),
        ("topologySpreadConstraints", [one.to_json() for one in spread]),
    ):
        if value:
            spec[key] = value
    names = dict.fromkeys(one.name for one in (*settings.image_pull_secrets, *placement.image_pull_secrets))
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


def init_containers(template: PodTemplate, settings: OperatorSettings, field: str) -> list[Object]:
    """Return the init containers of a template, as restricted as the container that they come before.

    They share only the template's own volumes with it: neither its environment nor a volume of the operator,
    which hold the token of a stage worker, its programs' files, or the cache of the hub.

    Args:
        field: The path of the template's field, for messages.

    Raises:
        PodTemplateError: An environment variable or a mount has no name or path or occurs twice.
    """
    made: list[Object] = []
    for index, chosen in enumerate(template.init_containers):
        where = f"{field}.initContainers[{index}]"
        mounts = _named(chosen.volume_mounts, "mountPath", f"{where}.volumeMounts")
        own = [] if "/tmp" in mounts else [{"name": INIT_VOLUME, "mountPath": "/tmp"}]
        container = {
            "name": chosen.name,
            "image": chosen.image,
            "imagePullPolicy": foreign_pull_policy(settings),
            "command": chosen.command,
            "args": chosen.args,
            "env": list(_named(chosen.env, "name", f"{where}.env").values()),
            "resources": resources(settings.worker.resources, chosen.resources),
            "volumeMounts": [*own, *mounts.values()],
            "securityContext": restricted(read_only_root=True),
            # With this policy, the reason of a failure is part of the pod's status.
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        made.append({key: value for key, value in container.items() if value})
    return made


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
