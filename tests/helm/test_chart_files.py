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
import pytest
import yaml
from rollyard_api.__main__ import parser
from rollyard_crds import schema
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
        assert set(values) == set(node["properties"]) - {"global"}, path
        for name, value in values.items():
            if isinstance(value, dict):
                compare(value, resolved(node["properties"][name]), f"{path}.{name}")

    compare(VALUES, SCHEMA, "")


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
    actions = parser()._option_string_actions
    assert set(given) <= set(actions)
    assert VALUES["api"]["prorl"]["enabled"] is False
    assert VALUES["api"]["prorl"]["listen"] == actions["--prorl-host"].default == "127.0.0.1"
    assert VALUES["api"]["prorl"]["port"] == actions["--prorl-port"].default
    lines = text.splitlines()
    place = next(at for at, line in enumerate(lines) if line.strip() == "- --prorl")
    assert lines[place - 1].strip() == "{{- if $prorl.enabled }}"
