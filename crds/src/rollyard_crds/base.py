"""The parts that both kinds share: metadata, conditions, and the strict camelCase model.

Every string and list is bounded, because the API server refuses CEL rules over
unbounded ones, and because a bound turns "out of memory" into "400".
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from datetime import datetime
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import VERSION as PYDANTIC_VERSION
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rollyard_crds.names import EXTENSION_NAME

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

GROUP: Final = "rollyard.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "rollyard.dev/v1alpha1"

DEFER_BUILD: Final = tuple(int(part) for part in PYDANTIC_VERSION.split(".")[:2]) >= (2, 14)
"""Whether the validator of a model is built at its first use, and not when its class is made.

A program needs few of the models that it imports. Before 2.14, pydantic did not build a model correctly when
several threads used it for the first time at once.
"""

NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, min_length=1, max_length=63)]
"""A DNS-1123 label, as Kubernetes requires for names."""

EntryPointName = Annotated[str, Field(pattern=EXTENSION_NAME, max_length=63)]
"""The name of an extension, such as a handler."""

Path = Annotated[str, Field(min_length=1, max_length=4096)]
_ENV_NAME: Final = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*\Z")


def _checked_env(env: dict[str, str]) -> dict[str, str]:
    """Check that Kubernetes accepts the names in a container, and that a process can have the values."""
    for name, value in env.items():
        if not _ENV_NAME.match(name):
            raise ValueError(
                f"{name!r} is not a name of an environment variable: use letters, digits, '_', '-' and '.', "
                "and no digit at the beginning"
            )
        if "\0" in value:
            raise ValueError(f"the value of {name!r} must not hold a null character")
    return env


CheckedEnv = AfterValidator(_checked_env)
"""The check of every map of environment variables; programs and shells get its names unchanged."""
PlacementName = Literal["kubernetes", "slurm", "local"]
"""The drivers."""


def cel(*rules: tuple[str, str]) -> dict[str, Any]:
    """Return CEL rules (expression, message) as the schema extension that the API server evaluates.

    They stand beside the pydantic validator that says the same, and reach only the CRD YAML.
    """
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


IMMUTABLE: Final = cel(("self == oldSelf", "is immutable: delete the job and create it again"))
"""Schema extension of a field that must not change after creation."""


LIST_MAP_BY_TYPE: Final[dict[str, Any]] = {
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
}
"""Schema extension of a list of conditions: server-side apply merges it by `type`."""


class Deferred(BaseModel):
    """The base of all models. A validator is built at its first use; see `DEFER_BUILD`."""

    model_config = ConfigDict(defer_build=DEFER_BUILD)


class Model(Deferred):
    """Strict: unknown fields are refused, names are camelCase outside and snake_case inside."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        validate_default=True,
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON schema, in which the docstrings of the fields are their descriptions."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in _attribute_docstrings(cls).items():
            field = cls.model_fields.get(name)
            shown = properties.get(name) or properties.get(field.alias if field and field.alias else name)
            if shown is not None:
                shown.setdefault("description", text)
        return schema

    def to_json(self) -> dict[str, Any]:
        """Return the camelCase JSON form, without unset optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


@cache
def _attribute_docstrings(model: type) -> dict[str, str]:
    """Return the docstring of each documented field of a class, by the field's name.

    The fields of base classes are included. A class whose source code cannot be read adds none. Pydantic can
    read them itself (`use_attribute_docstrings`), but it does so when a class is made: every process that
    imports the models would parse their source code. Only those that write a schema need it.
    """
    docstrings: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base.__module__.startswith(("builtins", "pydantic", "typing", "abc")):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, after in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                docstrings.pop(field.target.id, None)
                if (
                    isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                ):
                    docstrings[field.target.id] = inspect.cleandoc(after.value.value)
    return docstrings


def build(model: type[BaseModel]) -> None:
    """Build a model before its first use, and with it the models that its fields contain by default."""
    model.model_rebuild()
    for field in model.model_fields.values():
        default = field.default_factory
        if isinstance(default, type) and issubclass(default, BaseModel):
            build(default)


def build_all() -> None:
    """Build every model that has been imported, for a process that has time now but not later."""
    waiting: list[type[BaseModel]] = [Deferred]
    while waiting:
        model = waiting.pop()
        model.model_rebuild()
        waiting.extend(model.__subclasses__())


class ObjectMeta(Model):
    """The part of Kubernetes' metadata that Rollyard reads; the rest is kept and passed on."""

    model_config = ConfigDict(extra="allow")

    name: Name
    """Unique within its namespace."""
    namespace: Name = "default"
    """Names are per namespace."""
    labels: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Labels, passed on to the children where the driver has labels."""
    annotations: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Free-form notes for tools."""
    uid: str | None = None
    """The server sets it; an object that is created again under the same name has another one."""
    generation: int | None = None
    """Set by the server; rises with every change of the spec."""
    creation_timestamp: datetime | None = None
    """Set by the server."""
    deletion_timestamp: datetime | None = None
    """Set by the server once deletion was asked for."""


ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(Model):
    """A condition, for programs; `last_transition_time` changes only when `status` does."""

    type: Annotated[str, Field(max_length=64)]
    """What is claimed, such as `Finished`."""
    status: ConditionStatus
    """Whether it holds."""
    reason: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, in one CamelCase word that programs may branch on."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, for people."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The generation of the spec that this refers to."""
    last_transition_time: datetime
    """When `status` last changed."""
