"""What both kinds share: metadata, conditions, and the strict camelCase model.

Every string and list is bounded, because the API server refuses CEL rules over
unbounded ones, and because a bound is what turns "out of memory" into "400".
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "rollyard.dev"
VERSION = "v1alpha1"
API_VERSION: Final = "rollyard.dev/v1alpha1"

NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, min_length=1, max_length=63)]
"""A DNS-1123 label, as Kubernetes wants names."""

ShortText = Annotated[str, Field(max_length=256)]
Path = Annotated[str, Field(min_length=1, max_length=4096)]


class Model(BaseModel):
    """Strict: unknown fields are refused, names are camelCase outside and snake_case inside."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        validate_default=True,
    )

    def to_json(self) -> dict[str, Any]:
        """The camelCase JSON form, without unset optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ObjectMeta(Model):
    """The part of Kubernetes' metadata that Rollyard reads; the rest is kept and passed through."""

    model_config = ConfigDict(extra="allow")

    name: Name
    namespace: Name = "default"
    labels: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    annotations: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    uid: str | None = None
    generation: int | None = None
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(Model):
    """A condition for programs; `last_transition_time` moves only when `status` flips."""

    type: Annotated[str, Field(max_length=64)]
    status: ConditionStatus
    reason: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    message: Annotated[str, Field(max_length=4096)] = ""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    last_transition_time: datetime
