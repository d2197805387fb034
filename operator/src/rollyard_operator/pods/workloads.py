"""The pods of stage workers and backends, and their services and policies, as plain JSON. This is pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from rollyard_crds import BackendPool, RolloutJob
from rollyard_crds.base import API_VERSION
from rollyard_crds.claims import EXEC_PORT
from rollyard_crds.fields.pod_template import PodResources, PodTemplate
from rollyard_crds.names import NODE, PROVIDER
from rollyard_crds.reading.engine_arguments import given_port
from rollyard_drivers.commands import (
    ENGINE_MODULE,
    SERVER_ENV,
    WORKER_MODULE,
    engine_arguments,
    vllm_command,
    worker_arguments,
)
from rollyard_drivers.reconcile.naming import NAME_LIMIT
from rollyard_drivers.reconcile.plan import Workload
from rollyard_process.hub_names import hub_name
from rollyard_process.telemetry.variables import LOG_FORMAT, trace_variables

from rollyard_operator.kube import labels
from rollyard_operator.kube.labels import Component, Object
from rollyard_operator.pods.parts import (
    INIT_VOLUME,
    PodTemplateError,
    chosen_security,
    digest,
    foreign_pull_policy,
    init_containers,
    resources,
    restricted,
    with_placement,
    with_template,
)
from rollyard_operator.pods.status import BACKEND_PORT, MODEL_CONTAINER, worker_name
from rollyard_operator.settings import OperatorSettings

STOP_SECONDS = 30
"""The time between SIGTERM and SIGKILL of a worker or a backend, in seconds."""
DRAIN_SECONDS = 22
"""How long a stage worker may go on with its leased work before it hands the work over, in seconds."""
HUB_MODULE = ("-m", "rollyard_process.hub")
HUB_FOLDER = "/var/cache/rollyard/hub"
"""The folder of the hub's cache in the containers that have one."""
HUB_VOLUME = "rollyard-hub"
MODEL_VOLUME = "rollyard-model"
MODEL_FOLDER = "/var/cache/rollyard/model"
MODEL_LINK = f"{MODEL_FOLDER}/current"
"""The link to the folder of a backend's model in the cache. Templates may mount a volume over /tmp."""
TOKEN_FOLDER = "/etc/rollyard/worker"
TOKEN_FILE = f"{TOKEN_FOLDER}/token"
POD_UID = "ROLLYARD_POD_UID"
"""The environment variable with the uid of a stage worker's pod."""
_TMP = {"name": "rollyard-tmp", "mountPath": "/tmp"}
_BASE_ENV = {
    "HOME": "/tmp",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    # Some programs ask for the user's name, which /etc/passwd does not contain.
    "LOGNAME": "rollyard",
    "USER": "rollyard",
}


def installation_digest(settings: OperatorSettings) -> str:
    """Return a digest of all settings that workers and backends are made from, for `Profile.made_of`."""
    return digest(
        settings.control_plane_url,
        settings.control_plane_ca_file is not None,
        (settings.images.worker, settings.images.engine, settings.images.vllm),
        settings.image_pull_policy,
        [secret.name for secret in settings.image_pull_secrets],
        settings.worker.model_dump(),
        settings.engine.model_dump(),
        settings.hub.model_dump(),
        settings.pods.model_dump(),
        _telemetry(settings),
    )


def _telemetry(settings: OperatorSettings) -> dict[str, str]:
    """Return the variables of a stage worker for traces and log lines."""
    traces = settings.traces
    variables: dict[str, str] = {LOG_FORMAT: settings.log_format} if settings.log_format != "text" else {}
    if traces.endpoint:
        variables |= trace_variables(traces.endpoint, traces.sample, None)
    return variables


def _hub_token(settings: OperatorSettings) -> list[Object]:
    """Return the variable with the token of the hub, by the name of its Secret, if there is one."""
    hub = settings.hub
    if not hub.token_secret:
        return []
    source = {"secretKeyRef": {"name": hub.token_secret, "key": hub.token_key}}
    return [{"name": "HF_TOKEN", "valueFrom": source}]


def _hub_endpoint(settings: OperatorSettings) -> dict[str, str]:
    return {"HF_ENDPOINT": settings.hub.endpoint} if settings.hub.endpoint else {}


def needs_hub(tokenizer: str, settings: OperatorSettings) -> bool:
    """Return whether a stage worker that needs this tokenizer gets the cache or the token of the hub."""
    configured = bool(settings.hub.claim or settings.hub.token_secret)
    return configured and hub_name(tokenizer) is not None


def _hub_volume(settings: OperatorSettings) -> Object:
    """Return the volume of the cache."""
    if settings.hub.claim:
        return {"name": HUB_VOLUME, "persistentVolumeClaim": {"claimName": settings.hub.claim}}
    return {"name": HUB_VOLUME, "emptyDir": {}}


def _model_container(model: str, engine: str, settings: OperatorSettings) -> Object:
    """Return the init container that downloads a backend's model before its server starts.

    It alone has the token and can write to the cache. Nothing that a pool says reaches it but the name of the
    model: the image, the command and the environment are the installation's.
    """
    arguments = (model, "--for", engine, "--link", MODEL_LINK)
    env = {**_BASE_ENV, "HF_HOME": HUB_FOLDER, **_hub_endpoint(settings)}
    return {
        "name": MODEL_CONTAINER,
        "image": settings.images.worker,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python", *HUB_MODULE, *arguments],
        "env": [*_env(env), *_hub_token(settings)],
        "resources": resources(settings.worker.resources, PodResources()),
        "volumeMounts": [
            _TMP,
            {"name": HUB_VOLUME, "mountPath": HUB_FOLDER},
            {"name": MODEL_VOLUME, "mountPath": MODEL_FOLDER},
        ],
        "securityContext": restricted(read_only_root=True),
        # With this policy, the reason of a failure is part of the pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _env(values: Mapping[str, str]) -> list[Object]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _pod(
    workload: Workload,
    component: Component,
    owner: RolloutJob | BackendPool,
    template: PodTemplate,
    settings: OperatorSettings,
    spec: Object,
) -> Object:
    meta = owner.metadata
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": workload.name,
            "namespace": meta.namespace,
            "labels": {**template.labels, **owned_labels(component, owner, settings)},
            "annotations": {**template.annotations, labels.SPEC_HASH: workload.spec_hash},
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": spec,
    }


def owner_reference(owner: RolloutJob | BackendPool) -> Object:
    """Return the reference from a pod to the job or pool that it works for."""
    meta = owner.metadata
    return labels.owner_reference(API_VERSION, owner.kind, meta.name, meta.uid or "")


def owned_labels(
    component: Component, owner: RolloutJob | BackendPool, settings: OperatorSettings
) -> dict[str, str]:
    """Return the labels that say to which job or pool a pod belongs."""
    meta = owner.metadata
    name_label, uid_label = (
        (labels.JOB, labels.JOB_UID) if isinstance(owner, RolloutJob) else (labels.POOL, labels.POOL_UID)
    )
    own = labels.own_labels(settings.instance, component)
    own |= {name_label: meta.name, uid_label: meta.uid or ""}
    if queue := meta.labels.get(labels.QUEUE):
        own[labels.QUEUE] = queue
    return own


def stage_label(workload: Workload) -> str:
    """Return the value of the label that names a stage worker's stages."""
    return "-".join(workload.stages)


def _pod_spec(
    template: PodTemplate,
    settings: OperatorSettings,
    container: Object,
    volumes: list[Object],
    field: str,
) -> Object:
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": chosen_security(settings.pods.pod_security_context, template.pod_security_context),
        "containers": [
            {
                **container,
                "imagePullPolicy": foreign_pull_policy(settings)
                if template.image
                else settings.image_pull_policy,
                "securityContext": restricted(read_only_root=True),
                # With this policy, the end of the log is part of the pod's status.
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ],
        "volumes": [{"name": "rollyard-tmp", "emptyDir": {}}, *volumes],
    }
    with_template(spec, template, field)
    with_placement(spec, template, settings)
    if template.init_containers:
        spec["initContainers"] = init_containers(template, settings, field)
        spec["volumes"].append({"name": INIT_VOLUME, "emptyDir": {}})
    own = template.pod_security_context
    if any("persistentVolumeClaim" in volume for volume in volumes) and (
        own.run_as_user or own.run_as_group or own.fs_group
    ):
        raise PodTemplateError(
            f"{field}.podSecurityContext: pods with the shared cache of the hub have the installation's user "
            "and groups; leave out runAsUser, runAsGroup and fsGroup, or name the model by its folder"
        )
    return spec


def worker_spec(
    work: Sequence[str],
    name: Sequence[str],
    template: PodTemplate,
    settings: OperatorSettings,
    secret: str,
    field: str,
    of_hub: bool = False,
) -> Object:
    """Return the spec of a stage worker's pod.

    Args:
        work: The arguments that say what the worker works on.
        name: The arguments that name the worker.
        secret: The name of the Secret with the worker's token.
        field: The name of the template's field, for messages.
        of_hub: Whether the worker gets the cache and the token of the hub.

    Raises:
        TemplateError: The template cannot be used.
    """
    env = {**_BASE_ENV, "ROLLYARD_HOME": "/tmp/rollyard", **_hub_endpoint(settings)}
    if settings.control_plane_ca_file is not None:
        # SSL_CERT_FILE would hide the public authorities, which downloads of tokenizers need.
        env["ROLLYARD_CA_FILE"] = f"{TOKEN_FOLDER}/ca.crt"
    env |= _telemetry(settings)
    mounts: list[Object] = [
        _TMP,
        {"name": "rollyard-token", "mountPath": TOKEN_FOLDER, "readOnly": True},
    ]
    volumes: list[Object] = [
        {
            "name": "rollyard-token",
            "secret": {"secretName": secret, "defaultMode": 0o440},
        }
    ]
    if of_hub and settings.hub.claim:
        env["HF_HOME"] = HUB_FOLDER
        mounts.append({"name": HUB_VOLUME, "mountPath": HUB_FOLDER})
        volumes.append(_hub_volume(settings))
    own_uid = {"name": POD_UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    container: Object = {
        "name": "worker",
        "image": template.image or settings.images.worker,
        "command": ["python", *WORKER_MODULE],
        "args": [
            *work,
            *("--sandbox", PROVIDER, "--node", NODE),
            *("--drain-seconds", str(DRAIN_SECONDS)),
            *name,
        ],
        "env": [*_env(env), *(_hub_token(settings) if of_hub else ()), own_uid],
        "resources": resources(settings.worker.resources, template.resources),
        "volumeMounts": mounts,
    }
    return _pod_spec(template, settings, container, volumes, field)


def worker_pod(
    workload: Workload, job: RolloutJob, settings: OperatorSettings, secret: str, tokenizer: str = ""
) -> Object:
    """Return the pod of a stage worker.

    Args:
        secret: The name of the Secret with the token of the job.
        tokenizer: The tokenizer of the job's pool.

    Raises:
        TemplateError: The template of the stage cannot be used.
    """
    stage = workload.stages[0]
    template: PodTemplate = getattr(job.spec.stages, stage).template
    # The kubelet replaces the variable.
    name = ("--name", worker_name(workload.name, f"$({POD_UID})"))
    work = worker_arguments(workload, settings.control_plane_url, TOKEN_FILE)
    field, of_hub = f"spec.stages.{stage}.template", needs_hub(tokenizer, settings)
    spec = worker_spec(work, name, template, settings, secret, field, of_hub)
    pod = _pod(workload, "stage-worker", job, template, settings, spec)
    pod["metadata"]["labels"][labels.STAGE] = stage_label(workload)
    return pod


def backend_pod(workload: Workload, pool: BackendPool, settings: OperatorSettings) -> Object:
    """Return the pod of an inference backend. It listens on port 8000 unless its arguments name another one.

    Raises:
        TemplateError: The template of the pool cannot be used.
    """
    template = pool.spec.template
    vllm = workload.engine == "vllm"
    volumes: list[Object] = []
    mounts: list[Object] = [_TMP]
    of_hub = hub_name(workload.model) is not None
    folder = MODEL_LINK if of_hub else ""
    if of_hub:
        volumes += [_hub_volume(settings), {"name": MODEL_VOLUME, "emptyDir": {}}]
        for volume, path in ((HUB_VOLUME, HUB_FOLDER), (MODEL_VOLUME, MODEL_FOLDER)):
            mounts.append({"name": volume, "mountPath": path, "readOnly": True})
    if vllm:
        image, defaults = settings.images.vllm, PodResources()
        command = vllm_command(workload, "0.0.0.0", BACKEND_PORT, folder)
        env = {**_BASE_ENV, **SERVER_ENV}
        # Tensor parallelism uses shared memory, of which a container has only 64 MiB by default.
        volumes.append({"name": "rollyard-shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "rollyard-shm", "mountPath": "/dev/shm"})
    else:
        image, defaults, env = settings.images.engine, settings.engine.resources, dict(_BASE_ENV)
        if settings.log_format != "text":
            env[LOG_FORMAT] = settings.log_format
        arguments = engine_arguments(workload, "0.0.0.0", BACKEND_PORT, folder=folder)
        command = ("python", *ENGINE_MODULE, *arguments)
    amounts = resources(defaults, template.resources)
    if workload.gpus:
        amounts.setdefault("limits", {})["nvidia.com/gpu"] = str(workload.gpus)
        amounts.get("requests", {}).pop("nvidia.com/gpu", None)
    port = given_port(workload.args, BACKEND_PORT)
    container: Object = {
        "name": "backend",
        "image": template.image or image,
        "command": list(command),
        "env": _env({**env, **dict(workload.env)}),
        "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}],
        "resources": amounts,
        "volumeMounts": mounts,
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
    }
    spec = _pod_spec(template, settings, container, volumes, "spec.template")
    if of_hub:
        download = _model_container(workload.model, workload.engine, settings)
        spec["initContainers"] = [download, *spec.get("initContainers", ())]
    return _pod(workload, "backend", pool, template, settings, spec)


def service_name(pool: str) -> str:
    """Return the name of a pool's service: a DNS label that begins with a letter, different for each pool."""
    name = f"rollyard-{pool}"
    if len(name) <= NAME_LIMIT:
        return name
    tail = hashlib.sha256(pool.encode()).hexdigest()[:8]
    return f"{name[: NAME_LIMIT - 9].rstrip('-')}-{tail}"


def pool_service(pool: BackendPool, settings: OperatorSettings) -> Object:
    """Return a headless service over a pool's ready backends.

    It is meant for people and for monitoring. The router connects to the pods directly.
    """
    meta = pool.metadata
    chosen = labels.own_labels(settings.instance, "backend") | {labels.POOL: meta.name}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(meta.name),
            "namespace": meta.namespace,
            "labels": chosen,
            "ownerReferences": [
                labels.owner_reference(API_VERSION, "BackendPool", meta.name, meta.uid or "")
            ],
        },
        "spec": {
            "clusterIP": "None",
            "selector": chosen,
            "ports": [{"name": "http", "port": BACKEND_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def network_policy(namespace: str, settings: OperatorSettings) -> Object:
    """Return the policy that keeps the sandboxes of a namespace from sending.

    Only stage workers and operators can connect to their exec servers. The operator connects to find out
    whether a server accepts connections, and sends nothing.
    """
    sandbox: dict[str, Any] = {labels.COMPONENT: "sandbox", labels.INSTANCE: settings.instance}
    worker = {labels.COMPONENT: "stage-worker", labels.INSTANCE: settings.instance}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.release_namespace}},
        "podSelector": {"matchLabels": {labels.NAME: "rollyard", labels.COMPONENT: "operator"}},
    }
    own = labels.own_labels(settings.instance, "sandbox")
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": f"rollyard-{settings.instance}-sandboxes"[:253],
            "namespace": namespace,
            "labels": own,
        },
        "spec": {
            "podSelector": {"matchLabels": sandbox},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {
                    "from": [{"podSelector": {"matchLabels": worker}}, operator],
                    "ports": [{"protocol": "TCP", "port": EXEC_PORT}],
                }
            ],
            "egress": [],
        },
    }
