"""Init containers, users and groups that templates choose get nearer to no token and to no node."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from rollyard_crds import BackendPool, RolloutJob
from rollyard_drivers.reconcile.job import job_workloads
from rollyard_drivers.reconcile.pool import pool_workloads
from rollyard_operator.kube.labels import Object
from rollyard_operator.pods.template_check import job_violations, pool_violations
from rollyard_operator.pods.workloads import backend_pod, worker_pod
from rollyard_operator.settings import OperatorSettings
from rollyard_testing.operator.podcases import PERMISSIVE

pytestmark = pytest.mark.attack(boundary="kubernetes", surface="`template` of a job or a pool")

SETTINGS = OperatorSettings.model_validate(
    {
        "instance": "test",
        "controlPlaneUrl": "http://api:8765",
        "tokenFile": "/t",
        "workerTokenFile": "/w",
        "releaseNamespace": "home",
        "reservedSecrets": ["home-tokens"],
        "images": {"worker": "w:1", "engine": "e:1", "sandbox": "s:1", "sandboxDefault": "d:1"},
        "hub": {"tokenSecret": "hub-token"},
        "allow": {**PERMISSIVE, "volumes": ["persistentVolumeClaim"], "env": ["A"]},
    }
)
"""An installation that permits nearly everything."""
JOB_SECRET = "rollyard-job-1"


def job_of(template: Any, namespace: str = "team") -> RolloutJob:
    spec = {
        "tasks": {"stream": True},
        "handler": "shell",
        "backendRef": {"name": "pool"},
        "stages": {"run": {"template": template}},
    }
    meta = {"name": "job", "namespace": namespace, "uid": "u"}
    return RolloutJob.model_validate({"metadata": meta, "spec": spec})


def pool_of(template: Any, namespace: str = "team") -> BackendPool:
    meta = {"name": "pool", "namespace": namespace, "uid": "u"}
    return BackendPool.model_validate({"metadata": meta, "spec": {"model": "org/m", "template": template}})


def worker_of(template: Any) -> Object:
    job = job_of(template)
    (workload,) = [one for one in job_workloads(job) if one.stages == ("run",)]
    return worker_pod(workload, job, SETTINGS, JOB_SECRET, "org/m")


def backend_of(template: Any) -> Object:
    pool = pool_of(template)
    return backend_pod(pool_workloads(pool)[0], pool, SETTINGS)


def init(**fields: Any) -> dict[str, Any]:
    return {"name": "fetch", "image": "any:1", **fields}


FILLED: dict[str, Any] = {
    "volumes": [{"name": "v", "emptyDir": {}}],
    "initContainers": [init(volumeMounts=[{"name": "v", "mountPath": "/out"}])],
}


@pytest.mark.attack(
    "an init container reads the token of a stage worker, that of the hub, or another file or variable of "
    "the containers beside it",
    stopped_by="it mounts the template's volumes alone, and its environment and /tmp are its own",
)
def test_an_init_container_shares_the_templates_volumes_alone() -> None:
    for pod, main in ((worker_of(FILLED), "worker"), (backend_of(FILLED), "backend")):
        spec = pod["spec"]
        (made,) = [one for one in spec["initContainers"] if one["name"] == "fetch"]
        others = [one for one in (*spec["initContainers"], *spec["containers"]) if one is not made]
        assert others[-1]["name"] == main
        assert JOB_SECRET in json.dumps(spec["volumes"]) or main == "backend"
        assert "hub-token" in json.dumps(others), "the attack could win something"
        shared = {mount["name"] for one in others for mount in one["volumeMounts"]}
        assert {mount["name"] for mount in made["volumeMounts"]} & shared == set()
        assert "env" not in made
        for word in ("hub-token", JOB_SECRET, "rollyard-token", "rollyard-tmp"):
            assert word not in json.dumps(made)
        assert spec["automountServiceAccountToken"] is False
        assert not {"shareProcessNamespace", "hostNetwork", "hostPID", "serviceAccountName"} & spec.keys()
        assert made["securityContext"] == others[-1]["securityContext"]


@pytest.mark.attack(
    "an init container mounts a volume of the operator, or names a Secret with a token",
    stopped_by="its mounts and its environment are checked like those of other containers, whatever "
    "`jobs.allow` says",
)
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        *(
            ({"volumeMounts": [{"name": name, "mountPath": "/x"}]}, "volumeMounts[0].name")
            for name in ("rollyard-token", "rollyard-tmp", "rollyard-hub", "rollyard-model", "rollyard-shm")
        ),
        (
            {"volumeMounts": [{"name": "v", "mountPath": "/x", "mountPropagation": "Bidirectional"}]},
            "volumeMounts[0].mountPropagation",
        ),
        *(
            (
                {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}}]},
                "env[0].valueFrom.secretKeyRef",
            )
            for name in (JOB_SECRET, "rollyard-ready-1", "hub-token", "home-tokens")
        ),
        (
            {"env": [{"name": "A", "valueFrom": {"fileKeyRef": {"path": "p"}}}]},
            "env[0].valueFrom.fileKeyRef",
        ),
    ],
    ids=str,
)
def test_an_init_container_names_nothing_of_the_operator(fields: dict[str, Any], field: str) -> None:
    template = {"initContainers": [init(**fields)]}
    (refusal,) = job_violations(job_of(template, "home"), SETTINGS)
    assert refusal.startswith(f"spec.stages.run.template.initContainers[0].{field}: ")
    (refusal,) = pool_violations(pool_of(template, "home"), SETTINGS)
    assert refusal.startswith(f"spec.template.initContainers[0].{field}: ")


@pytest.mark.attack(
    "an init container fills an emptyDir that a stage worker has over its programs, which then run beside "
    "its token",
    surface="`template` of a stage",
    stopped_by="an emptyDir that an init container mounts is no longer one that may be anywhere",
)
def test_what_an_init_container_wrote_is_no_program_of_a_worker() -> None:
    for path in ("/usr/lib/python3", "/opt", "/tmp", "/etc/rollyard/worker"):
        over = {"volumeMounts": [{"name": "v", "mountPath": path}]}
        empty = {"volumes": FILLED["volumes"], **over}
        assert job_violations(job_of(empty), SETTINGS) == ()
        (refusal,) = job_violations(job_of({**FILLED, **over}), SETTINGS)
        assert refusal.startswith("spec.stages.run.template.volumeMounts[0].mountPath: ")
        assert "jobs.allow.mounts" in refusal
        assert pool_violations(pool_of({**FILLED, **over}), SETTINGS) == (), "its pods hold no token"
    data = {**FILLED, "volumeMounts": [{"name": "v", "mountPath": "/mnt/data"}]}
    assert job_violations(job_of(data), SETTINGS) == ()


@pytest.mark.attack(
    "its author runs as root, or has a pod without the restrictions that all pods have",
    stopped_by="the ids of users and groups begin with 1, for installers as well, and there is no field for "
    "anything else",
)
def test_no_choice_of_a_user_loosens_what_restricts_a_pod() -> None:
    before = worker_of({})["spec"]
    chosen = {"runAsUser": 2000, "runAsGroup": 2001, "fsGroup": 2002, "supplementalGroups": [2003]}
    after = worker_of({"podSecurityContext": chosen})["spec"]
    ids = {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"}
    kept = [
        {key: value for key, value in one["securityContext"].items() if key not in ids}
        for one in (before, after)
    ]
    assert kept[0] == kept[1]
    assert kept[0]["runAsNonRoot"] is True
    assert before["containers"][0] == after["containers"][0]
    root: list[dict[str, Any]] = [{name: 0} for name in ("runAsUser", "runAsGroup", "fsGroup")]
    for own in [*root, {"supplementalGroups": [3000, 0]}, {"runAsNonRoot": False}, {"privileged": True}]:
        with pytest.raises(ValueError, match=next(iter(own))):
            job_of({"podSecurityContext": own})
        installer = copy.deepcopy(SETTINGS.model_dump(by_alias=True))
        installer["pods"] = {"podSecurityContext": own}
        with pytest.raises(ValueError, match=next(iter(own))):
            OperatorSettings.model_validate(installer)
    for ids_of_root in ([0], ["0-5"], ["-1"]):
        with pytest.raises(ValueError, match="users"):
            OperatorSettings.model_validate(
                SETTINGS.model_dump(by_alias=True) | {"allow": {"users": ids_of_root}}
            )
