"""The chart with real helm on a real API server: linted, rendered with many values, refused where wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from rollyard_operator.allowed import Allowed
from rollyard_operator.settings import PodDefaults, parse_settings
from rollyard_testing.pace import patience

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.kubelab import Cluster

pytestmark = pytest.mark.kubernetes

ROOT = Path(__file__).resolve().parents[2]
CHART = str(ROOT / "helm" / "rollyard")
MONITORING = ["--api-versions", "monitoring.coreos.com/v1"]

POSTGRES = {"database": {"existingSecret": "pg"}, "trajectories": {"url": "s3://bucket/rollyard"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "empty-dir": {"api": {"persistence": {"type": "emptyDir", "sizeLimit": "1Gi"}}},
    "existing-claim": {"api": {"persistence": {"type": "existingClaim", "existingClaim": "mine"}}},
    "claim": {"api": {"persistence": {"storageClass": "fast", "size": "1Ti", "keep": True}}},
    "postgres": {"api": POSTGRES},
    "replicas": {"api": {"replicas": 3, **POSTGRES}},
    "tls-made": {"tls": {"enabled": True, "dnsNames": ["hpc.example.com"], "ipAddresses": ["192.0.2.7"]}},
    "tls-given": {"tls": {"enabled": True, "existingSecret": "mine", "hasCA": False}},
    "traces": {
        "traces": {"endpoint": "http://collector.observability:4318", "sample": 0.1},
        "logFormat": "json",
    },
    "tokens-given": {"tokens": {"existingSecret": "mine"}},
    "registry": {
        "images": {
            "prefix": "registry.example.com/ml/rollyard-",
            "tag": "1.2.3",
            "pullPolicy": "Always",
            "pullSecrets": ["registry"],
            "worker": "registry.example.com/mine:1",
        }
    },
    "ingress": {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "host": "rollyard.example.com",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "120"},
            "tlsSecret": "cert",
        }
    },
    "placement": {
        part: {
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "dedicated", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "high",
            "schedulerName": "volcano",
            "podAnnotations": {"a": "b"},
            "env": [{"name": "A", "value": "b"}],
            "serviceAccount": {"create": False, "name": "mine"},
        }
        for part in ("api", "operator")
    },
    "init-containers": {
        "api": {
            "initContainers": [
                {
                    "name": "wait",
                    "image": "busybox:1",
                    "command": ["sh", "-c", "until nc -z db 5432; do sleep 1; done"],
                },
                {"name": "own", "image": "busybox:1", "securityContext": {"runAsUser": 2000}},
            ]
        }
    },
    "policies": {
        "networkPolicy": {
            "from": [{"podSelector": {"matchLabels": {"app": "trainer"}}}],
            "extraFrom": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
        }
    },
    "nothing-optional": {
        "networkPolicy": {"enabled": False, "sandboxes": False},
        "rbac": {"create": False},
        "crds": {"enabled": False},
        "sandboxes": {"isolation": {"required": False}},
    },
    "sandboxes": {
        "sandboxes": {
            "imageVolume": "never",
            "isolation": {
                "checks": ["10.96.0.1:443", "[fd00::1]:443"],
                "external": ["artifacts.example.com:443"],
                "policies": "ignore",
                "seconds": 5.5,
            },
            "creation": {"perSecond": 0.5, "burst": 1},
        }
    },
    "allowed": {
        "jobs": {
            "allow": {
                "volumes": ["persistentVolumeClaim"],
                "hostPath": ["/data/models"],
                "secrets": True,
                "images": ["registry.example.com/ml/"],
                "labels": ["team", "example.com/*"],
                "tolerations": ["*"],
                "priorityClasses": ["low"],
                "crossNamespaceAffinity": True,
                "schedulers": ["volcano"],
                "initContainers": ["registry.example.com/tools/"],
                "users": [1000660000, "2000-2999"],
                "groups": [3000],
            },
            "pods": {
                "schedulerName": "volcano",
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "topology.kubernetes.io/zone",
                        "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": {"matchLabels": {"rollyard.dev/instance": "yard"}},
                    }
                ],
                "podSecurityContext": {"runAsUser": 1000660000, "supplementalGroups": [3000]},
            },
        }
    },
    "prorl": {"api": {"prorl": {"enabled": True, "config": {"tokenizer": "/models/policy"}}}},
    "prorl-open": {
        "api": {
            "prorl": {
                "enabled": True,
                "listen": "0.0.0.0",
                "from": [{"podSelector": {"matchLabels": {"app": "trainer"}}}],
                "config": {"tokenizer": "/models/policy", "hosts": ["prorl.example.com"]},
            }
        }
    },
    "names": {"fullnameOverride": "ry", "instance": "blue", "commonLabels": {"team": "rl"}},
    "dashboard": {"metrics": {"dashboard": {"enabled": True}}},
}


@pytest.fixture
def values(tmp_path: Path) -> Any:
    """Return a function that writes values to a file, and returns the arguments for helm."""

    def write(document: dict[str, Any]) -> list[str]:
        path = tmp_path / "values.yaml"
        path.write_text(yaml.safe_dump(document))
        return ["--values", str(path)]

    return write


def rendered(cluster: Cluster, namespace: str, *words: str, release: str = "yard") -> list[dict[str, Any]]:
    text = cluster.helm("template", release, CHART, "--namespace", namespace, *words)
    return [document for document in yaml.safe_load_all(text) if document]


def of(documents: list[dict[str, Any]], kind: str, part: str = "") -> dict[str, Any]:
    (found,) = [
        document
        for document in documents
        if document["kind"] == kind and document["metadata"]["name"].endswith(part)
    ]
    return found


DAILY = ("defaults", "policies", "replicas", "tls-made")
"""What an API server is asked about every day; all are linted."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_lint(cluster: Cluster, values: Any, variant: str) -> None:
    said = cluster.helm("lint", "--strict", CHART, *values(VARIANTS[variant]))
    assert "0 chart(s) failed" in said


@pytest.fixture(scope="module")
def strict(cluster: Cluster) -> str:
    """Return a namespace that admits restricted pods only."""
    return cluster.namespace(restricted=True)


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in DAILY else pytest.mark.nightly) for name in VARIANTS]
)
def test_the_api_server_takes_it(cluster: Cluster, strict: str, values: Any, variant: str) -> None:
    documents = rendered(cluster, strict, *values(VARIANTS[variant]))
    assert len([document for document in documents if document["kind"] == "Deployment"]) == 2
    judged = []
    for document in documents:
        if document["kind"] == "Deployment":
            # Admission judges pods and not Deployments, so the pods of these are judged as well.
            template = document["spec"]["template"]
            meta = {**template["metadata"], "name": document["metadata"]["name"], "namespace": strict}
            judged.append({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]})
        judged.append(document)
    for document in judged:
        if document["kind"] == "Pod":
            # A dry run leaves nothing for the next one: no account, and no priority class.
            document["spec"] = {**document["spec"], "serviceAccountName": "default"}
            document["spec"].pop("priorityClassName", None)
    dry_run(cluster, judged, strict)


def dry_run(cluster: Cluster, documents: list[dict[str, Any]], namespace: str) -> None:
    """Check that the API server takes the documents, strictly and without a warning."""
    command = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict"]
    text = yaml.safe_dump_all(documents)
    done = cluster.run("kubectl", *command, "-f", "-", "-n", namespace, input=text)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert len(done.stdout.splitlines()) == len(documents)


def test_roles_are_in_the_listed_namespaces_only(cluster: Cluster, values: Any) -> None:
    listed = sorted([cluster.namespace(), cluster.namespace()])
    home = cluster.namespace()
    documents = rendered(cluster, home, *values({"namespaces": listed}))
    for kind in ("Role", "RoleBinding"):
        found = [one for one in documents if one["kind"] == kind]
        assert sorted(one["metadata"]["namespace"] for one in found) == listed
        for document in found:
            dry_run(cluster, [document], document["metadata"]["namespace"])
    assert not [document for document in documents if document["kind"].startswith("ClusterRole")]
    everywhere = rendered(cluster, home)
    assert not [document for document in everywhere if document["kind"] in ("Role", "RoleBinding")]
    rules = of(everywhere, "ClusterRole")["rules"]
    assert all(one["rules"] == rules for one in documents if one["kind"] == "Role")


@pytest.mark.parametrize("namespaces", [[], ["a"]], ids=["cluster", "namespaced"])
def test_rights_have_no_wildcard(cluster: Cluster, values: Any, namespaces: list[str]) -> None:
    documents = rendered(cluster, "home", *values({"namespaces": namespaces}))
    roles = [document for document in documents if document["kind"] in ("Role", "ClusterRole")]
    assert len(roles) == 1
    for rule in roles[0]["rules"]:
        assert not any("*" in word for words in rule.values() for word in words), rule
        if "secrets" in rule["resources"] and rule["verbs"] != ["create"]:
            assert len(rule["resourceNames"]) == 1
            assert rule["verbs"] == ["delete"], "no verb whose answer holds a Secret"
    subjects = [document["subjects"] for document in documents if document["kind"].endswith("RoleBinding")]
    assert subjects == [[{"kind": "ServiceAccount", "name": "yard-rollyard-operator", "namespace": "home"}]]


def test_plugins_are_mounted_read_only_and_only_where_they_are_named(cluster: Cluster, values: Any) -> None:
    def api(*words: str) -> dict[str, Any]:
        spec: dict[str, Any] = of(rendered(cluster, "home", *words), "Deployment", "-api")["spec"]
        return dict(spec["template"]["spec"])

    pod = api(*values({"plugins": {"configMap": "rewards"}}))
    (container,) = pod["containers"]
    assert "--plugin=/etc/rollyard/plugins" in container["args"]
    mount = {"name": "plugins", "mountPath": "/etc/rollyard/plugins", "readOnly": True}
    assert mount in container["volumeMounts"]
    assert {"name": "plugins", "configMap": {"name": "rewards"}} in pod["volumes"]
    assert "plugins" not in str(api())


def test_only_the_operator_has_a_token(cluster: Cluster) -> None:
    documents = rendered(cluster, "home")
    mounted = {}
    for document in documents:
        if document["kind"] == "Deployment":
            mounted[document["metadata"]["name"]] = document["spec"]["template"]["spec"]
        elif document["kind"] == "Pod":
            mounted[document["metadata"]["name"]] = document["spec"]
        elif document["kind"] == "ServiceAccount":
            assert document["automountServiceAccountToken"] is False
    assert {name: spec["automountServiceAccountToken"] for name, spec in mounted.items()} == {
        "yard-rollyard-api": False,
        "yard-rollyard-operator": True,
        "yard-rollyard-test": False,
    }
    operator = mounted["yard-rollyard-operator"]
    (config,) = [volume for volume in operator["volumes"] if volume["name"] == "config"]
    shown = json.dumps(config)
    assert "driver" in shown
    assert "admin" not in shown  # Its token could do everything.


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_operator_understands_its_settings(cluster: Cluster, values: Any, variant: str) -> None:
    documents = rendered(cluster, "home", *values(VARIANTS[variant]))
    text = of(documents, "ConfigMap", "-operator")["data"]["operator.yaml"]
    loaded = parse_settings(text)
    assert loaded.release_namespace == "home"
    assert loaded.control_plane_url.endswith(":8765")
    if variant == "registry":
        assert loaded.images.engine == "registry.example.com/ml/rollyard-engine:1.2.3"
        assert loaded.images.worker == "registry.example.com/mine:1"
        assert [secret.name for secret in loaded.image_pull_secrets] == ["registry"]
    if variant == "tls-made":
        assert loaded.control_plane_url.startswith("https:")
        assert loaded.control_plane_ca_file is not None
    if variant == "sandboxes":
        assert loaded.isolation.checks == ["10.96.0.1:443", "[fd00::1]:443"]
        assert loaded.isolation.external == ["artifacts.example.com:443"]
        assert loaded.isolation.policies == "ignore"
        assert loaded.sandbox_creation.per_second == 0.5
    tokens = {"tokens-given": "mine", "names": "ry-tokens"}.get(variant, "yard-rollyard-tokens")
    certificate = {"tls-given": "mine", "names": "ry-tls"}.get(variant, "yard-rollyard-tls")
    database = ["pg"] if variant in ("postgres", "replicas") else []
    assert loaded.reserved_secrets == [tokens, certificate, *database]
    assert loaded.reserved_claims
    if variant == "allowed":
        assert loaded.allow.volumes == ["persistentVolumeClaim"]
        assert loaded.allow.host_path == ["/data/models"]
        assert loaded.allow.secrets is True
        assert loaded.allow.annotations == []
        assert (loaded.allow.users, loaded.allow.groups) == ([1000660000, "2000-2999"], [3000])
        assert loaded.pods.pod_security_context.run_as_user == 1000660000
        assert loaded.pods.topology_spread_constraints[0].max_skew == 1
    else:
        assert loaded.pods == PodDefaults()
        assert loaded.allow == Allowed(), "the chart's defaults are the operator's"


def test_the_control_plane_is_reached_by_every_pod_but_sandboxes(cluster: Cluster, values: Any) -> None:
    policies = [one for one in rendered(cluster, "home") if one["kind"] == "NetworkPolicy"]
    rules = {one["metadata"]["name"]: one["spec"]["ingress"] for one in policies}
    sandboxes = {"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["sandbox"]}
    # Two peers, one for the namespaces and one for the pods, would each admit more than both in one.
    anybody = {"namespaceSelector": {}, "podSelector": {"matchExpressions": [sandboxes]}}
    port = {"port": "api", "protocol": "TCP"}
    assert rules == {
        "yard-rollyard-api": [{"ports": [port], "from": [anybody]}],
        "yard-rollyard-operator": [],
    }
    document = VARIANTS["policies"]
    narrowed = of(rendered(cluster, "home", *values(document)), "NetworkPolicy", "-api")["spec"]["ingress"]
    given = document["networkPolicy"]
    assert narrowed == [{"ports": [port], "from": [*given["from"], *given["extraFrom"]]}]


def test_a_changed_setting_restarts_the_operator_and_nothing_else(cluster: Cluster, values: Any) -> None:
    before = rendered(cluster, "home")
    after = rendered(cluster, "home", *values({"sandboxes": {"creation": {"perSecond": 3}}}))
    for part, same in (("-api", True), ("-operator", False)):
        templates = [of(documents, "Deployment", part)["spec"]["template"] for documents in (before, after)]
        assert (templates[0] == templates[1]) is same


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"color": "red"}, "additional properties 'color' not allowed"),
        ({"api": {"replicas": 2}}, "api.replicas: more than one needs PostgreSQL"),
        (
            {"api": {"replicas": 2, "database": {"existingSecret": "pg"}}},
            "api.replicas: more than one needs a trajectory store",
        ),
        ({"api": {"persistence": {"type": "tape"}}}, "/api/persistence/type"),
        ({"api": {"persistence": {"type": "existingClaim"}}}, "api.persistence.existingClaim: required"),
        ({"api": {"persistence": {"type": "hostPath"}}}, "api.persistence.hostPath: required"),
        ({"ingress": {"enabled": True}}, "ingress.host: required"),
        ({"api": {"prorl": {"enabled": True}}}, "api.prorl.config.tokenizer: required"),
        (
            {
                "networkPolicy": {"enabled": False},
                "api": {"prorl": {"enabled": True, "listen": "0.0.0.0", "config": {"tokenizer": "t"}}},
            },
            "api.prorl.listen: these calls need no token",
        ),
        (
            {
                "api": {
                    "prorl": {"enabled": True, "from": [{"podSelector": {}}], "config": {"tokenizer": "t"}}
                }
            },
            "api.prorl.from: has no effect",
        ),
        ({"jobs": {"allow": {"hostPaths": ["/"]}}}, "additional properties 'hostPaths' not allowed"),
        ({"jobs": {"allow": {"hostPath": ["data"]}}}, "/jobs/allow/hostPath"),
        (
            {"sandboxes": {"isolation": {"required": False, "external": ["a:1"]}}},
            "sandboxes.isolation.external: have no effect",
        ),
        (
            {"sandboxes": {"isolation": {"required": False, "checks": ["a:1"]}}},
            "sandboxes.isolation.checks: have no effect",
        ),
    ],
    ids=str,
)
def test_wrong_values_are_refused(cluster: Cluster, values: Any, document: dict[str, Any], told: str) -> None:
    done = cluster.run("helm", "template", "yard", CHART, *values(document))
    assert done.returncode != 0
    assert told in done.stderr


def test_an_old_cluster_is_refused(cluster: Cluster) -> None:
    done = cluster.run("helm", "template", "yard", CHART, "--kube-version", "1.29.9")
    assert done.returncode != 0
    assert "1.30.0" in done.stderr


def test_monitoring_objects_only_where_the_cluster_knows_them(cluster: Cluster, values: Any) -> None:
    words = values({"metrics": {name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule")}})
    kinds = {document["kind"] for document in rendered(cluster, "home", *words)}
    assert not kinds & {"ServiceMonitor", "PrometheusRule"}
    documents = rendered(cluster, "home", *words, *MONITORING)
    monitor = of(documents, "ServiceMonitor")
    service = of(documents, "Service")
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    assert of(documents, "PrometheusRule")["spec"]["groups"][0]["rules"]


def test_crds_stay_or_go(cluster: Cluster, values: Any) -> None:
    policy = "helm.sh/resource-policy"
    for keep in (True, False):
        documents = rendered(cluster, "home", *values({"crds": {"keep": keep}}))
        found = [one for one in documents if one["kind"] == "CustomResourceDefinition"]
        assert len(found) == 2
        assert {one["metadata"].get("annotations", {}).get(policy) for one in found} == {
            "keep" if keep else None
        }
    documents = rendered(cluster, "home", *values({"crds": {"enabled": False}}))
    assert not [one for one in documents if one["kind"] == "CustomResourceDefinition"]


def test_a_disruption_budget_only_with_several_replicas(cluster: Cluster, values: Any) -> None:
    assert not [one for one in rendered(cluster, "home") if one["kind"] == "PodDisruptionBudget"]
    documents = rendered(cluster, "home", *values(VARIANTS["replicas"]))
    budget = of(documents, "PodDisruptionBudget")
    labels = of(documents, "Deployment", "-api")["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_tokens_and_certificate_are_made_once(cluster: Cluster, values: Any) -> None:
    """An upgrade and a rollback keep them, so running pods continue with what they have."""
    namespace = cluster.namespace()
    given = {
        "crds": {"enabled": False},
        "tls": {"enabled": True},
        "images": {"prefix": "registry.local/absent-", "pullPolicy": "Never"},
        "namespaces": [namespace],
    }
    install = ["upgrade", "--install", "yard", CHART, "--namespace", namespace]
    cluster.helm(*install, *values(given))
    try:
        first = secrets_of(cluster, namespace)
        roles = {"admin", "driver", "metrics", "viewer", "worker"}
        assert set(first["yard-rollyard-tokens"]) == {*roles, "tokens.json"}
        assert set(first["yard-rollyard-tls"]) == {"ca.crt", "tls.crt", "tls.key"}
        cluster.helm(*install, *values({**given, "operator": {"logLevel": "debug"}}))
        assert secrets_of(cluster, namespace) == first
        cluster.helm("rollback", "yard", "1", "--namespace", namespace)
        assert secrets_of(cluster, namespace) == first
    finally:
        cluster.helm("uninstall", "yard", "--namespace", namespace, "--wait")
    kinds = "all,secrets,configmaps,pvc,serviceaccounts,roles,rolebindings,networkpolicies,ingresses"
    # helm waits for the Deployments, whose pods take a moment longer.
    deadline = time.monotonic() + patience(60)
    while left := [name for name in names_of(cluster, kinds, namespace) if "yard" in name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert cluster.kubectl("get", "crd", "rolloutjobs.rollyard.dev", "-o", "name")


def names_of(cluster: Cluster, kinds: str, namespace: str) -> list[str]:
    return cluster.kubectl("get", kinds, "-n", namespace, "-o", "name").split()


def secrets_of(cluster: Cluster, namespace: str) -> dict[str, dict[str, str]]:
    found = cluster.items("secrets", namespace, "app.kubernetes.io/instance=yard")
    return {one["metadata"]["name"]: one["data"] for one in found}


def test_further_options_become_arguments(cluster: Cluster, values: Any) -> None:
    document = {
        "api": {
            "database": {"existingSecret": "pg"},
            "options": {"max-polls": 8_000_000, "store-seconds": 2.5, "verify-python": "/opt/a b"},
            "extraArgs": ["--stall-seconds=30", "--no-open-docs"],
        }
    }
    shown = cluster.run(
        "helm", "template", "yard", CHART, "-s", "templates/api.yaml", *values(document)
    ).stdout
    (deployment,) = [each for each in yaml.safe_load_all(shown) if each["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "rollyard", "control-plane"]
    assert container["args"][-5:] == [
        "--max-polls=8000000",
        "--store-seconds=2.5",
        "--verify-python=/opt/a b",
        "--stall-seconds=30",
        "--no-open-docs",
    ]
    assert not [each for each in container["args"] if each.startswith("--db")]
    (database,) = [each for each in container["env"] if each["name"] == "ROLLYARD_CONTROL_PLANE_DB"]
    assert database["valueFrom"]["secretKeyRef"] == {"name": "pg", "key": "url"}
