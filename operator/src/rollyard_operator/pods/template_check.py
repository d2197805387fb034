"""The check of pod templates. It is pure: it reads a spec and names each field that is refused.

Only known values are permitted. An unknown key, kind or source is refused, because a feature of a later
Kubernetes version must not be permitted by accident.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rollyard_crds import STAGES, BackendPool, RolloutJob
from rollyard_crds.fields.pod_template import InitContainer, Placement, PodSecurityContext, PodTemplate

from rollyard_operator.allowed import (
    MOUNT_ROOTS,
    ORDINARY_VOLUMES,
    is_below,
    is_id,
    is_image,
    is_key,
    is_named,
)
from rollyard_operator.kube.labels import JOB_SECRET_PREFIX, READY_PREFIX
from rollyard_operator.pods.parts import APP_USER, RESERVED_PREFIX
from rollyard_operator.settings import OperatorSettings

MOST = 8
"""The number of fields that one message names."""
_OWN_PREFIXES = ("rollyard.dev", "app.kubernetes.io")
_SOURCES: Final = frozenset(("configMap", "downwardAPI"))
"""The sources that a projected volume may have without a permission."""
_MOUNT_KEYS: Final = frozenset(("name", "mountPath", "readOnly", "recursiveReadOnly", "subPath"))
_ENV_SOURCES: Final = frozenset(("configMapKeyRef", "fieldRef", "resourceFieldRef"))
_CODE_ENV: Final = re.compile(
    r"(PYTHON|LD_|GLIBC_|GCONV_|SSL_|OPENSSL_|CURL_|REQUESTS_|ROLLYARD_|OTEL_|GIT_|HF_(?!HOME$)|HUGGING).*"
    r"|.*_PROXY|.*_PRELOAD|PATH|HOME|XDG_.*|IFS|ENV|BASH_.*|LOCPATH|NLSPATH|HOSTALIASES|RES_OPTIONS",
    re.IGNORECASE,
)
"""Environment variables that load code into a stage worker or decide whom it trusts or talks to."""


def job_violations(job: RolloutJob, settings: OperatorSettings) -> tuple[str, ...]:
    """Return the fields of a job's templates that the installation refuses, each with the value to change."""
    check = _Check(settings, job.metadata.namespace)
    violations = [check.placement(job.spec.sandbox.template, "spec.sandbox.template")]
    for stage in STAGES:
        template: PodTemplate = getattr(job.spec.stages, stage).template
        violations.append(check.template(template, f"spec.stages.{stage}.template", worker=True))
    return _first(violations)


def pool_violations(pool: BackendPool, settings: OperatorSettings) -> tuple[str, ...]:
    """Return the refused fields of a pool. Its pods hold no token and may have any image and arguments."""
    check = _Check(settings, pool.metadata.namespace)
    return _first([check.template(pool.spec.template, "spec.template", worker=False)])


def sandbox_violations(placement: Placement, namespace: str, settings: OperatorSettings) -> tuple[str, ...]:
    """Return the refused fields of a job's sandbox template."""
    return _first([_Check(settings, namespace).placement(placement, "spec.sandbox.template")])


def _first(violations: Iterable[Iterator[str]]) -> tuple[str, ...]:
    lines = [line for lines in violations for line in lines]
    left = len(lines) - MOST
    return (*lines[:MOST], *([f"{left} further fields"] if left > 0 else ()))


def _chosen(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the set keys of an entry. The API server treats null like an absent key."""
    return {key: value for key, value in entry.items() if value is not None}


def _name(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, Mapping) else None


class _Check:
    """The rules for the objects of one namespace."""

    def __init__(self, settings: OperatorSettings, namespace: str) -> None:
        self._settings = settings
        self._allowed = settings.allow
        self._home = namespace == settings.release_namespace

    def template(self, template: PodTemplate, field: str, worker: bool) -> Iterator[str]:
        """Check the template of a stage worker or a backend, and yield a message for each refused field."""
        yield from self.placement(template, field)
        foreign = worker and template.image not in ("", self._settings.images.worker)
        if foreign and not is_image(template.image, self._allowed.images):
            yield _no(f"{field}.image", "a stage worker's image beside its token", "images")
        for index, entry in enumerate(template.env):
            yield from self._env(entry, f"{field}.env[{index}]", worker)
        for index, container in enumerate(template.init_containers):
            yield from self._init_container(container, f"{field}.initContainers[{index}]")
        yield from self._security(template.pod_security_context, f"{field}.podSecurityContext")
        # What an init container writes to an emptyDir is there when the worker starts.
        filled = [mount.get("name") for one in template.init_containers for mount in one.volume_mounts]
        harmless: list[object] = []
        for index, entry in enumerate(template.volumes):
            yield from self._volume(entry, f"{field}.volumes[{index}]")
            if _chosen(entry).keys() <= {"name", "emptyDir"} and entry.get("name") not in filled:
                harmless.append(entry.get("name"))
        for index, entry in enumerate(template.volume_mounts):
            yield from self._mount(entry, f"{field}.volumeMounts[{index}]", worker, harmless)

    def placement(self, placement: Placement, field: str) -> Iterator[str]:
        """Check where a pod may run. These rules apply to pods of every kind."""
        allowed = self._allowed
        for what, names, keys in (
            ("labels", placement.labels, allowed.labels),
            ("annotations", placement.annotations, allowed.annotations),
        ):
            for key in names:
                prefix = key.rpartition("/")[0].lower()
                if any(prefix == own or prefix.endswith(f".{own}") for own in _OWN_PREFIXES):
                    yield f"{field}.{what}[{key!r}]: the prefix {prefix!r} is reserved; choose another key"
                elif not is_key(key, keys):
                    yield _no(f"{field}.{what}[{key!r}]", "this key", what)
        for index, one in enumerate(placement.tolerations):
            taint = one.get("key") or "*"  # A toleration without a key matches every taint.
            if not is_key(taint, allowed.tolerations):
                yield _no(f"{field}.tolerations[{index}]", f"the taint {taint!r}", "tolerations")
        yield from self._affinity(placement.affinity, f"{field}.affinity")
        name = placement.priority_class_name
        if name and not is_named(name, allowed.priority_classes):
            yield _no(f"{field}.priorityClassName", f"the class {name!r}", "priorityClasses")
        name = placement.runtime_class_name
        if name and not is_named(name, allowed.runtime_classes):
            yield _no(f"{field}.runtimeClassName", f"the class {name!r}", "runtimeClasses")
        name = placement.scheduler_name
        if name and not is_named(name, allowed.schedulers):
            yield _no(f"{field}.schedulerName", f"the scheduler {name!r}", "schedulers")
        for index, reference in enumerate(placement.image_pull_secrets):
            yield from self._secret(reference.name, f"{field}.imagePullSecrets[{index}]")

    def _init_container(self, container: InitContainer, field: str) -> Iterator[str]:
        """Check an init container. It has no token, so its environment loads no code beside one."""
        if not is_image(container.image, self._allowed.init_containers):
            yield _no(f"{field}.image", f"the init container's image {container.image!r}", "initContainers")
        for index, entry in enumerate(container.env):
            yield from self._env(entry, f"{field}.env[{index}]", worker=False)
        for index, entry in enumerate(container.volume_mounts):
            yield from self._mount(entry, f"{field}.volumeMounts[{index}]", worker=False, harmless=())

    def _security(self, context: PodSecurityContext, field: str) -> Iterator[str]:
        allowed = self._allowed
        chosen = [
            ("runAsUser", "user", context.run_as_user),
            ("runAsGroup", "group", context.run_as_group),
            ("fsGroup", "group", context.fs_group),
        ]
        for index, group in enumerate(context.supplemental_groups):
            chosen.append((f"supplementalGroups[{index}]", "group", group))
        for name, kind, number in chosen:
            ids = allowed.users if kind == "user" else allowed.groups
            if number not in (None, APP_USER) and not is_id(number, ids):
                yield _no(f"{field}.{name}", f"the {kind} {number}", f"{kind}s")

    def _secret(self, name: object, field: str) -> Iterator[str]:
        own = isinstance(name, str) and (
            name.startswith((JOB_SECRET_PREFIX, READY_PREFIX))
            or name == self._settings.hub.token_secret
            or (self._home and name in self._settings.reserved_secrets)
        )
        if own:
            yield f"{field}: the Secret {name!r} is the installation's own"
        elif not is_named(name, self._allowed.secrets):
            yield _no(field, f"the Secret {name!r}", "secrets")

    def _env(self, entry: Mapping[str, Any], field: str, worker: bool) -> Iterator[str]:
        variable = _chosen(entry)
        for key in variable.keys() - {"name", "value", "valueFrom"}:
            yield f"{field}.{key}: not known; an environment variable has 'name' and 'value' or 'valueFrom'"
        name = variable.get("name")
        if worker and isinstance(name, str) and _CODE_ENV.fullmatch(name) and name not in self._allowed.env:
            yield _no(f"{field}.name", f"{name!r} beside a worker's token", "env")
        source = variable.get("valueFrom", {})
        if not isinstance(source, Mapping):
            yield f"{field}.valueFrom: must be a mapping"
            return
        for kind, value in _chosen(source).items():
            if kind == "secretKeyRef":
                yield from self._secret(_name(value, "name"), f"{field}.valueFrom.secretKeyRef")
            elif kind not in _ENV_SOURCES:
                yield f"{field}.valueFrom.{kind}: not permitted; known are {', '.join(sorted(_ENV_SOURCES))}"

    def _volume(self, entry: Mapping[str, Any], field: str) -> Iterator[str]:
        for kind, value in _chosen(entry).items():
            if kind == "name":
                continue
            where = f"{field}.{kind}"
            if kind == "hostPath":
                path = _name(value, "path")
                if not is_below(path, self._allowed.host_path):
                    yield _no(where, f"the node's path {path!r}", "hostPath")
            elif kind == "secret":
                yield from self._secret(_name(value, "secretName"), where)
            elif kind == "projected":
                yield from self._projected(value, where)
            elif kind == "persistentVolumeClaim":
                claim = _name(value, "claimName")
                if self._home and claim in self._settings.reserved_claims:
                    yield f"{where}: the claim {claim!r} is the control plane's own"
                elif claim is not None and claim == self._settings.hub.claim:
                    yield f"{where}: the claim {claim!r} is the cache of the hub, which only downloads change"
                elif kind not in self._allowed.volumes:
                    yield _no(where, f"the claim {claim!r}", "volumes")
            elif kind not in ORDINARY_VOLUMES and kind not in self._allowed.volumes:
                yield _no(where, "this kind of volume", "volumes")

    def _projected(self, volume: object, field: str) -> Iterator[str]:
        sources = _name(volume, "sources")
        if sources is not None and not isinstance(sources, Sequence):
            yield f"{field}.sources: must be a list"
            return
        for index, source in enumerate(sources or ()):
            if not isinstance(source, Mapping):
                yield f"{field}.sources[{index}]: must be a mapping"
                continue
            for kind, value in _chosen(source).items():
                where = f"{field}.sources[{index}].{kind}"
                if kind == "secret":
                    yield from self._secret(_name(value, "name"), where)
                elif kind not in _SOURCES and kind not in self._allowed.volumes:
                    yield _no(where, "this source", "volumes")

    def _mount(
        self, entry: Mapping[str, Any], field: str, worker: bool, harmless: Sequence[object]
    ) -> Iterator[str]:
        mount = _chosen(entry)
        for key in mount.keys() - _MOUNT_KEYS:
            yield f"{field}.{key}: not permitted; a mount has {', '.join(sorted(_MOUNT_KEYS))}"
        name, path = mount.get("name"), mount.get("mountPath")
        if isinstance(name, str) and name.startswith(RESERVED_PREFIX):
            yield f"{field}.name: volumes whose names begin with {RESERVED_PREFIX!r} are the operator's"
        if worker and name not in harmless and not is_below(path, (*MOUNT_ROOTS, *self._allowed.mounts)):
            roots = ", ".join(MOUNT_ROOTS)
            yield _no(f"{field}.mountPath", f"{path!r} outside of {roots} beside a worker's token", "mounts")

    def _affinity(self, value: object, field: str) -> Iterator[str]:
        if self._allowed.cross_namespace_affinity:
            return
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key in ("namespaces", "namespaceSelector") and inner is not None:
                    yield _no(f"{field}.{key}", "the pods of other namespaces", "crossNamespaceAffinity")
                elif key != "labelSelector":  # The keys of a label selector are labels.
                    yield from self._affinity(inner, f"{field}.{key}")
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                yield from self._affinity(inner, f"{field}[{index}]")


def _no(field: str, what: str, value: str) -> str:
    return f"{field}: this installation does not permit {what}; the chart's value jobs.allow.{value} would"
