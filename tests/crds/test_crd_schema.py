"""The CRD YAML is up to date and structural, and agrees with the models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from rollyard_crds import ManifestError, StageSpec, parse, schema
from rollyard_crds.errors import CrdsError
from rollyard_crds.rolloutjob import StagesSpec
from rollyard_testing.crds.bounds import beyond
from rollyard_testing.crds.patches import merged

HERE = Path(__file__).parent
YAML_FOLDER = HERE.parents[1] / "crds" / "yaml"
CASES = yaml.safe_load((HERE / "cases.yaml").read_text())
GOOD: dict[str, dict[str, Any]] = {
    "RolloutJob": {"tasks": {"url": "file:///t.jsonl"}, "handler": "shell", "backendRef": {"name": "p"}},
    "BackendPool": {"model": "m"},
}
CRDS = {resource.kind: schema.crd(resource) for resource in schema.RESOURCES}


def document(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": case["kind"],
        "metadata": {"name": "x"},
        "spec": merged(GOOD[case["kind"]], copy.deepcopy(case["patch"])),
    }


def open_api(kind: str) -> dict[str, Any]:
    (version,) = CRDS[kind]["spec"]["versions"]
    root: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return root


def walk(node: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, node)]
    for name, child in node.get("properties", {}).items():
        found += walk(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            found += walk(node[key], f"{path}[]")
    return found


def test_committed_yaml_is_what_the_models_say() -> None:
    committed = {file.name: file.read_text() for file in sorted(YAML_FOLDER.glob("*.yaml"))}
    assert committed == schema.files(), "run `make crds`"


@pytest.mark.parametrize("kind", sorted(CRDS))
def test_structural(kind: str) -> None:
    """The schema keeps the rules that the API server checks when a CRD is created."""
    refused = {"$ref", "$defs", "anyOf", "allOf", "oneOf", "not", "const", "title", "patternProperties"}
    for path, node in walk(open_api(kind)):
        assert not refused & node.keys(), path
        assert node.get("type") in {"object", "array", "string", "integer", "number", "boolean"}, path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert isinstance(node.get("additionalProperties", {}), dict), path
        if node["type"] == "array":
            assert "items" in node, path
            for key in node.get("x-kubernetes-list-map-keys", []):
                assert key in node["items"]["required"], path
        if node["type"] == "object" and not node.get("x-kubernetes-preserve-unknown-fields"):
            assert "properties" in node or "additionalProperties" in node, path
        assert set(node.get("required", [])) <= node.get("properties", {}).keys(), path


@pytest.mark.parametrize("kind", sorted(CRDS))
def test_every_field_is_described_and_bounded(kind: str) -> None:
    for path, node in walk(open_api(kind)):
        if path.endswith("[]") or path.startswith(".metadata") or not path:
            continue
        assert node.get("description"), path
        if path.startswith((".apiVersion", ".kind")):
            continue
        if node["type"] == "array":
            assert "maxItems" in node, path
        if node["type"] == "string" and "format" not in node and "enum" not in node:
            assert "maxLength" in node, path


def defaults_of(model: type[BaseModel], node: dict[str, Any], path: str) -> None:
    for name, field in model.model_fields.items():
        alias = field.alias or name
        child = node["properties"][alias]
        where = f"{path}.{alias}"
        if field.is_required():
            assert "default" not in child, where
            assert alias in node["required"], where
        else:
            value = field.get_default(call_default_factory=True)
            if isinstance(value, BaseModel):
                value = value.model_dump(mode="json", by_alias=True, exclude_none=True)
            assert child.get("default") == value, where
        for nested in models_in(field.annotation):
            inner = child["items"] if child["type"] == "array" else child
            defaults_of(nested, inner, where)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in models_in(part)]


@pytest.mark.parametrize("resource", schema.RESOURCES, ids=lambda resource: resource.kind)
@pytest.mark.parametrize("part", ["spec", "status"])
def test_defaults_are_those_of_the_models(resource: schema.Resource, part: str) -> None:
    (model,) = models_in(resource.model.model_fields[part].annotation)
    defaults_of(model, open_api(resource.kind)["properties"][part], part)


def test_columns_end_with_age_and_wide_ones_are_priority_one() -> None:
    for resource in schema.RESOURCES:
        (version,) = CRDS[resource.kind]["spec"]["versions"]
        columns = version["additionalPrinterColumns"]
        assert columns[-1]["name"] == "Age"
        assert columns[0]["jsonPath"].startswith(".status.")
        assert any("status.conditions" in column["jsonPath"] for column in columns[:3])
        assert "number" not in {column["type"] for column in columns}, "kubectl shows all digits of a float"
        assert {column["priority"] for column in columns} == {0, 1}
        assert "status" in version["subresources"]
    assert CRDS["BackendPool"]["spec"]["versions"][0]["subresources"]["scale"]["labelSelectorPath"]


@pytest.mark.parametrize("case", CASES["good"], ids=str)
def test_good_specs_are_taken(case: dict[str, Any]) -> None:
    assert parse(document(case)).kind == case["kind"]


@pytest.mark.attack(
    "a job has it where Run's files decide: a shared sandbox, several steps, folders of the system, "
    "handlers that import the repository",
    boundary="network",
    surface="Eval with a network",
    stopped_by="such jobs or rollouts are refused",
)
@pytest.mark.parametrize("case", CASES["bad"], ids=str)
def test_bad_specs_are_refused_with_the_field(case: dict[str, Any]) -> None:
    with pytest.raises(ManifestError) as refused:
        parse(document(case))
    assert any(case["field"] in problem for problem in refused.value.problems), refused.value.problems


@pytest.mark.parametrize("kind", sorted(CRDS))
def test_every_bound_is_the_models_too(kind: str) -> None:
    """The models refuse what the schema's bounds refuse, for the same field."""
    alike = 0
    for field, bound, wrong in beyond(kind):
        with pytest.raises(ManifestError) as refused:
            parse(wrong)
        assert any(problem.startswith(field) for problem in refused.value.problems), (field, bound)
        alike += 1
    assert alike > 40


@pytest.mark.parametrize("case", CASES["immutable"], ids=str)
def test_fields_that_make_another_job_are_immutable(case: dict[str, Any]) -> None:
    (field,) = case["patch"]
    node = open_api("RolloutJob")["properties"]["spec"]["properties"][field]
    assert "self == oldSelf" in [rule["rule"] for rule in node["x-kubernetes-validations"]]


@pytest.mark.attack(
    "an author opens Eval by the list for Run, or adds hosts to a registered job",
    boundary="network",
    surface="`stages.eval.allowedHosts`",
    stopped_by="a list of its own, empty at first; a registered job cannot change its own",
)
def test_the_network_of_eval_is_immutable() -> None:
    """The installer's list is read when a job is created, and stages may change later."""
    stages = open_api("RolloutJob")["properties"]["spec"]["properties"]["stages"]["properties"]
    rules = stages["eval"]["properties"]["allowedHosts"]["x-kubernetes-validations"]
    assert [rule["rule"] for rule in rules] == ["self == oldSelf"]
    of_all = [rule["rule"] for rule in stages["eval"]["x-kubernetes-validations"]]
    assert "has(self.allowedHosts) == has(oldSelf.allowedHosts)" in of_all


@pytest.mark.parametrize("case", CASES["mutable"], ids=str)
def test_fields_that_may_change_are_not_frozen(case: dict[str, Any]) -> None:
    (field,) = case["patch"]
    assert "x-kubernetes-validations" not in open_api("RolloutJob")["properties"]["spec"]["properties"][field]


def test_stages_keep_their_own_defaults() -> None:
    stages = StagesSpec.model_validate({"run": {"replicas": 2}})
    assert (stages.run.concurrency, stages.run.timeout_seconds, stages.run.max_attempts) == (None, 1800, 2)
    assert (stages.init.concurrency, stages.eval.concurrency) == (16, 16)
    assert StagesSpec(run=StageSpec(concurrency=4)).run.timeout_seconds == 1800


def test_not_structural_is_said() -> None:
    with pytest.raises(CrdsError, match="anyOf") as refused:
        schema.structural({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {})
    assert refused.value.reason == "NotStructural"
