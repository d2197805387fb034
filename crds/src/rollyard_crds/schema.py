"""The CRD YAML, made from the pydantic models.

Kubernetes accepts *structural* schemas only: every part has a `type`, there are no references and no `anyOf`,
and unknown fields are pruned rather than forbidden. So pydantic's JSON schema is inlined and rewritten here;
bounds, defaults, patterns, descriptions and CEL rules pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from rollyard_crds.backendpool import BackendPool
from rollyard_crds.base import GROUP, NAME_PATTERN, VERSION
from rollyard_crds.errors import CrdsError
from rollyard_crds.rolloutjob import RolloutJob

JsonSchema = dict[str, Any]

_RULES: Final = "x-kubernetes-validations"
_PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"
_KEPT: Final = frozenset(
    {
        "default",
        "description",
        "enum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minimum",
        "pattern",
        "properties",
        "required",
        "type",
    }
)


class _WithDefaults(GenerateJsonSchema):
    """Pydantic's generator, with the values of default factories written out as defaults."""

    def get_default_value(self, schema: Any) -> Any:
        factory = schema.get("default_factory")
        if factory is not None and not schema.get("default_factory_takes_data"):
            return factory()
        return super().get_default_value(schema)

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, BaseModel):
            return dft.model_dump(mode="json", by_alias=True, exclude_none=True)
        return super().encode_default(dft)


def _merged(base: JsonSchema, over: JsonSchema) -> JsonSchema:
    rules = [*base.get(_RULES, []), *over.get(_RULES, [])]
    merged = {**base, **over}
    if rules:
        merged[_RULES] = rules
    return merged


def _resolved(node: JsonSchema, definitions: Mapping[str, JsonSchema]) -> JsonSchema:
    """Return `node` with `$ref` inlined, `anyOf` with null as its other side, and `const` as an enum."""
    if "$ref" in node:
        rest = {key: value for key, value in node.items() if key != "$ref"}
        target = _resolved(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
        return _merged(target, rest)
    if "anyOf" in node:
        choices = [choice for choice in node["anyOf"] if choice.get("type") != "null"]
        if len(choices) != 1:
            raise CrdsError(f"cannot say anyOf {node['anyOf']} structurally", reason="NotStructural")
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        if rest.get("default", ...) is None:
            # Absent means none. An explicit null is dropped by clients and refused by the server.
            del rest["default"]
        return _merged(_resolved(choices[0], definitions), rest)
    if "const" in node:
        rest = {key: value for key, value in node.items() if key != "const"}
        return {**rest, "enum": [node["const"]]}
    return node


def _numeric(node: JsonSchema, out: JsonSchema) -> None:
    # OpenAPI v3.0 has exclusive bounds as flags beside the bound.
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in node:
            out[bound], out[exclusive] = node[exclusive], True
    if node.get("type") == "integer":
        out["format"] = "int64"


def structural(node: JsonSchema, definitions: Mapping[str, JsonSchema]) -> JsonSchema:
    """Return a JSON schema of pydantic's as a structural one.

    Raises:
        CrdsError: the schema needs a choice between types, or has no type.
    """
    node = _resolved(node, definitions)
    if "type" not in node:
        raise CrdsError(f"no type: {node}", reason="NotStructural")
    out = {key: value for key, value in node.items() if key in _KEPT or key.startswith("x-kubernetes-")}
    _numeric(node, out)
    if "description" in out:
        # What Python raises does not concern a reader of the CRD.
        out["description"] = " ".join(out["description"].split("\n\nRaises:")[0].split())
    if "items" in node:
        out["items"] = structural(node["items"], definitions)
    if "properties" in node:
        out["properties"] = {
            name: structural(child, definitions) for name, child in node["properties"].items()
        }
    elif node["type"] == "object":
        # A structural schema cannot bound the names of a map. The models do.
        values = next(iter(node.get("patternProperties", {}).values()), node.get("additionalProperties"))
        if isinstance(values, dict):
            out["additionalProperties"] = structural(values, definitions)
        else:
            out[_PRESERVE] = True
    return {key: out[key] for key in sorted(out)}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of `kubectl get`; `wide` ones appear with `-o wide` only."""

    name: str
    path: str
    description: str
    type: str = "string"
    wide: bool = False

    def to_json(self) -> JsonSchema:
        """Return the column as an entry of `additionalPrinterColumns`."""
        return {
            "name": self.name,
            "type": self.type,
            "jsonPath": self.path,
            "description": self.description,
            "priority": int(self.wide),
        }


@dataclass(frozen=True, slots=True)
class Resource:
    """What a CRD says in addition to its schema."""

    model: type[BaseModel]
    kind: str
    plural: str
    singular: str
    short: str
    columns: tuple[Column, ...]
    scale: Mapping[str, str] | None = None


def _condition(name: str, part: str) -> str:
    return f'.status.conditions[?(@.type=="{name}")].{part}'


_AGE: Final = Column("Age", ".metadata.creationTimestamp", "Time since creation", "date")

RESOURCES: Final[tuple[Resource, ...]] = (
    Resource(
        model=RolloutJob,
        kind="RolloutJob",
        plural="rolloutjobs",
        singular="rolloutjob",
        short="rj",
        columns=(
            Column("Finished", _condition("Finished", "status"), "Whether every rollout has ended"),
            Column("Phase", ".status.phase", "Where the job stands"),
            Column("Reason", _condition("Running", "reason"), "Why it runs or does not"),
            Column("Succeeded", ".status.counts.succeeded", "Rollouts with a reward", "integer"),
            Column("Failed", ".status.counts.failed", "Rollouts without a reward", "integer"),
            Column("Total", ".status.counts.total", "All rollouts so far", "integer"),
            Column("Reward", ".status.rewardMean", "Mean reward", "number"),
            Column("Handler", ".spec.handler", "Prepares and evaluates the tasks", wide=True),
            Column("Pool", ".spec.backendRef.name", "BackendPool that samples", wide=True),
            Column("Placement", ".spec.placement", "Driver that runs it", wide=True),
            Column("Init", ".status.counts.init.active", "Rollouts in Init", "integer", wide=True),
            Column("Run", ".status.counts.run.active", "Rollouts in Run", "integer", wide=True),
            Column("Eval", ".status.counts.eval.active", "Rollouts in Eval", "integer", wide=True),
            Column("Message", ".status.message", "What it waits for, or why it ended this way", wide=True),
            _AGE,
        ),
    ),
    Resource(
        model=BackendPool,
        kind="BackendPool",
        plural="backendpools",
        singular="backendpool",
        short="bp",
        columns=(
            Column("Ready", _condition("Ready", "status"), "Whether it can take rollouts"),
            Column("Reason", _condition("Ready", "reason"), "Why it is ready or not"),
            Column("Backends", ".status.readyReplicas", "Backends that are ready", "integer"),
            Column("Wanted", ".spec.replicas", "Backends that are wanted", "integer"),
            Column("Engine", ".spec.engine.type", "What serves", wide=True),
            Column("Model", ".spec.model", "Model folder or name", wide=True),
            Column("Placement", ".spec.placement", "Driver that starts the backends", wide=True),
            _AGE,
        ),
        scale={
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    ),
)


def of_model(model: type[BaseModel]) -> JsonSchema:
    """Return the structural schema of a model, with the defaults and descriptions of all its fields.

    Raises:
        CrdsError: The model has no structural schema.
    """
    source = model.model_json_schema(by_alias=True, schema_generator=_WithDefaults)
    return structural(source, source.get("$defs", {}))


def _object_schema(model: type[BaseModel]) -> JsonSchema:
    source = of_model(model)
    properties = source["properties"]
    # The API server owns these three; of metadata a schema may bound the name only.
    properties["apiVersion"] = {"type": "string", "description": properties["apiVersion"]["description"]}
    properties["kind"] = {"type": "string", "description": properties["kind"]["description"]}
    properties["metadata"] = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 63, "pattern": NAME_PATTERN}},
    }
    # A new object has no status; the driver's first write fills it.
    properties["status"].pop("default", None)
    return {
        "type": "object",
        "description": source["description"],
        "required": ["spec"],
        "properties": properties,
    }


def crd(resource: Resource) -> JsonSchema:
    """Return one CustomResourceDefinition, as the API server takes it.

    Raises:
        CrdsError: the model has no structural schema.
    """
    subresources: JsonSchema = {"status": {}}
    if resource.scale is not None:
        subresources["scale"] = dict(resource.scale)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": resource.singular,
                "shortNames": [resource.short],
                "categories": ["rollyard"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _object_schema(resource.model)},
                    "subresources": subresources,
                    "additionalPrinterColumns": [column.to_json() for column in resource.columns],
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    """Plain YAML: no anchors, and each string on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render(resource: Resource) -> str:
    """Return the YAML text of one CRD, which is the same for the same models."""
    header = f"# Made from the models in {resource.model.__module__} by `make crds`; do not edit.\n"
    dump: Callable[..., str] = yaml.dump
    return header + dump(crd(resource), Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


def files() -> dict[str, str]:
    """Return the text of every CRD by its file name."""
    return {f"{GROUP}_{resource.plural}.yaml": render(resource) for resource in RESOURCES}
