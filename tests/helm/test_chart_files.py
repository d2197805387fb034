"""The chart's files, without a cluster: CRDs of the models, explained and bounded values, real metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import option_docs
import pytest
import yaml
from rollyard_api.command import command
from rollyard_api.options.declared import ControlPlaneOptions, keys
from rollyard_crds import schema
from rollyard_operator.pods.parts import APP_USER, pod_security, restricted
from rollyard_operator.settings import OperatorSettings
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "rollyard"
VALUES_TEXT = (CHART / "values.yaml").read_text()
VALUES: dict[str, Any] = yaml.safe_load(VALUES_TEXT)
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


@pytest.fixture(scope="module")
def validator() -> Any:
    """Return a validator of the chart's values.

    It is imported here because the import takes seconds, which each run of pytest would spend on collection.
    """
    from jsonschema import Draft202012Validator

    return Draft202012Validator(SCHEMA)


def test_crds_are_those_of_the_models() -> None:
    shipped = {path.name: path.read_text() for path in (CHART / "files" / "crds").glob("*.yaml")}
    assert shipped == schema.files(), "run `make crds`"


def test_the_default_values_fit_the_schema(validator: Any) -> None:
    validator.check_schema(SCHEMA)
    validator.validate(VALUES)


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        found: dict[str, Any] = SCHEMA["$defs"][node["$ref"].rsplit("/", 1)[1]]
        return found
    return node


def test_schema_and_values_name_the_same_fields() -> None:
    def compare(values: dict[str, Any], node: dict[str, Any], path: str) -> None:
        assert node["type"] == "object", path
        if "properties" not in node:
            return
        assert node["additionalProperties"] is False, path
        # `global` is what a parent chart passes on.
        # Those of them that nobody sets have the defaults of the control plane and of the operator.
        if path in (".api.options", ".jobs.pods.podSecurityContext"):
            assert values == {}
            return
        assert set(values) == set(node["properties"]) - {"global"}, path
        for name, value in values.items():
            if isinstance(value, dict):
                compare(value, resolved(node["properties"][name]), f"{path}.{name}")

    compare(VALUES, SCHEMA, "")


def test_values_name_pages_and_headings_that_exist() -> None:
    named = re.findall(r'(docs/[\w-]+\.md)(?:, "([^"]+)")?', VALUES_TEXT)
    assert named
    for page, heading in named:
        text = (ROOT / page).read_text()
        assert not heading or re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE), (page, heading)


def test_the_page_shows_the_notes_of_the_chart() -> None:
    label = re.compile(r"^([A-Z][\w' ]+[:?]) {2,}", re.MULTILINE)
    shown = (ROOT / "docs" / "kubernetes.md").read_text().partition("\nNOTES:\n")[2].partition("\n$ ")[0]
    labels = label.findall((CHART / "templates" / "NOTES.txt").read_text())
    assert len(labels) > 5
    assert label.findall(shown) == labels


def test_every_value_is_explained() -> None:
    lines = VALUES_TEXT.splitlines()

    def unexplained(node: yaml.Node, path: str) -> list[str]:
        """Return keys without a comment of their own whose values have none either."""
        found = []
        for key, value in node.value:
            name = f"{path}.{key.value}"
            if lines[key.start_mark.line - 1].strip().startswith("# -- "):
                continue
            nested = isinstance(value, yaml.MappingNode) and value.value
            found += unexplained(value, name) if nested else [name]
        return found

    assert unexplained(yaml.compose(VALUES_TEXT), "") == []


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"color": "red"}, "color"),
        ({"api": {"replica": 2}}, "replica"),
        ({"api": {"replicas": 0}}, "replicas"),
        ({"api": {"replicas": "2"}}, "replicas"),
        ({"api": {"noBackendSeconds": 0}}, "noBackendSeconds"),
        ({"api": {"options": {"max-poll": 8}}}, "max-poll"),
        ({"api": {"options": {"lease-seconds": 8}}}, "lease-seconds"),
        ({"api": {"options": {"max-polls": 0}}}, "max-polls"),
        ({"api": {"options": {"max-polls": "many"}}}, "max-polls"),
        ({"api": {"options": {"db": "postgresql://a:b@c/d"}}}, "db"),
        ({"api": {"extraArgs": ["max-polls"]}}, "extraArgs"),
        ({"api": {"extraArgs": "--max-polls=8"}}, "extraArgs"),
        ({"api": {"persistence": {"type": "tape"}}}, "type"),
        ({"api": {"resources": {"limits": {"memory": "lots"}}}}, "memory"),
        ({"api": {"service": {"port": 70000}}}, "port"),
        ({"images": {"prefix": "a b"}}, "prefix"),
        ({"images": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"namespaces": ["Upper"]}, "namespaces"),
        ({"sandboxes": {"isolation": {"checks": ["nowhere"]}}}, "checks"),
        ({"sandboxes": {"creation": {"perSecond": 0}}}, "perSecond"),
        ({"networkPolicy": {"from": [{"pods": {}}]}}, "from"),
        ({"ingress": {"path": "x"}}, "path"),
        ({"api": {"pathPrefix": "/a/../b"}}, "pathPrefix"),
        ({"api": {"allowedHosts": ["http://a"]}}, "allowedHosts"),
        ({"api": {"prorl": {"enabled": "yes"}}}, "enabled"),
        ({"api": {"prorl": {"port": 0}}}, "port"),
        ({"api": {"prorl": {"from": [{"pods": {}}]}}}, "from"),
        ({"api": {"prorl": {"token": "x"}}}, "token"),
        ({"operator": {"replicas": 2}}, "replicas"),
        ({"jobs": {"allow": {"users": [0]}}}, "users"),
        ({"jobs": {"allow": {"groups": ["2000-"]}}}, "groups"),
        ({"jobs": {"pods": {"podSecurityContext": {"runAsUser": 0}}}}, "runAsUser"),
        ({"jobs": {"pods": {"podSecurityContext": {"runAsNonRoot": False}}}}, "runAsNonRoot"),
        ({"jobs": {"pods": {"topologySpreadConstraints": {}}}}, "topologySpreadConstraints"),
        ({"logFormat": "xml"}, "logFormat"),
        ({"traces": {"endpoint": "collector:4318"}}, "endpoint"),
        ({"traces": {"sample": 2}}, "sample"),
        ({"traces": {"headers": {"x": "y"}}}, "headers"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_with_the_field(validator: Any, values: dict[str, Any], field: str) -> None:
    problems = [f"{error.json_path} {error.message}" for error in validator.iter_errors(values)]
    assert len(problems) == 1
    assert field in problems[0]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of the series that a control plane exports."""
    folder = tmp_path_factory.mktemp("plane")
    port_file = folder / "port"
    command = [sys.executable, "-m", "rollyard_api", "--state-dir", str(folder), "--port", "0"]
    process = subprocess.Popen([*command, "--port-file", str(port_file), "--log-level", "error"])
    try:
        deadline = time.monotonic() + patience(50)
        while not port_file.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        token = json.loads((folder / "tokens.json").read_text())["metrics"]
        url = f"http://127.0.0.1:{int(port_file.read_text())}/metrics"
        text = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False).text
    finally:
        process.terminate()
        process.wait()
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE):
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + part for part in parts}
    return names


def expressions() -> dict[str, str]:
    """Return the PromQL of every alert and panel, by its place."""
    found = {}
    for group in yaml.safe_load((CHART / "files" / "alerts" / "rollyard.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            found[rule["alert"]] = rule["expr"]
    board = json.loads((CHART / "files" / "dashboards" / "rollyard.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def flags() -> set[str]:
    """Return every option of the control plane."""
    return {flag for parameter in command.params for flag in parameter.opts}


@pytest.mark.parametrize("where", sorted(expressions()))
def test_alerts_and_panels_ask_for_metrics_that_exist(where: str, exported: set[str]) -> None:
    expression = expressions()[where]
    used = set(re.findall(r"rollyard_[a-z_]+", expression))
    assert used
    assert used <= exported
    assert expression.count("(") == expression.count(")")


def test_the_control_plane_knows_every_option_of_the_prorl_calls_and_they_are_off() -> None:
    text = (CHART / "templates" / "api.yaml").read_text()
    given = re.findall(r"- (--prorl\S*?)(?:=.*)?$", text, re.MULTILINE)
    assert given[0] == "--prorl"
    assert set(given) <= flags()
    assert VALUES["api"]["prorl"]["enabled"] is False
    assert VALUES["api"]["prorl"]["listen"] == ControlPlaneOptions.model_fields["prorl_host"].default
    assert VALUES["api"]["prorl"]["port"] == ControlPlaneOptions.model_fields["prorl_port"].default
    lines = text.splitlines()
    place = next(at for at, line in enumerate(lines) if line.strip() == "- --prorl")
    assert lines[place - 1].strip() == "{{- if $prorl.enabled }}"


def readable(text: str) -> list[dict[str, Any]]:
    """Return what a template holds, with the words of an expression in place of its value.

    The lines of its control flow are left out, so both branches of a condition are in it.
    """
    text = re.sub(r"\{\{-? ?/\*.*?\*/\}\}", "", text, flags=re.DOTALL).replace("{{- else }} []", "")
    lines = [line for line in text.splitlines() if not re.fullmatch(r"\s*\{\{.*?\}\}\s*", line)]
    plain = re.sub(
        r"\{\{-?(.*?)-?\}\}",
        lambda found: " ".join(re.sub(r"[^\w.$/-]+", " ", found[1]).split()),
        "\n".join(lines),
    )
    return [one for one in yaml.safe_load_all(plain) if one]


def parts(file: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return what a file defines before its first object, and its objects by kind (the last of each)."""
    text = (CHART / "templates" / file).read_text()
    at = re.search(r"^(apiVersion:|---$)", text, re.MULTILINE)
    assert at is not None
    return text[: at.start()], {one["kind"]: one for one in readable(text[at.start() :])}


@pytest.mark.parametrize("file", ["api.yaml", "operator.yaml", "tests/test.yaml"])
def test_pods_of_the_chart_may_do_nothing_to_their_node(file: str) -> None:
    kinds = parts(file)[1]
    pod = kinds["Deployment"]["spec"]["template"]["spec"] if "Deployment" in kinds else kinds["Pod"]["spec"]
    assert pod["securityContext"].startswith("toYaml .Values.podSecurityContext nindent ")
    (container,) = pod["containers"]
    assert container["securityContext"].startswith("toYaml .Values.containerSecurityContext nindent ")
    assert pod["automountServiceAccountToken"] is (file == "operator.yaml"), "only the operator has rights"
    assert pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for mount in container["volumeMounts"]:
        assert mount.get("readOnly") is (True if mount["mountPath"].startswith("/etc/") else None), mount
    if "ServiceAccount" in kinds:
        assert kinds["ServiceAccount"]["automountServiceAccountToken"] is False
    # As in the pods that the operator makes.
    assert VALUES["podSecurityContext"] == pod_security(APP_USER)
    restrictions = restricted(read_only_root=True)
    given = VALUES["containerSecurityContext"]
    assert given == {key: restrictions[key] for key in given}
    assert given.keys() == restrictions.keys() - {"privileged", "runAsNonRoot", "seccompProfile"}


def test_each_pod_of_the_chart_holds_only_the_tokens_that_it_needs() -> None:
    def keys(file: str) -> dict[str, list[str]]:
        kinds = parts(file)[1]
        pod = (
            kinds["Deployment"]["spec"]["template"]["spec"] if "Deployment" in kinds else kinds["Pod"]["spec"]
        )
        found: dict[str, list[str]] = {}
        for volume in pod["volumes"]:
            sources = volume.get("projected", {}).get("sources", [volume])
            for secret in (one["secret"] for one in sources if "secret" in one):
                name = secret.get("name") or secret["secretName"]
                found[name.split()[1]] = [item["key"] for item in secret["items"]]
        return found

    tokens, tls = "rollyard.tokensSecret", "rollyard.tlsSecret"
    assert keys("api.yaml") == {tokens: ["tokens.json"], tls: ["tls.crt", "tls.key"]}
    assert keys("operator.yaml") == {tokens: ["driver", "worker"], tls: ["ca.crt"]}
    assert keys("tests/test.yaml") == {tokens: ["driver"], tls: ["ca.crt"]}


def test_the_operator_has_the_rights_that_it_needs_and_no_others() -> None:
    everything = {"get", "list", "watch", "create", "patch", "delete"}
    rules: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    for rule in readable(parts("rbac.yaml")[0])[0]:
        assert isinstance(rule, dict)
        for resource in rule["resources"]:
            (group,) = rule["apiGroups"]
            where = f"{group}/{resource}" if group else resource
            rules[where, tuple(rule.get("resourceNames", ()))] = set(rule["verbs"])
    warm = "rollyard-include rollyard.instance .-warm"
    assert rules == {
        **{(f"rollyard.dev/{kind}", ()): everything for kind in ("rolloutjobs", "backendpools")},
        **{(f"rollyard.dev/{kind}/status", ()): {"patch"} for kind in ("rolloutjobs", "backendpools")},
        **{(f"rollyard.dev/{kind}/finalizers", ()): {"update"} for kind in ("rolloutjobs", "backendpools")},
        ("configmaps/finalizers", (warm,)): {"update"},
        ("pods", ()): everything,
        ("services", ()): {"get", "create", "patch"},
        ("configmaps", ()): {"get", "create", "patch"},
        ("secrets", ()): {"create"},
        ("networking.k8s.io/networkpolicies", ()): {"get", "list", "create", "patch"},
        ("events", ()): {"create"},
    }
    kinds = parts("rbac.yaml")[1]
    for binding in ("RoleBinding", "ClusterRoleBinding"):
        (subject,) = kinds[binding]["subjects"]
        assert subject["name"].split()[:2] == ["include", "rollyard.operatorServiceAccount"]


def test_sandboxes_do_not_reach_the_control_plane_and_nobody_the_operator() -> None:
    text = (CHART / "templates" / "networkpolicy.yaml").read_text()
    api, operator = readable(text)
    assert api["spec"]["podSelector"]["matchLabels"].startswith("include rollyard.selectorLabels $api ")
    assert api["spec"]["policyTypes"] == ["Ingress"]
    ours, prorl = api["spec"]["ingress"]
    assert ours["ports"] == [{"protocol": "TCP", "port": "api"}]
    others = {"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["sandbox"]}
    assert ours["from"] == [{"namespaceSelector": {}, "podSelector": {"matchExpressions": [others]}}]
    assert prorl["ports"] == [{"protocol": "TCP", "port": ".Values.api.prorl.port"}]
    assert prorl["from"].startswith("toYaml .Values.api.prorl.from ")
    assert "{{- if and .Values.api.prorl.enabled .Values.api.prorl.from }}\n    - ports:" in text
    assert operator["spec"] == {
        "podSelector": {"matchLabels": "include rollyard.selectorLabels $operator nindent 6"},
        "policyTypes": ["Ingress"],
        "ingress": [],
    }


def test_the_operator_gets_each_setting_from_the_value_of_the_same_meaning() -> None:
    (config,) = readable(parts("operator.yaml")[0])
    names = {field.alias or name for name, field in OperatorSettings.model_fields.items()}
    assert config.keys() <= names
    for name in ("isolation", "sandbox"):
        place = "$boxes.isolation" if name == "isolation" else "$boxes"
        given = {key: value.split()[-1] for key, value in config[name].items()}
        assert given == {key: f"{place}.{key}" for key in given}
    assert config["isolation"].keys() == VALUES["sandboxes"]["isolation"].keys()
    creation = {key: value.split()[-1] for key, value in config["sandboxCreation"].items()}
    assert creation == {key: f"$boxes.creation.{key}" for key in ("perSecond", "burst")}
    assert config["allow"] == "toJson .Values.jobs.allow"
    assert config["pods"] == "toJson .Values.jobs.pods"
    assert config["networkPolicies"] == ".Values.networkPolicy.sandboxes"
    assert config["worker"] == {"resources": "toJson .Values.workers.resources"}
    assert config["engine"] == {"resources": "toJson .Values.engine.resources"}
    for name, image in config["images"].items():
        assert f"$images.{name}" in image.split(), name
    assert (config["tokenFile"], config["workerTokenFile"]) == tuple(
        f"/etc/rollyard/tokens/{role}" for role in ("driver", "worker")
    )
    # What no template may mount: the tokens of all, the key of TLS, the database's URL, the volume.
    reserved = config["reservedSecrets"].split()
    for secret in ("rollyard.tokensSecret", "rollyard.tlsSecret", ".Values.api.database.existingSecret"):
        assert secret in reserved
    assert "rollyard.fullname" in config["reservedClaims"]
    assert ".Values.api.persistence.existingClaim" in config["reservedClaims"].split()


def test_the_control_plane_gets_each_option_from_the_value_of_the_same_meaning() -> None:
    text = (CHART / "templates" / "api.yaml").read_text()
    lines = [line.strip() for line in text.splitlines()]
    begin, end = lines.index("args:") + 1, lines.index("env:")
    found: dict[str, str] = {}
    for before, line in zip(lines[begin - 1 : end], lines[begin:end], strict=False):
        option = re.match(r'- (?:\{\{ printf ")?(--[\w-]+)', line)
        if option is None:
            continue
        # An option has its value from its own line, or from that of the condition or the loop around it.
        place = re.search(r"(\$\w+|\.Values)[\w.]*", line) or re.match(r"\{\{- (?!end).*", before)
        found[option[1]] = "" if place is None else place[0].removeprefix("{{- ").removesuffix(" }}")
    assert found == {
        "--state-dir": "",
        "--tokens": "",
        "--host": "$api.listen",
        "--port": "",
        "--lease-seconds": "$api.leaseSeconds",
        "--no-backend-seconds": "$api.noBackendSeconds",
        "--max-queued": "$api.maxQueued",
        "--max-queued-per-namespace": "$api.maxQueuedPerNamespace",
        "--max-harness-runs-per-namespace": "$api.maxHarnessRunsPerNamespace",
        "--max-unstored": "$api.maxUnstored",
        "--log-level": "$api.logLevel",
        "--log-format": ".Values.logFormat",
        "--otlp-endpoint": ".Values.traces.endpoint",
        "--trace-sample": ".Values.traces.sample",
        "--open-metrics": "if .Values.metrics.open",
        "--open-docs": "if $api.openDocs",
        "--path-prefix": 'with include "rollyard.pathPrefix" .',
        "--allowed-host": "range uniq $hosts",
        "--plugin": "if .Values.plugins.configMap",
        "--allow-tasks-from": "range $api.tasks.allow",
        "--allow-tasks-network": "range $api.tasks.networks",
        "--allow-sandbox-host": "range $api.sandboxHosts.allow",
        "--allow-eval-host": "range $api.sandboxHosts.allowInEval",
        "--allow-rewards-from": "range $api.rewards.allow",
        "--allow-rewards-network": "range $api.rewards.networks",
        "--max-task-bytes": "$api.tasks.maxBytes",
        "--max-blob-bytes": "$api.blobs.maxBytes",
        "--max-namespace-blob-bytes": "$api.blobs.namespaceBytes",
        "--max-namespace-blobs": "$api.blobs.namespaceCount",
        "--trajectories": "with $api.trajectories.url",
        "--prorl": "if $prorl.enabled",
        "--prorl-host": "$prorl.listen",
        "--prorl-port": "$prorl.port",
        "--prorl-config": "",
        "--tls-cert": "if .Values.tls.enabled",
        "--tls-key": "",
    }
    assert found.keys() <= flags()


def test_every_option_of_the_control_plane_can_be_set() -> None:
    """It has a value of its own, or is one of `api.options`, or the chart decides it. Each exists once."""
    of_values = set(option_docs.values())
    free = set(SCHEMA["properties"]["api"]["properties"]["options"]["properties"])
    decided = set(option_docs.DECIDED)
    assert of_values | free | decided == set(keys(ControlPlaneOptions))
    assert not of_values & free
    assert not (of_values | free) & decided
    for path in option_docs.values().values():
        value: Any = VALUES
        for name in path.split("."):
            assert name in value, path
            value = value[name]


def test_the_schema_of_the_options_is_current() -> None:
    text = (CHART / "values.schema.json").read_text()
    assert text == option_docs.current_schema(text), "run `make docs`, or scripts/option_docs.py alone"


def test_no_password_is_an_argument() -> None:
    text = (CHART / "templates" / "api.yaml").read_text()
    arguments = text[text.index("args:") : text.index("env:")]
    assert "existingSecret" not in arguments
    assert "$(" not in arguments
    lines = [line.strip() for line in text.splitlines()]
    place = lines.index("- name: ROLLYARD_CONTROL_PLANE_DB")
    assert "database.existingSecret" in "".join(lines[place : place + 3])
    # The last of two arguments decides, so the installer's own come after the chart's.
    assert lines.index("{{- range $api.extraArgs }}") > lines.index(
        "{{- range $name, $value := $api.options }}"
    )
