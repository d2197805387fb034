"""The pods that the operator makes: security, labels, owners, and what a template may and may not change."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from rollyard_crds import BackendPool, RolloutJob
from rollyard_crds.claims import EXEC_PORT, SandboxShape
from rollyard_crds.fields.pod_template import LocalReference, Placement, PodResources
from rollyard_crds.names import RUNTIME_PATH
from rollyard_drivers.reconcile.job import job_workloads
from rollyard_drivers.reconcile.plan import Profile
from rollyard_drivers.reconcile.pool import pool_workloads
from rollyard_operator.kube import labels
from rollyard_operator.kube.labels import Object
from rollyard_operator.pods.parts import PodTemplateError
from rollyard_operator.pods.sandboxes import (
    RUNTIME_BYTES,
    SandboxOwner,
    flavor_of,
    job_reference,
    owner_of_object,
    sandbox_pod,
    secret_of,
)
from rollyard_operator.pods.workloads import (
    backend_pod,
    installation_digest,
    network_policy,
    pool_service,
    service_name,
    worker_pod,
)
from rollyard_operator.settings import HubSettings, OperatorSettings, PodDefaults
from rollyard_testing.operator.podcases import PERMISSIVE, UID, objects, settings_of

SETTINGS = OperatorSettings.model_validate(
    {
        "instance": "test",
        "controlPlaneUrl": "http://api:8765",
        "tokenFile": "/t",
        "workerTokenFile": "/w",
        "releaseNamespace": "rollyard",
        "images": {"worker": "w:1", "engine": "e:1", "sandbox": "s:1", "sandboxDefault": "d:1"},
        "imageVolume": "always",
        "allow": PERMISSIVE,
    }
)
SPREAD: dict[str, Any] = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": {"matchLabels": {"rollyard.dev/job": "job"}},
}
SHAPE = SandboxShape(image="python:3.12", cpu=1.0, memory_bytes=1 << 30, disk_bytes=1 << 30, processes=64)
OWNER = SandboxOwner("team", "job", UID)


def job_of(**stage: Any) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "metadata": {"name": "job", "namespace": "team", "uid": UID},
            "spec": {
                "tasks": {"stream": True},
                "handler": "shell",
                "backendRef": {"name": "pool"},
                "stages": {"run": {"concurrency": 8, **stage}},
            },
        }
    )


def worker(job: RolloutJob, settings: OperatorSettings = SETTINGS, tokenizer: str = "") -> Object:
    (workload,) = [one for one in job_workloads(job) if one.stages == ("run",)]
    return worker_pod(workload, job, settings, "rollyard-job-1", tokenizer)


def backend(
    settings: OperatorSettings = SETTINGS, template: Any = None, model: str = "/models/m", **engine: Any
) -> Object:
    pool = BackendPool.model_validate(
        {
            "metadata": {"name": "pool", "namespace": "team", "uid": UID},
            "spec": {"model": model, "engine": engine, "template": template or {}},
        }
    )
    (workload,) = pool_workloads(pool)
    return backend_pod(workload, pool, settings)


def sandbox(settings: OperatorSettings = SETTINGS, owner: SandboxOwner = OWNER, claim: str = "c1") -> Object:
    return sandbox_pod(
        "sb-c1",
        SHAPE,
        owner,
        settings,
        nonce="n",
        token_sha256="ab" * 32,
        reference=job_reference(owner),
        claim=claim,
        checks=("10.0.0.1:443",),
    )


def env(pod: Object) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize("seed", range(60))
def test_every_pod_is_restricted_labelled_and_owned(seed: int) -> None:
    names = []
    for obj in objects(random.Random(seed), "team"):
        json.dumps(obj)
        meta = obj["metadata"]
        assert meta["namespace"] == "team"
        assert len(meta["name"]) <= 63
        names.append((obj["kind"], meta["name"]))
        assert meta["labels"][labels.MANAGED_BY] == "rollyard-operator"
        assert meta["labels"][labels.NAME] == "rollyard", "a template's labels are not stronger than ours"
        assert all(len(value) <= 63 for value in meta["labels"].values())
        if obj["kind"] != "Pod":
            continue
        spec = obj["spec"]
        assert spec["restartPolicy"] == "Never"
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        component = meta["labels"][labels.COMPONENT]
        security = dict(spec["securityContext"])
        ids = [security.pop(name) for name in ("runAsUser", "runAsGroup", "fsGroup")]
        further = security.pop("supplementalGroups", [])
        assert min(*ids, *further, 1) == 1, "nobody is root"
        if component == "sandbox":
            assert (len(set(ids)), further) == (1, [])
        policy = security.pop("fsGroupChangePolicy")
        assert policy == "OnRootMismatch" or component != "sandbox"
        assert security == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & spec.keys()
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert len(volumes) == len(spec["volumes"])
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "privileged": False,
                "readOnlyRootFilesystem": container["name"] != "sandbox",
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            own = {one["mountPath"]: one for one in container["volumeMounts"]}
            for folder in ("/etc/rollyard/worker", RUNTIME_PATH):
                assert own.get(folder, {"readOnly": True})["readOnly"], "its processes do not change it"
            mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(set(mounts)) == len(mounts)
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            given = [one["name"] for one in container.get("env", ())]
            assert len(set(given)) == len(given)
        (owner,) = meta["ownerReferences"]
        assert owner["controller"]
        assert owner["blockOwnerDeletion"]
        assert component in ("stage-worker", "backend", "sandbox")
    assert len(set(names)) == len(names)


def test_a_workers_command_and_token() -> None:
    pod = worker(job_of())
    container = pod["spec"]["containers"][0]
    assert container["command"] == ["python", "-m", "rollyard_pipeline"]
    args = container["args"]
    for flag, value in (
        ("--url", "http://api:8765"),
        ("--job", "job"),
        ("--namespace", "team"),
        ("--stages", "run"),
        ("--concurrency", "run=8"),
        ("--sandbox", "kubernetes"),
        ("--node", "kubernetes"),
        ("--token-file", "/etc/rollyard/worker/token"),
    ):
        assert args[args.index(flag) + 1] == value
    (token,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "rollyard-token"]
    assert token["secret"] == {"secretName": "rollyard-job-1", "defaultMode": 0o440}
    (uid,) = [one for one in container["env"] if one["name"] == "ROLLYARD_POD_UID"]
    assert uid["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert "$(ROLLYARD_POD_UID)" in args[args.index("--name") + 1], "each pod has a name of its own"
    drain = float(args[args.index("--drain-seconds") + 1])
    assert drain < pod["spec"]["terminationGracePeriodSeconds"], "what it holds is handed over before SIGKILL"
    assert "ROLLYARD_CA_FILE" not in env(pod)
    with_ca = SETTINGS.model_copy(update={"control_plane_ca_file": "/ca"})
    assert env(worker(job_of(), with_ca))["ROLLYARD_CA_FILE"] == "/etc/rollyard/worker/ca.crt"


def test_a_template_wins_over_defaults_resource_by_resource() -> None:
    assert worker(job_of())["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"memory": "2Gi"},
    }
    chosen = worker(job_of(template={"resources": {"requests": {"memory": "4Gi"}}}))
    assert chosen["spec"]["containers"][0]["resources"] == {"requests": {"cpu": "100m", "memory": "4Gi"}}


def test_a_template_says_where_pods_run() -> None:
    """Each appears in the pod as it stands in the spec: of stage workers, backends and sandboxes."""
    placement: dict[str, Any] = {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "high",
        "runtimeClassName": "gvisor",
        "schedulerName": "volcano",
        "topologySpreadConstraints": [SPREAD],
        "imagePullSecrets": [{"name": "own"}],
    }
    labels_too = {"labels": {"team": "a"}, "annotations": {"note": "b"}}
    settings = SETTINGS.model_copy(update={"image_pull_secrets": [LocalReference(name="registry")]})
    raw = {
        "metadata": {"namespace": "team", "name": "job", "uid": UID},
        "spec": {"sandbox": {"template": placement | labels_too}},
    }
    owner = owner_of_object(raw, settings)
    assert owner is not None
    for pod in (
        worker(job_of(template=placement | labels_too), settings),
        backend(settings, placement | labels_too, type="embedded"),
        sandbox(settings, owner),
    ):
        spec = pod["spec"]
        for name, value in placement.items():
            if name in ("tolerations", "imagePullSecrets"):
                assert value[0] in spec[name], name
            else:
                assert spec[name] == value, name
        assert spec["imagePullSecrets"] == [{"name": "registry"}, {"name": "own"}]
        assert pod["metadata"]["labels"]["team"] == "a"
        assert pod["metadata"]["annotations"]["note"] == "b"


def test_the_installation_says_where_pods_run_and_as_whom_unless_a_template_does() -> None:
    pods = {
        "schedulerName": "volcano",
        "topologySpreadConstraints": [SPREAD],
        "podSecurityContext": {"fsGroup": 2000, "supplementalGroups": [3000]},
    }
    settings = SETTINGS.model_copy(update={"pods": PodDefaults.model_validate(pods)})
    made = [worker(job_of(), settings), backend(settings), sandbox(settings)]
    for pod in made:
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["spec"]["topologySpreadConstraints"] == [SPREAD]
    for pod in made[:2]:
        security = pod["spec"]["securityContext"]
        assert (security["runAsUser"], security["fsGroup"]) == (10001, 2000)
        assert security["supplementalGroups"] == [3000]
    assert made[2]["spec"]["securityContext"]["fsGroup"] == 1000, "a sandbox has the user of its own setting"
    assert "supplementalGroups" not in made[2]["spec"]["securityContext"]
    own = {
        "schedulerName": "other",
        "topologySpreadConstraints": [SPREAD | {"maxSkew": 2}],
        "podSecurityContext": {"runAsUser": 4000, "supplementalGroups": [5000]},
    }
    spec = worker(job_of(template=own), settings)["spec"]
    assert (spec["schedulerName"], spec["topologySpreadConstraints"][0]["maxSkew"]) == ("other", 2)
    security = spec["securityContext"]
    assert [security[name] for name in ("runAsUser", "runAsGroup", "fsGroup")] == [4000, 10001, 2000]
    assert security["supplementalGroups"] == [5000]
    digests = {installation_digest(one) for one in (SETTINGS, settings)}
    flavors = {flavor_of(SHAPE, OWNER, one) for one in (SETTINGS, settings)}
    assert (len(digests), len(flavors)) == (2, 2), "other settings make other pods"


def test_init_containers_come_before_the_server_and_after_its_model() -> None:
    template = {
        "volumes": [{"name": "data", "emptyDir": {}}],
        "initContainers": [
            {"name": "a", "image": "x:1", "volumeMounts": [{"name": "data", "mountPath": "/out"}]},
            {"name": "b", "image": "y:1", "resources": {"limits": {"memory": "1Gi"}}},
        ],
    }
    spec = backend(template=template, model="org/m", type="vllm")["spec"]
    assert [one["name"] for one in spec["initContainers"]] == ["model", "a", "b"]
    first, second = spec["initContainers"][1:]
    assert first["resources"] == SETTINGS.worker.resources.to_json(), "a quota may require some"
    assert second["resources"]["limits"]["memory"] == "1Gi"
    assert {one["mountPath"]: one["name"] for one in first["volumeMounts"]} == {
        "/tmp": "rollyard-init",
        "/out": "data",
    }
    others = [*spec["containers"], spec["initContainers"][0]]
    assert "rollyard-init" not in json.dumps(others), "no other container sees their files"


def test_a_templates_environment_and_mounts_win() -> None:
    template = {
        "env": [{"name": "HOME", "value": "/home/me"}],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
    }
    pod = worker(job_of(template=template))
    assert env(pod)["HOME"] == "/home/me"
    mounts = {one["mountPath"]: one["name"] for one in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounts["/tmp"] == "scratch"
    assert mounts["/etc/rollyard/worker"] == "rollyard-token"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"env": [{"value": "x"}]}, r"spec.stages.run.template.env\[0\]: 'name' is missing"),
        ({"env": [{"name": "A"}, {"name": "A"}]}, r"template.env\[1\]: name 'A' is there twice"),
        ({"volumes": [{"name": "rollyard-token"}]}, "the name 'rollyard-token' begins with 'rollyard-'"),
        ({"volumeMounts": [{"name": "a"}]}, r"volumeMounts\[0\]: 'mountPath' is missing"),
        (
            {"initContainers": [{"name": "a", "image": "x", "env": [{"name": "A"}, {"name": "A"}]}]},
            r"initContainers\[0\].env\[1\]: name 'A' is there twice",
        ),
    ],
)
def test_an_unusable_template_is_named(template: dict[str, Any], words: str) -> None:
    with pytest.raises(PodTemplateError, match=words):
        worker(job_of(template=template))


def test_an_image_of_ones_own_is_not_pulled_always() -> None:
    always = SETTINGS.model_copy(update={"image_pull_policy": "Always"})
    never = SETTINGS.model_copy(update={"image_pull_policy": "Never"})

    def policy(settings: OperatorSettings, **stage: Any) -> str:
        chosen: str = worker(job_of(**stage), settings)["spec"]["containers"][0]["imagePullPolicy"]
        return chosen

    own = {"template": {"image": "mine:1"}}
    assert (policy(always), policy(always, **own)) == ("Always", "IfNotPresent")
    assert (policy(never), policy(never, **own)) == ("Never", "Never")
    # The same for the image of a task, beside the exec server of the installation.
    for settings, foreign, ours in ((always, "IfNotPresent", "Always"), (never, "Never", "Never")):
        copied = settings.model_copy(update={"image_volume": "never"})
        spec = sandbox(copied)["spec"]
        assert spec["containers"][0]["imagePullPolicy"] == foreign
        assert spec["initContainers"][0]["imagePullPolicy"] == ours
        (runtime,) = [one for one in sandbox(settings)["spec"]["volumes"] if "image" in one]
        assert runtime["image"]["pullPolicy"] == ours


def test_an_embedded_backend() -> None:
    container = backend(type="embedded", args=["--threads", "2"])["spec"]["containers"][0]
    assert container["image"] == "e:1"
    assert container["command"] == [
        *("python", "-m", "rollyard_engine", "--model", "/models/m", "--host", "0.0.0.0", "--port", "8000"),
        *("--served-model-name", "/models/m", "--threads", "2"),
    ]
    assert container["ports"][0]["containerPort"] == 8000
    assert container["resources"]["limits"] == {"memory": "4Gi"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_a_vllm_backend() -> None:
    pod = backend(
        type="vllm", resources={"gpu": 2}, args=["--max-model-len=4096"], env={"HF_HOME": "/models"}
    )
    container = pod["spec"]["containers"][0]
    command = container["command"]
    assert command[:3] == ["vllm", "serve", "/models/m"]
    assert container["image"] == SETTINGS.images.vllm
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert mounts == {"/tmp": "rollyard-tmp", "/dev/shm": "rollyard-shm"}
    assert command[-1] == "--max-model-len=4096"
    for flag, value in (("--host", "0.0.0.0"), ("--port", "8000"), ("--served-model-name", "/models/m")):
        assert command[command.index(flag) + 1] == value
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}, "no limit that nobody asked for"
    assert env(pod)["VLLM_SERVER_DEV_MODE"] == "1"
    assert env(pod)["HF_HOME"] == "/models"
    assert {"name": "rollyard-shm", "emptyDir": {"medium": "Memory"}} in pod["spec"]["volumes"]
    elsewhere = backend(type="vllm", args=["--port", "9000"])["spec"]["containers"][0]
    assert elsewhere["ports"][0]["containerPort"] == 9000


def hub_settings(**hub: str) -> OperatorSettings:
    return SETTINGS.model_copy(update={"hub": HubSettings.model_validate(hub)})


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_model_of_the_hub_comes_before_its_server(engine: str) -> None:
    settings = hub_settings(claim="hub", tokenSecret="hub-token", tokenKey="t", endpoint="http://mirror")
    spec = backend(settings, model="org/m@v1", type=engine)["spec"]
    (download,), (server,) = spec["initContainers"], spec["containers"]
    assert download["command"] == [
        *("python", "-m", "rollyard_process.hub", "org/m@v1", "--for", engine),
        *("--link", "/var/cache/rollyard/model/current"),
    ]
    given = {one["name"]: one.get("value", one.get("valueFrom")) for one in download["env"]}
    assert given["HF_TOKEN"] == {"secretKeyRef": {"name": "hub-token", "key": "t"}}
    assert (given["HF_ENDPOINT"], given["HF_HOME"]) == ("http://mirror", "/var/cache/rollyard/hub")
    assert (download["image"], download["securityContext"]) == ("w:1", server["securityContext"])
    assert {one["name"]: one.get("readOnly", False) for one in download["volumeMounts"]} == {
        "rollyard-tmp": False,
        "rollyard-hub": False,
        "rollyard-model": False,
    }
    assert {"name": "rollyard-hub", "persistentVolumeClaim": {"claimName": "hub"}} in spec["volumes"]
    command = server["command"]
    model = command[2] if engine == "vllm" else command[command.index("--model") + 1]
    assert model == "/var/cache/rollyard/model/current"
    assert command[command.index("--served-model-name") + 1] == "org/m@v1"
    served = {one["name"]: one.get("readOnly", False) for one in server["volumeMounts"]}
    read_only = (served["rollyard-hub"], served["rollyard-model"])
    assert read_only == (True, True), "a pool's program may be its author's"
    over_tmp = {
        "volumes": [{"name": "big", "emptyDir": {}}],
        "volumeMounts": [{"name": "big", "mountPath": "/tmp"}],
    }
    (other,) = backend(settings, over_tmp, model="org/m@v1", type=engine)["spec"]["containers"]
    assert "rollyard-model" in {one["name"] for one in other["volumeMounts"]}, "the link is not in /tmp"


def test_without_a_claim_each_pod_has_a_cache_of_its_own() -> None:
    spec = backend(model="org/m", type="vllm")["spec"]
    assert {"name": "rollyard-hub", "emptyDir": {}} in spec["volumes"]
    assert {"HF_TOKEN", "HF_ENDPOINT"}.isdisjoint(one["name"] for one in spec["initContainers"][0]["env"])
    assert "initContainers" not in backend(type="vllm")["spec"], "a folder is not downloaded"


def test_workers_have_what_a_tokenizer_of_the_hub_needs() -> None:
    settings = hub_settings(claim="hub", tokenSecret="hub-token", endpoint="http://mirror")
    for plain in (worker(job_of(), tokenizer="org/m"), worker(job_of(), settings, "/models/m")):
        assert {"HF_TOKEN", "HF_HOME"}.isdisjoint(env(plain)), "no worker has what it does not need"
        assert "rollyard-hub" not in json.dumps(plain)
    spec = worker(job_of(), settings, "org/m")["spec"]
    (container,) = spec["containers"]
    given = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert given["HF_TOKEN"] == {"secretKeyRef": {"name": "hub-token", "key": "HF_TOKEN"}}
    assert (given["HF_HOME"], given["HF_ENDPOINT"]) == ("/var/cache/rollyard/hub", "http://mirror")
    assert {"name": "rollyard-hub", "mountPath": given["HF_HOME"]} in container["volumeMounts"]
    assert {"name": "rollyard-hub", "persistentVolumeClaim": {"claimName": "hub"}} in spec["volumes"]
    for own in ({"runAsUser": 2000}, {"runAsGroup": 2000}, {"fsGroup": 2000}):
        with pytest.raises(PodTemplateError, match="podSecurityContext: pods with the shared cache"):
            worker(job_of(template={"podSecurityContext": own}), settings, "org/m")
    digests = {installation_digest(one) for one in (SETTINGS, hub_settings(claim="hub"))}
    assert len(digests) == 2, "other settings make other pods"


def test_names_of_services_differ() -> None:
    long = ["x" * 63, "x" * 62 + "y", "x" * 54, "x" * 55]
    names = {service_name(name) for name in long}
    assert len(names) == 4
    assert max(len(name) for name in names) <= 63
    pool = BackendPool.model_validate({"metadata": {"name": "0pool", "uid": UID}, "spec": {"model": "m"}})
    service = pool_service(pool, SETTINGS)
    assert service["metadata"]["name"][0].isalpha()
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["ownerReferences"][0]["uid"] == UID, "it goes with its pool"
    selector = service["spec"]["selector"]
    pods = {key: backend(type="embedded")["metadata"]["labels"][key] for key in selector}
    assert selector == pods | {labels.POOL: "0pool"}, "the backends of this pool"
    assert selector[labels.INSTANCE] == "test"
    assert selector[labels.COMPONENT] == "backend"


def test_a_sandbox_reaches_nothing_and_holds_only_the_hash() -> None:
    pod = sandbox()
    container = pod["spec"]["containers"][0]
    assert container["command"][0].startswith("/.rollyard/")
    args = container["args"]
    assert args[args.index("--token-sha256") + 1] == "ab" * 32
    assert args[args.index("--isolation-check") + 1] == "10.0.0.1:443"
    assert args[args.index("--isolation-seconds") + 1] == "10"
    assert (pod["spec"]["dnsPolicy"], pod["spec"]["dnsConfig"]) == ("None", {"nameservers": ["127.0.0.1"]})
    assert container["resources"]["limits"] == {
        "cpu": "1000m",
        "memory": str(1 << 30),
        "ephemeral-storage": str(1 << 30),
    }
    assert container["resources"]["requests"]["cpu"] == "250m"
    fractions = SETTINGS.sandbox.model_copy(
        update={"cpu_request_fraction": 0.125, "memory_request_fraction": 0.5}
    )
    requests = sandbox(SETTINGS.model_copy(update={"sandbox": fractions}))["spec"]["containers"][0]
    assert requests["resources"]["requests"] == {
        "cpu": "125m",
        "memory": str(1 << 29),
        "ephemeral-storage": str(1 << 30),
    }
    assert env(pod) == {"HOME": "/work", "TMPDIR": "/tmp"}, "nothing of the installation"
    sizes = {one["name"]: one["emptyDir"] for one in pod["spec"]["volumes"] if "emptyDir" in one}
    assert sizes == {key: {"sizeLimit": str(1 << 30)} for key in ("rollyard-work", "rollyard-tmp")}
    assert pod["metadata"]["annotations"] == {labels.NONCE: "n", labels.TOKEN_HASH: "ab" * 32}
    assert pod["spec"]["hostname"] == "sandbox", "the names of jobs are not for its processes"
    assert {volume["name"]: volume for volume in pod["spec"]["volumes"]}["rollyard-runtime"]["image"] == {
        "reference": "s:1",
        "pullPolicy": "IfNotPresent",
    }


def test_a_sandbox_s_policy_admits_the_stage_workers_and_the_operator_of_its_installation_only() -> None:
    policy = network_policy("team", SETTINGS)
    assert policy["metadata"]["namespace"] == "team"
    home = {"kubernetes.io/metadata.name": "rollyard"}
    operator = {"app.kubernetes.io/name": "rollyard", "app.kubernetes.io/component": "operator"}

    def ours(component: str) -> dict[str, str]:
        return {"app.kubernetes.io/component": component, "rollyard.dev/instance": "test"}

    assert policy["spec"] == {
        "podSelector": {"matchLabels": ours("sandbox")},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {
                "from": [
                    {"podSelector": {"matchLabels": ours("stage-worker")}},
                    {"namespaceSelector": {"matchLabels": home}, "podSelector": {"matchLabels": operator}},
                ],
                "ports": [{"protocol": "TCP", "port": EXEC_PORT}],
            }
        ],
        "egress": [],
    }
    for pod, component in ((sandbox(), "sandbox"), (worker(job_of()), "stage-worker")):
        assert ours(component).items() <= pod["metadata"]["labels"].items()
    blue = network_policy("team", SETTINGS.model_copy(update={"instance": "blue"}))
    assert blue["metadata"]["name"] != policy["metadata"]["name"], "installations may share a namespace"


def test_every_check_is_an_argument_of_the_sandbox_and_its_processes_have_its_user() -> None:
    chosen = SETTINGS.model_copy(
        update={"sandbox": SETTINGS.sandbox.model_copy(update={"run_as_user": 4242})}
    )

    def made(*checks: str) -> Object:
        return sandbox_pod(
            "s", SHAPE.model_copy(update={"image": ""}), OWNER, chosen,
            nonce="n", token_sha256="h", reference=job_reference(OWNER), checks=checks,
        )  # fmt: skip

    args = made("10.0.0.1:443", "[fd00::1]:53")["spec"]["containers"][0]["args"]
    given = [args[at + 1] for at, one in enumerate(args) if one == "--isolation-check"]
    assert given == ["10.0.0.1:443", "[fd00::1]:53"]
    warm = made()
    assert not [one for one in warm["spec"]["containers"][0]["args"] if one.startswith("--isolation")]
    assert warm["spec"]["containers"][0]["image"] == "d:1"
    assert warm["metadata"]["labels"][labels.WARM] == "true"
    assert not {labels.CLAIM, labels.JOB, labels.JOB_UID} & warm["metadata"]["labels"].keys()
    claimed = sandbox()["metadata"]["labels"]
    assert labels.WARM not in claimed
    assert [claimed[key] for key in (labels.CLAIM, labels.JOB, labels.JOB_UID)] == ["c1", "job", UID]
    security = warm["spec"]["securityContext"]
    assert {security[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {4242}


def test_folders_of_a_task_are_volumes_of_their_own() -> None:
    with_folders = SHAPE.model_copy(update={"folders": ["/app", "/logs"]})
    pod = sandbox_pod(
        "s", with_folders, OWNER, SETTINGS, nonce="n", token_sha256="h", reference=job_reference(OWNER)
    )
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    for folder in ("/app", "/logs"):
        assert volumes[mounts[folder]]["emptyDir"] == {"sizeLimit": str(SHAPE.disk_bytes)}
    assert mounts["/app"] != mounts["/logs"]
    assert flavor_of(with_folders, OWNER, SETTINGS) != flavor_of(SHAPE, OWNER, SETTINGS)


def test_without_image_volumes_the_runtime_is_copied() -> None:
    pod = sandbox(SETTINGS.model_copy(update={"image_volume": "never"}))
    (copy,) = pod["spec"]["initContainers"]
    assert copy["image"] == "s:1"
    assert copy["args"] == ["/copy"]
    runtime = {volume["name"]: volume for volume in pod["spec"]["volumes"]}["rollyard-runtime"]
    assert "emptyDir" in runtime
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["ephemeral-storage"]) == (1 << 30) + RUNTIME_BYTES, "the copy does not eat its disk"


def test_a_lost_node_is_given_up_soon_unless_the_template_says_otherwise() -> None:
    def seconds(owner: SandboxOwner) -> dict[str, Any]:
        return {
            one["key"]: one.get("tolerationSeconds") for one in sandbox(owner=owner)["spec"]["tolerations"]
        }

    both = {"node.kubernetes.io/not-ready": 30, "node.kubernetes.io/unreachable": 30}
    assert seconds(OWNER) == both
    own = [{"key": "node.kubernetes.io/unreachable", "operator": "Exists"}]
    raw = {
        "metadata": {"namespace": "team", "name": "job", "uid": UID},
        "spec": {"sandbox": {"template": {"tolerations": own}}},
    }
    owner = owner_of_object(raw, SETTINGS)
    assert owner is not None
    assert seconds(owner) == both | {"node.kubernetes.io/unreachable": None}


def test_a_job_that_goes_gets_no_more_sandboxes() -> None:
    meta = {"namespace": "team", "name": "job", "uid": UID, "deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert owner_of_object({"metadata": meta, "spec": {}}, SETTINGS) is None


def test_the_flavor_is_all_that_makes_a_difference() -> None:
    def flavor(shape: SandboxShape = SHAPE, owner: SandboxOwner = OWNER, **settings: Any) -> str:
        return flavor_of(shape, owner, SETTINGS.model_copy(update=settings))

    assert flavor() == flavor(owner=SandboxOwner("team", "another", "uid")), "jobs share warm pods"
    others = [
        flavor(SHAPE.model_copy(update={"cpu": 2.0})),
        flavor(SHAPE.model_copy(update={"image": "other"})),
        flavor(owner=SandboxOwner("team", "job", UID, queue="q")),
        flavor(SHAPE.model_copy(update={"memory_bytes": 2 << 30})),
        flavor(SHAPE.model_copy(update={"disk_bytes": 2 << 30})),
        flavor(SHAPE.model_copy(update={"processes": 65})),
        flavor(owner=SandboxOwner("team", "job", UID, placement=Placement(runtime_class_name="gvisor"))),
        flavor(images=SETTINGS.images.model_copy(update={"sandbox_default": "d:2"})),
        flavor(image_pull_secrets=[LocalReference(name="registry")]),
        flavor(sandbox=SETTINGS.sandbox.model_copy(update={"run_as_user": 2000})),
        flavor(image_volume="never"),
        flavor(image_pull_policy="Never"),
        flavor(images=SETTINGS.images.model_copy(update={"sandbox": "s:2"})),
        flavor(isolation=SETTINGS.isolation.model_copy(update={"required": False})),
    ]
    assert len({flavor(), *others}) == len(others) + 1


def test_every_pod_of_a_job_or_a_pool_waits_in_its_queue() -> None:
    queue = {labels.QUEUE: "gpus"}
    job = job_of()
    job.metadata.labels = queue | {"other": "x"}
    pool = BackendPool.model_validate(
        {"metadata": {"name": "pool", "uid": UID, "labels": queue}, "spec": {"model": "m"}}
    )
    (workload,) = pool_workloads(pool)
    raw = {"metadata": {"namespace": "team", "name": "job", "uid": UID, "labels": queue}, "spec": {}}
    owner = owner_of_object(raw, SETTINGS)
    assert owner is not None
    queued = (
        worker(job),
        backend_pod(workload, pool, SETTINGS),
        sandbox(owner=owner),
        sandbox(owner=owner, claim=""),
    )
    for pod in queued:
        assert pod["metadata"]["labels"][labels.QUEUE] == "gpus"
        assert "other" not in pod["metadata"]["labels"]
    for pod in (worker(job_of()), backend(type="embedded"), sandbox()):
        assert labels.QUEUE not in pod["metadata"]["labels"]


def test_secrets_differ_by_pod_and_nonce_and_repeat() -> None:
    given = [("k", "ns", "a", "1"), ("k", "ns", "a", "2"), ("k", "ns", "b", "1"), ("l", "ns", "a", "1")]
    given.append(("k", "other", "a", "1"))
    made = [secret_of(*one) for one in given]
    assert len(set(made)) == len(given)
    assert made == [secret_of(*one) for one in given]
    assert {len(one) for one in made} == {32}


def test_new_images_replace_workers_but_a_new_sandbox_image_does_not() -> None:
    base = installation_digest(SETTINGS)
    images = SETTINGS.images
    sandbox_only = SETTINGS.model_copy(update={"images": images.model_copy(update={"sandbox": "s:2"})})
    more = PodResources(requests={"cpu": "7"})
    others: list[dict[str, Any]] = [
        *({"images": images.model_copy(update={name: "x:2"})} for name in ("worker", "engine", "vllm")),
        {"control_plane_url": "https://elsewhere"},
        {"control_plane_ca_file": "/ca"},
        {"image_pull_policy": "Always"},
        {"image_pull_secrets": [LocalReference(name="registry")]},
        {"worker": SETTINGS.worker.model_copy(update={"resources": more})},
        {"engine": SETTINGS.engine.model_copy(update={"resources": more})},
    ]
    made = {installation_digest(SETTINGS.model_copy(update=one)) for one in others}
    assert len(made | {base}) == len(others) + 1
    assert installation_digest(sandbox_only) == base
    job = job_of()
    digests = (base, "other")
    hashes = {one.spec_hash for made_of in digests for one in job_workloads(job, Profile(made_of=made_of))}
    assert len(hashes) == 6


def test_settings_of_cases_are_various() -> None:
    made = [settings_of(random.Random(seed)) for seed in range(40)]
    assert {one.image_volumes for one in made} == {True, False}
    assert {one.isolation.required for one in made} == {True, False}


def test_workers_are_told_where_traces_go() -> None:
    traces = {"endpoint": "http://collector:4318", "sample": 0.1}
    chosen = OperatorSettings.model_validate(
        SETTINGS.model_dump(by_alias=True) | {"traces": traces, "logFormat": "json"}
    )
    wanted = {
        "ROLLYARD_OTLP_ENDPOINT": "http://collector:4318",
        "ROLLYARD_TRACE_SAMPLE": "0.1",
        "ROLLYARD_LOG_FORMAT": "json",
    }
    assert wanted.items() <= env(worker(job_of(), chosen)).items()
    assert not wanted.keys() & env(worker(job_of())).keys()
    assert env(backend(chosen, type="embedded"))["ROLLYARD_LOG_FORMAT"] == "json"
    assert not wanted.keys() & env(backend(chosen, type="vllm")).keys()
    assert installation_digest(chosen) != installation_digest(SETTINGS), "its workers are replaced"
