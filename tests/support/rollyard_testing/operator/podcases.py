"""Everything that the operator makes, for many settings and specs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rollyard_crds import BackendPool, RolloutJob
from rollyard_crds.claims import shape_of
from rollyard_drivers.reconcile.job import job_workloads
from rollyard_drivers.reconcile.plan import Profile
from rollyard_drivers.reconcile.pool import pool_workloads
from rollyard_operator.kube import labels
from rollyard_operator.kube.labels import Object
from rollyard_operator.pods.sandboxes import (
    job_reference,
    owner_of_object,
    sandbox_pod,
    secret_of,
    token_hash,
    warm_owner,
    warm_reference,
)
from rollyard_operator.pods.workloads import (
    backend_pod,
    installation_digest,
    network_policy,
    pool_service,
    worker_pod,
)
from rollyard_operator.settings import OperatorSettings

UID = "11111111-2222-4333-8444-555555555555"
PLACEMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"nodeSelector": {"kubernetes.io/os": "linux"}, "priorityClassName": "system-cluster-critical"},
    {
        "labels": {"team": "a", "app.kubernetes.io/name": "mine"},
        "annotations": {"note": "text"},
        "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule"}],
        "imagePullSecrets": [{"name": "registry"}, {"name": "another"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["yes"]}]}
                    ]
                }
            }
        },
    },
    {"tolerations": [{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}]},
    {
        "schedulerName": "volcano",
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"rollyard.dev/instance": "team-a"}},
                "minDomains": 2,
            }
        ],
    },
)
TEMPLATES: tuple[dict[str, Any], ...] = (
    {},
    {"image": "mine:1", "resources": {"limits": {"memory": "8Gi"}, "requests": {"cpu": "2"}}},
    {
        "env": [
            {"name": "HOME", "value": "/work"},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "a"}}},
        ],
        "volumes": [{"name": "data", "emptyDir": {}}, {"name": "cfg", "configMap": {"name": "cfg"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/tmp"}, {"name": "cfg", "mountPath": "/cfg"}],
        "resources": {"requests": {"memory": "64Mi"}},
    },
    {
        "volumes": [{"name": "data", "emptyDir": {}}],
        "volumeMounts": [{"name": "data", "mountPath": "/mnt/data"}],
        "initContainers": [
            {
                "name": "fetch",
                "image": "fetch:1",
                "command": ["sh", "-c", "cp -r /data/. /out"],
                "env": [{"name": "HOME", "value": "/tmp"}],
                "volumeMounts": [{"name": "data", "mountPath": "/out"}],
            },
            {
                "name": "check",
                "image": "mine:1",
                "args": ["--strict"],
                "resources": {"limits": {"memory": "64Mi"}},
                "volumeMounts": [{"name": "data", "mountPath": "/tmp", "readOnly": True}],
            },
        ],
        "podSecurityContext": {"supplementalGroups": [3000, 4000]},
    },
    {"podSecurityContext": {"runAsUser": 2000, "fsGroup": 2001, "fsGroupChangePolicy": "Always"}},
)
ENGINES: tuple[dict[str, Any], ...] = (
    {"type": "embedded"},
    {"type": "embedded", "args": ["--threads", "2", "--port", "9001"], "env": {"OMP_NUM_THREADS": "2"}},
    {"type": "vllm", "resources": {"gpu": 2}, "args": ["--max_model_len=4096", "--seed=$(BACKEND_INDEX)"]},
    {"type": "vllm", "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"], "env": {"A": "b"}},
)
SANDBOXES: tuple[dict[str, Any], ...] = (
    {},
    {"image": "docker://python:3.12-slim", "resources": {"cpu": "500m", "memory": "512Mi", "disk": "2Gi"}},
    {"image": "registry.example:5000/a/b@sha256:" + "0" * 64, "resources": {"cpu": "1m", "memory": "4M"}},
)
PODS: tuple[dict[str, Any], ...] = (
    {},
    {"schedulerName": "own", "podSecurityContext": {"runAsGroup": 5000, "supplementalGroups": [6000]}},
)
HUBS: tuple[dict[str, str], ...] = (
    {},
    {"claim": "hub-cache", "tokenSecret": "hub-token", "endpoint": "https://hub.example"},
)
MODELS = ("/models/Qwen3-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B@refs/pr/1")
NAMES = ("a", "job-1", "x" * 63, "0-digits")


PERMISSIVE: dict[str, Any] = {
    "labels": ["*"],
    "annotations": ["*"],
    "tolerations": ["*"],
    "priorityClasses": True,
    "runtimeClasses": True,
    "secrets": True,
    "images": True,
    "schedulers": True,
    "initContainers": True,
    "users": ["1-65535"],
    "groups": ["1-65535"],
}
"""The permissions of an installation that leaves nearly everything to its authors."""


def settings_of(dice: random.Random) -> OperatorSettings:
    """Return settings as an installation may have them."""
    required = dice.random() < 0.7
    return OperatorSettings.model_validate(
        {
            "instance": dice.choice(["rollyard", "i" * 40, "team-a"]),
            "controlPlaneUrl": dice.choice(["http://api:8765", "https://api.example/rollyard"]),
            "controlPlaneCaFile": dice.choice([None, "/etc/ca.crt"]),
            "tokenFile": "/t",
            "workerTokenFile": "/w",
            "releaseNamespace": "rollyard",
            "images": {"worker": "w:1", "engine": "e:1", "sandbox": "s:1", "sandboxDefault": "d:1"},
            "allow": PERMISSIVE,
            "imagePullPolicy": dice.choice(["Always", "IfNotPresent", "Never"]),
            "imagePullSecrets": dice.choice([[], [{"name": "registry"}]]),
            "imageVolume": dice.choice(["always", "never"]),
            "isolation": {"required": required, "checks": ["10.96.0.1:443"] if required else []},
            "hub": dice.choice(HUBS),
            "pods": dice.choice(PODS),
            "worker": {"resources": dice.choice([{}, {"limits": {"cpu": "1", "memory": "1Gi"}}])},
            "sandbox": {
                "cpuRequestFraction": dice.choice([0.01, 0.25, 1.0]),
                "runAsUser": dice.choice([1000, 65534]),
            },
        }
    )


def objects(dice: random.Random, namespace: str) -> Iterator[Object]:
    """Yield one of each kind of object, for a random installation, job and pool."""
    settings = settings_of(dice)
    # The cache of the hub is refused to pods with a user of their own.
    templates = TEMPLATES[:-1] if settings.hub.claim else TEMPLATES
    profile = Profile(made_of=installation_digest(settings), combine_stages=dice.random() < 0.3)
    meta = {
        "name": dice.choice(NAMES),
        "namespace": namespace,
        "uid": UID,
        "labels": dice.choice([{}, {"kueue.x-k8s.io/queue-name": "team-queue"}]),
    }
    job = RolloutJob.model_validate(
        {
            "metadata": meta,
            "spec": {
                "tasks": {"stream": True},
                "handler": "shell",
                "backendRef": {"name": "pool"},
                "sandbox": {**dice.choice(SANDBOXES), "template": dice.choice(PLACEMENTS)},
                "stages": {
                    stage: {
                        "replicas": dice.choice([1, 2]),
                        "template": {**dice.choice(PLACEMENTS), **dice.choice(templates)},
                    }
                    for stage in ("init", "run", "eval")
                },
            },
        }
    )
    for workload in job_workloads(job, profile):
        yield worker_pod(workload, job, settings, "rollyard-job-1", dice.choice(MODELS))
    template = {**dice.choice(PLACEMENTS), **dice.choice(templates)}
    pool = BackendPool.model_validate(
        {
            "metadata": meta,
            "spec": {"model": dice.choice(MODELS), "engine": dice.choice(ENGINES), "template": template},
        }
    )
    for workload in pool_workloads(pool, profile):
        yield backend_pod(workload, pool, settings)
    yield pool_service(pool, settings)
    yield network_policy(namespace, settings)
    yield warm_owner(namespace, settings)
    raw = {"metadata": meta, "spec": job.to_json()["spec"]}
    # A reserved label keeps sandboxes from being made at all; workers show that ours are stronger.
    raw["spec"]["sandbox"].get("template", {}).get("labels", {}).pop(labels.NAME, None)
    owner = owner_of_object(raw, settings)
    assert owner is not None
    nonce = f"{dice.getrandbits(64):016x}"
    for claim in ("", f"c{dice.getrandbits(80):020x}"):
        name = f"sb-{claim}" if claim else "sbw-0123456789abcdef-12"
        yield sandbox_pod(
            name,
            shape_of(job.spec.sandbox),
            owner,
            settings,
            nonce=nonce,
            token_sha256=token_hash(secret_of("key", namespace, name, nonce)),
            reference=job_reference(owner) if claim else warm_reference("rollyard-warm", UID),
            claim=claim,
            checks=settings.isolation.checks,
        )
