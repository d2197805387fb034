"""What a template's author may choose, and what the chart's value `jobs.allow` adds to that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rollyard_crds import BackendPool, RolloutJob
from rollyard_operator.allowed import is_below, is_image, is_key
from rollyard_operator.pods.sandboxes import owner_of_object
from rollyard_operator.pods.template_check import job_violations, pool_violations
from rollyard_operator.settings import HubSettings, OperatorSettings, SettingsError, parse_settings

RUN = "spec.stages.run.template"


def settings(**allow: Any) -> OperatorSettings:
    return OperatorSettings.model_validate(
        {
            "instance": "test",
            "controlPlaneUrl": "http://api:8765",
            "tokenFile": "/t",
            "workerTokenFile": "/w",
            "releaseNamespace": "home",
            "reservedSecrets": ["home-tokens", "home-tls"],
            "reservedClaims": ["home-api", "home-state"],
            "images": {"worker": "w:1", "engine": "e:1", "sandbox": "s:1", "sandboxDefault": "d:1"},
            "allow": allow,
        }
    )


def job_of(template: Any = None, sandbox: Any = None, namespace: str = "team") -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "metadata": {"name": "job", "namespace": namespace, "uid": "u"},
            "spec": {
                "tasks": {"stream": True},
                "handler": "shell",
                "backendRef": {"name": "pool"},
                "sandbox": {"template": sandbox or {}},
                "stages": {"run": {"template": template or {}}},
            },
        }
    )


def pool_of(template: Any, namespace: str = "team") -> BackendPool:
    meta = {"name": "pool", "namespace": namespace, "uid": "u"}
    return BackendPool.model_validate({"metadata": meta, "spec": {"model": "m", "template": template}})


def volume(**kinds: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "v", **kinds}]}


def env_from(**source: Any) -> dict[str, Any]:
    return {"env": [{"name": "A", "valueFrom": source}]}


def projected(**source: Any) -> dict[str, Any]:
    return volume(projected={"sources": [source]})


NOWHERE = {"topologyKey": "kubernetes.io/hostname", "namespaceSelector": {}}
NAMED = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}, "namespaces": ["bank"]}
REFUSED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (volume(hostPath={"path": "/etc"}), "volumes[0].hostPath", {"hostPath": ["/etc"]}),
    (volume(secret={"secretName": "keys"}), "volumes[0].secret", {"secrets": ["keys"]}),
    (projected(secret={"name": "keys"}), "volumes[0].projected.sources[0].secret", {"secrets": True}),
    (
        projected(serviceAccountToken={"path": "token"}),
        "volumes[0].projected.sources[0].serviceAccountToken",
        {"volumes": ["serviceAccountToken"]},
    ),
    (
        projected(podCertificate={"signerName": "x/y"}),
        "volumes[0].projected.sources[0].podCertificate",
        {"volumes": ["podCertificate"]},
    ),
    (volume(csi={"driver": "d"}), "volumes[0].csi", {"volumes": ["csi"]}),
    (volume(ephemeral={}), "volumes[0].ephemeral", {"volumes": ["ephemeral"]}),
    (volume(nfs={"server": "s", "path": "/"}), "volumes[0].nfs", {"volumes": ["nfs"]}),
    (volume(flexVolume={"driver": "d"}), "volumes[0].flexVolume", {"volumes": ["flexVolume"]}),
    (
        volume(persistentVolumeClaim={"claimName": "data"}),
        "volumes[0].persistentVolumeClaim",
        {"volumes": ["persistentVolumeClaim"]},
    ),
    (volume(emptyDir={}, hostPath={"path": "/"}), "volumes[0].hostPath", {"hostPath": ["/"]}),
    (volume(HostPath={"path": "/"}), "volumes[0].HostPath", {"volumes": ["HostPath"]}),
    (volume(hostpath={"path": "/"}), "volumes[0].hostpath", {"volumes": ["hostpath"]}),
    (
        env_from(secretKeyRef={"name": "keys", "key": "a"}),
        "env[0].valueFrom.secretKeyRef",
        {"secrets": ["keys"]},
    ),
    ({"imagePullSecrets": [{"name": "keys"}]}, "imagePullSecrets[0]", {"secrets": ["keys"]}),
    ({"labels": {"app": "bank"}}, "labels['app']", {"labels": ["app"]}),
    ({"annotations": {"x.io/inject": "yes"}}, "annotations['x.io/inject']", {"annotations": ["x.io/*"]}),
    ({"tolerations": [{"operator": "Exists"}]}, "tolerations[0]", {"tolerations": ["*"]}),
    (
        {"tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}]},
        "tolerations[0]",
        {"tolerations": ["node-role.kubernetes.io/*"]},
    ),
    (
        {"priorityClassName": "system-node-critical"},
        "priorityClassName",
        {"priorityClasses": ["system-node-critical"]},
    ),
    ({"runtimeClassName": "loose"}, "runtimeClassName", {"runtimeClasses": True}),
    (
        {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [NOWHERE]}}},
        "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].namespaceSelector",
        {"crossNamespaceAffinity": True},
    ),
    (
        {"affinity": {"podAffinity": {"preferred": [{"podAffinityTerm": {}}, {"podAffinityTerm": NAMED}]}}},
        "affinity.podAffinity.preferred[1].podAffinityTerm.namespaces",
        {"crossNamespaceAffinity": True},
    ),
    (
        {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/data/x"}}]},
        "volumes[1].hostPath",
        {"hostPath": ["/opt", "/data"]},
    ),
    (
        volume(projected={"sources": [{"configMap": {"name": "c"}}, {"secret": {"name": "keys"}}]}),
        "volumes[0].projected.sources[1].secret",
        {"secrets": ["other", "keys"]},
    ),
    (
        {"env": [{"name": "A", "value": "b"}, *env_from(secretKeyRef={"name": "keys"})["env"]][::-1]},
        "env[0].valueFrom.secretKeyRef",
        {"secrets": ["keys"]},
    ),
    (
        {"tolerations": [{"key": "nvidia.com/gpu"}, {"key": "dedicated"}]},
        "tolerations[1]",
        {"tolerations": ["nvidia.com/gpu", "dedicated"]},
    ),
    ({"schedulerName": "volcano"}, "schedulerName", {"schedulers": ["volcano"]}),
    (
        {"initContainers": [{"name": "a", "image": "evil:1"}]},
        "initContainers[0].image",
        {"initContainers": ["evil:1"]},
    ),
    ({"podSecurityContext": {"runAsUser": 1000}}, "podSecurityContext.runAsUser", {"users": [1000]}),
    ({"podSecurityContext": {"runAsGroup": 1000}}, "podSecurityContext.runAsGroup", {"groups": ["1-1000"]}),
    ({"podSecurityContext": {"fsGroup": 1000}}, "podSecurityContext.fsGroup", {"groups": ["1000-1001"]}),
    (
        {"podSecurityContext": {"supplementalGroups": [10001, 1000]}},
        "podSecurityContext.supplementalGroups[1]",
        {"groups": [999, "1000-2000"]},
    ),
]
WORKERS_ONLY: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"image": "evil:1"}, "image", {"images": ["evil:1"]}),
    ({"env": [{"name": "PYTHONPATH", "value": "/mnt"}]}, "env[0].name", {"env": ["PYTHONPATH"]}),
    ({"env": [{"name": "LD_PRELOAD", "value": "x"}]}, "env[0].name", {"env": ["LD_PRELOAD"]}),
    ({"env": [{"name": "https_proxy", "value": "x"}]}, "env[0].name", {"env": ["https_proxy"]}),
    (
        {**volume(configMap={"name": "c"}), "volumeMounts": [{"name": "v", "mountPath": "/usr/lib"}]},
        "volumeMounts[0].mountPath",
        {"mounts": ["/usr/lib"]},
    ),
    (
        {
            "volumes": [{"name": "s", "emptyDir": {}}, *volume(configMap={"name": "c"})["volumes"]],
            "volumeMounts": [
                {"name": "s", "mountPath": "/usr/bin"},
                {"name": "v", "mountPath": "/mnt/a"},
                {"name": "v", "mountPath": "/usr/lib"},
            ],
        },
        "volumeMounts[2].mountPath",
        {"mounts": ["/opt", "/usr"]},
    ),
    (
        {
            **volume(configMap={"name": "c"}, emptyDir={}),
            "volumeMounts": [{"name": "v", "mountPath": "/usr/lib"}],
        },
        "volumeMounts[0].mountPath",
        {"mounts": ["/usr/lib"]},
    ),
    (
        {**volume(configMap={"name": "c"}), "volumeMounts": [{"name": "v", "mountPath": "/mnt/../tmp"}]},
        "volumeMounts[0].mountPath",
        {"mounts": []},
    ),
]


@pytest.mark.attack(
    "its author mounts the node's files, a Secret, a service account's token or a claim",
    boundary="kubernetes",
    surface="`template` of a job or a pool",
    stopped_by="volumes are a list; `jobs.allow` extends it",
)
@pytest.mark.attack(
    "its author brings a program in an init container, or is a user or a group that a file server trusts",
    boundary="kubernetes",
    surface="`template` of a job or a pool",
    stopped_by="`jobs.allow` names the images, users and groups; by default there are none",
)
@pytest.mark.parametrize(("template", "field", "allow"), REFUSED, ids=lambda one: str(one)[:60])
def test_what_is_refused_is_named_with_the_value_that_permits_it(
    template: dict[str, Any], field: str, allow: dict[str, Any]
) -> None:
    (said,) = job_violations(job_of(template), settings())
    assert said.startswith(f"{RUN}.{field}: ")
    assert f"jobs.allow.{next(iter(allow))}" in said
    (said,) = pool_violations(pool_of(template), settings())
    assert said.startswith(f"spec.template.{field}: ")
    assert job_violations(job_of(template), settings(**allow)) == ()
    assert pool_violations(pool_of(template), settings(**allow)) == ()


@pytest.mark.attack(
    "its author runs an image or loads code of their own beside a worker's token",
    boundary="kubernetes",
    surface="`template` of a stage",
    stopped_by="images, code-loading variables and mounts over programs are refused",
)
@pytest.mark.attack(
    "its author runs any program in the pool's pod",
    boundary="kubernetes",
    surface="`engine.args`, `engine.env`, image of a pool",
    stopped_by="permitted: such a pod holds no token, and is restricted as all pods are",
)
@pytest.mark.parametrize(("template", "field", "allow"), WORKERS_ONLY, ids=lambda one: str(one)[:60])
def test_what_would_run_beside_a_workers_token_is_refused(
    template: dict[str, Any], field: str, allow: dict[str, Any]
) -> None:
    (said,) = job_violations(job_of(template), settings())
    assert said.startswith(f"{RUN}.{field}: ")
    assert f"jobs.allow.{next(iter(allow))}" in said
    assert pool_violations(pool_of(template), settings()) == (), "a pool's pods hold no token"
    if any(allow.values()):
        assert job_violations(job_of(template), settings(**allow)) == ()


CODE_VARIABLES = (
    "PYTHONHOME", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "GCONV_PATH", "SSL_CERT_FILE", "OPENSSL_CONF",
    "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "ROLLYARD_HOME", "OTEL_EXPORTER_OTLP_ENDPOINT", "GIT_SSH_COMMAND",
    "HTTP_PROXY", "no_proxy", "MY_PRELOAD", "PATH", "HOME", "XDG_CONFIG_HOME", "IFS", "ENV", "BASH_ENV",
    "LOCPATH", "NLSPATH", "HOSTALIASES", "RES_OPTIONS", "HF_ENDPOINT", "HF_TOKEN", "HF_TOKEN_PATH",
    "HF_HOME_2", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_CACHE",
)  # fmt: skip


def test_no_variable_of_a_worker_decides_which_code_runs_or_whom_it_trusts() -> None:
    for name in CODE_VARIABLES:
        template = {"env": [{"name": "TZ", "value": "UTC"}, {"name": name, "value": "x"}]}
        (said,) = job_violations(job_of(template), settings(env=["OTHER"]))
        assert said.startswith(f"{RUN}.env[1].name: "), name
        assert job_violations(job_of(template), settings(env=["OTHER", name])) == ()
    harmless = ("HF_HOME", "MY_PATH", "PATHS", "ENVIRONMENT", "OMP_NUM_THREADS", "PROXY", "A_LD_B")
    assert job_violations(job_of({"env": [{"name": name} for name in harmless]}), settings()) == ()


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"env": [{"name": "A", "value": "b", "valueFromFile": "/x"}]}, "env[0].valueFromFile"),
        ({"env": [{"name": "A", "valueFrom": "x"}]}, "env[0].valueFrom"),
        (env_from(fileKeyRef={"path": "p", "key": "k"}), "env[0].valueFrom.fileKeyRef"),
        (volume(projected={"sources": {"secret": {"name": "keys"}}}), "volumes[0].projected.sources"),
        (volume(projected={"sources": ["secret"]}), "volumes[0].projected.sources[0]"),
        ({"volumeMounts": [{"name": "rollyard-token", "mountPath": "/mnt/t"}]}, "volumeMounts[0].name"),
        (
            {"volumeMounts": [{"name": "v", "mountPath": "/mnt/a", "mountPropagation": "Bidirectional"}]},
            "volumeMounts[0].mountPropagation",
        ),
        (
            {"volumeMounts": [{"name": "v", "mountPath": "/mnt/a", "subPathExpr": "$(A)"}]},
            "volumeMounts[0].subPathExpr",
        ),
    ],
    ids=lambda one: str(one)[:60],
)
def test_what_is_not_known_is_refused_whatever_is_permitted(template: dict[str, Any], field: str) -> None:
    everything = settings(secrets=True, volumes=["csi"], mounts=["/"], env=["A"])
    (said,) = job_violations(job_of(template), everything)
    assert said.startswith(f"{RUN}.{field}: ")
    (said,) = pool_violations(pool_of(template), everything)
    assert said.startswith(f"spec.template.{field}: ")


@pytest.mark.attack(
    "it reads the token of the Hugging Face Hub, or has it sent to a server of its own",
    boundary="kubernetes",
    surface="`template` of a job or a pool",
    stopped_by="the Secret is the installation's own; HF_ENDPOINT of a worker is the installation's choice",
)
@pytest.mark.attack(
    "it changes the models of others in the cache of the hub",
    boundary="kubernetes",
    surface="`template` of a job or a pool",
    stopped_by="no template may name the claim of the cache or the operator's volumes",
)
def test_token_and_cache_of_the_hub_are_the_installations() -> None:
    everything = settings(secrets=True, volumes=["persistentVolumeClaim"])
    hub = HubSettings.model_validate({"claim": "hub-cache", "tokenSecret": "hub-token"})
    everything = everything.model_copy(update={"hub": hub})
    for template, word in (
        (env_from(secretKeyRef={"name": "hub-token", "key": "HF_TOKEN"}), "own"),
        (volume(secret={"secretName": "hub-token"}), "own"),
        (projected(secret={"name": "hub-token"}), "own"),
        (volume(persistentVolumeClaim={"claimName": "hub-cache"}), "which only downloads change"),
        ({"volumeMounts": [{"name": "rollyard-hub", "mountPath": "/mnt/h"}]}, "the operator's"),
    ):
        for said in (
            job_violations(job_of(template), everything),
            pool_violations(pool_of(template), everything),
        ):
            assert len(said) == 1
            assert word in said[0]
    endpoint = {"env": [{"name": "HF_ENDPOINT", "value": "http://evil"}]}
    (refusal,) = job_violations(job_of(endpoint), everything)
    assert "'HF_ENDPOINT' beside a worker's token" in refusal


def test_the_template_of_every_stage_is_looked_at() -> None:
    refused = {"template": volume(hostPath={"path": "/"})}
    for stages in (["init"], ["run"], ["eval"], ["init", "run", "eval"]):
        job = job_of(sandbox={"runtimeClassName": "loose"}).model_dump(by_alias=True)
        job["spec"]["stages"] = dict.fromkeys(stages, refused)
        said = job_violations(RolloutJob.model_validate(job), settings())
        assert [one.partition(":")[0] for one in said] == [
            "spec.sandbox.template.runtimeClassName",
            *(f"spec.stages.{stage}.template.volumes[0].hostPath" for stage in stages),
        ]


def test_the_ordinary_needs_no_permission() -> None:
    taints = (
        "nvidia.com/gpu",
        "amd.com/gpu",
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    )
    template = {
        "image": "w:1",
        "nodeSelector": {"disk": "ssd"},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"rollyard.dev/job": "job"}},
            }
        ],
        "podSecurityContext": {"runAsUser": 10001, "fsGroupChangePolicy": "Always"},
        "tolerations": [{"key": key, "operator": "Exists"} for key in taints],
        "affinity": {"podAntiAffinity": {"x": [{"labelSelector": {"matchLabels": {"namespaces": "a"}}}]}},
        "resources": {"limits": {"memory": "1Gi"}},
        "env": [
            {"name": "HF_HOME", "value": "/tmp/hf"},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}, "secretKeyRef": None}},
            {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}, "value": None},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        ],
        "volumes": [
            {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}, "hostPath": None},
            {"name": "config", "configMap": {"name": "c"}},
            {"name": "models", "image": {"reference": "registry.example/models:1"}},
            {"name": "all", "projected": {"sources": [{"configMap": {"name": "c"}, "secret": None}]}},
            {"name": "pod", "projected": {"sources": [{"downwardAPI": {}}]}},
            {"name": "own", "downwardAPI": {"items": []}},
        ],
        "volumeMounts": [
            {"name": "scratch", "mountPath": "/var/cache"},
            {"name": "models", "mountPath": "/models/a", "readOnly": True, "recursiveReadOnly": "Enabled"},
            {"name": "models", "mountPath": "/data", "subPath": "b"},
            *({"name": "own", "mountPath": f"{root}/own"} for root in ("/media", "/mnt", "/srv")),
        ],
    }
    assert job_violations(job_of(template), settings()) == ()
    assert pool_violations(pool_of(template), settings()) == ()


@pytest.mark.attack(
    "a label makes a foreign NetworkPolicy open their network; an annotation attaches a network",
    boundary="kubernetes",
    surface="`template` of sandboxes",
    stopped_by="sandboxes get no key that the installer has not permitted",
)
def test_sandboxes_get_no_label_of_their_author() -> None:
    """A label of a sandbox could make a NetworkPolicy of somebody else open its network."""
    template = {"labels": {"role": "egress"}, "annotations": {"k8s.v1.cni.cncf.io/networks": "host"}}
    said = job_violations(job_of(sandbox=template), settings())
    assert [one.partition(":")[0] for one in said] == [
        "spec.sandbox.template.labels['role']",
        "spec.sandbox.template.annotations['k8s.v1.cni.cncf.io/networks']",
    ]
    raw = {
        "metadata": {"name": "job", "namespace": "team", "uid": "u"},
        "spec": {"sandbox": {"template": template}},
    }
    assert owner_of_object(raw, settings()) is None, "no sandbox is made for it"
    assert owner_of_object(raw, settings(labels=["role"], annotations=["k8s.v1.cni.cncf.io/*"])) is not None


@pytest.mark.parametrize("key", ["rollyard.dev/instance", "x.Rollyard.dev/a", "app.kubernetes.io/component"])
def test_our_own_labels_are_never_an_authors(key: str) -> None:
    (said,) = job_violations(job_of(sandbox={"labels": {key: "sandbox"}}), settings(labels=["*", key]))
    assert "is reserved" in said


@pytest.mark.attack(
    "whoever may read pods reads its token; a template of a job mounts its Secret",
    boundary="worker",
    surface="ready pod",
    stopped_by="the token is in a Secret of the pod, whose name templates may not use",
)
@pytest.mark.attack(
    "it names the installation's Secrets or claim, or another job's token",
    boundary="kubernetes",
    surface="`template` of a job or a pool",
    stopped_by="they are refused whatever `jobs.allow` says",
)
def test_what_belongs_to_the_installation_is_never_permitted() -> None:
    everything = settings(secrets=True, volumes=["persistentVolumeClaim"])
    claims = [volume(persistentVolumeClaim={"claimName": name}) for name in ("home-api", "home-state")]
    for template, word in (
        (volume(secret={"secretName": "home-tokens"}), "own"),
        (volume(secret={"secretName": "home-tls"}), "own"),
        (volume(secret={"secretName": "rollyard-job-0123"}), "own"),
        (projected(secret={"name": "rollyard-job-0123"}), "own"),
        (env_from(secretKeyRef={"name": "home-tokens"}), "own"),
        ({"imagePullSecrets": [{"name": "home-tls"}]}, "own"),
        *((claim, "control plane's own") for claim in claims),
    ):
        (said,) = job_violations(job_of(template, namespace="home"), everything)
        assert word in said
        (said,) = pool_violations(pool_of(template, namespace="home"), everything)
        assert word in said
    (said,) = job_violations(
        job_of(sandbox={"imagePullSecrets": [{"name": "home-tls"}]}, namespace="home"), everything
    )
    assert "own" in said
    (said,) = job_violations(
        job_of({"imagePullSecrets": [{"name": "mine"}, {"name": "keys"}]}), settings(secrets=["mine"])
    )
    assert said.startswith(f"{RUN}.imagePullSecrets[1]: ")
    for template in (*claims, volume(secret={"secretName": "home-tokens"})):
        assert job_violations(job_of(template), everything) == (), "another namespace's of that name"
        assert pool_violations(pool_of(template), everything) == ()
    for name in ("rollyard-job-0123", "rollyard-ready-0123"):
        (said,) = job_violations(job_of(volume(secret={"secretName": name})), everything)
        assert "own" in said


def test_many_fields_are_named_and_the_rest_counted() -> None:
    template = {"volumes": [{"name": f"v{n}", "hostPath": {"path": "/"}} for n in range(20)]}
    said = job_violations(job_of(template), settings())
    assert len(said) == 9
    assert said[-1] == "12 further fields"


KINDS = (
    "emptyDir",
    "configMap",
    "hostPath",
    "HOSTPATH",
    "secret",
    "csi",
    "projected",
    "glusterfs",
    "iscsi",
    "",
)
ODD: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
VOLUMES = st.dictionaries(st.sampled_from(KINDS) | st.text(max_size=12), ODD, max_size=5)


@pytest.mark.attack(
    "a volume with several kinds, an unknown kind or an odd spelling passes for an ordinary one",
    boundary="kubernetes",
    surface="`template` of a job or a pool",
    stopped_by="what is not known is refused",
)
@given(VOLUMES, st.booleans())
def test_a_volume_is_permitted_only_where_all_of_it_is_known(entry: dict[str, Any], worker: bool) -> None:
    """Whatever a volume is made of, what is set must be one of the kinds that need no permission."""
    template = {"volumes": [{**entry, "name": "v"}]}
    if worker:
        said = job_violations(job_of(template), settings())
    else:
        said = pool_violations(pool_of(template), settings())
    chosen = {kind: value for kind, value in entry.items() if value is not None and kind != "name"}
    projected = chosen.pop("projected", None)
    if not chosen.keys() <= {"emptyDir", "configMap", "downwardAPI", "image"}:
        assert said
    if not said and isinstance(projected, dict):
        for source in projected.get("sources") or ():
            assert {key for key, value in source.items() if value is not None} <= {"configMap", "downwardAPI"}


@given(ODD, ODD, ODD)
def test_odd_entries_never_break_the_check(one: Any, two: Any, three: Any) -> None:
    template = {
        "env": [{"name": one, "valueFrom": two, "value": three}],
        "volumes": [{"name": one, "hostPath": two, "secret": three, "projected": {"sources": one}}],
        "volumeMounts": [{"name": one, "mountPath": two, "subPath": three}],
        "tolerations": [{"key": one}],
        "affinity": {"a": two, "namespaces": three},
    }
    job_violations(job_of(template), settings())
    pool_violations(pool_of(template), settings())


PARTS = st.lists(st.sampled_from(["data", "..", ".", "", "etc", "data2"]), min_size=1, max_size=5)


@given(PARTS)
def test_no_path_leaves_the_permitted_folders(parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    if is_below(path, ["/data"]):
        assert next(part for part in parts if part) == "data"
        assert ".." not in parts


def test_prefixes_end_where_a_part_ends() -> None:
    assert is_below("/data//models/", ["/data/"])
    assert not is_below("/database", ["/data"])
    assert not is_below("data", ["/"])
    assert is_image("r.example/ml/a:1", ["r.example/ml/"])
    assert is_image("r.example/ml/a@sha256:0", ["r.example/ml/a"])
    assert not is_image("r.example/ml-evil/a", ["r.example/ml"])
    assert not is_image("r.example.evil/a", ["r.example"])
    assert is_image("r.example/b:1", ["r.example/a", "r.example/b"])
    assert is_image("r.example/a:1", ["r.example/a:1"])
    assert not is_image("r.example/a:10", ["r.example/a:1"])
    assert not is_image("r.example/a", ["r.example/a:1"])
    assert (is_image("any", True), is_image("any", False), is_image("any", [])) == (True, False, False)
    assert is_key("x.io/a", ["x.io/*"])
    assert not is_key("x.io.evil/a", ["x.io/*"])
    assert is_key("b", ["a", "b"])
    assert not is_key("ab", ["a"])
    assert not is_key("", ["*"])
    assert is_below("/srv/a", ["/data", "/srv"])
    assert not is_below("/", ["/data"])


@pytest.mark.parametrize(
    ("allow", "words"),
    [
        ("{volumes: [hostPath]}", "permitted by its own value, 'hostPath'"),
        ("{volumes: [secret]}", "permitted by its own value, 'secrets'"),
        ("{hostPath: [data]}", "not an absolute path"),
        ("{hostPath: [/data/..]}", "not an absolute path"),
        ("{mount: [/x]}", "allow.mount"),
    ],
)
def test_settings_that_would_permit_nothing_are_refused(allow: str, words: str) -> None:
    text = f"""
    instance: test
    controlPlaneUrl: http://api:8765
    tokenFile: /t
    workerTokenFile: /w
    releaseNamespace: home
    images: {{worker: w:1, engine: e:1, sandbox: s:1, sandboxDefault: d:1}}
    allow: {allow}
    """
    with pytest.raises(SettingsError, match=words):
        parse_settings(text)


def test_the_example_of_the_page_is_permitted_by_its_values_and_by_nothing_less() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md").read_text()
    section = page.partition("\n## Init containers, users and schedulers\n")[2]
    template, values = (
        yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)[:2]
    )
    allow = values["jobs"]["allow"]
    pool = pool_of(template["template"])
    assert pool_violations(pool, settings(**allow)) == ()
    for name in allow:
        refusals = pool_violations(pool, settings(**{**allow, name: []}))
        assert refusals
        assert all(f"jobs.allow.{name}" in refusal for refusal in refusals)
