"""BackendPool: the inference backends that serve one model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollyard_crds.base import API_VERSION, Condition, Model, ObjectMeta, Path

BackendUrl = Annotated[str, Field(pattern=r"^https?://[^\s]+$", max_length=2048)]


class ExternalEngine(Model):
    """Servers that run already and speak vLLM's API."""

    urls: Annotated[list[BackendUrl], Field(min_length=1, max_length=1024)]


class EngineSpec(Model):
    """Which engine serves: `embedded` (started by the driver) or `external` (yours)."""

    type: Literal["embedded", "external"] = "embedded"
    args: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=256)] = Field(
        default_factory=list
    )
    external: ExternalEngine | None = None

    @model_validator(mode="after")
    def _external(self) -> EngineSpec:
        if (self.type == "external") != (self.external is not None):
            raise ValueError("'external' is required with 'type: external', and only there")
        if self.type == "external" and self.args:
            raise ValueError("'args' has no effect on external servers; remove it")
        return self


class BackendPoolSpec(Model):
    model: Path
    """A model folder, or the name that external servers serve it under."""
    tokenizer: Path | None = None
    """Folder with tokenizer.json and the chat template; default: `model`."""
    replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    engine: EngineSpec = Field(default_factory=EngineSpec)
    max_active_rollouts: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Per backend; more wait in the Run queue."""


class BackendStatus(Model):
    url: BackendUrl
    ready: bool = False
    active_rollouts: Annotated[int, Field(ge=0)] = 0
    policy_version: Annotated[str, Field(max_length=128)] = ""
    message: Annotated[str, Field(max_length=1024)] = ""


class BackendPoolStatus(Model):
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(default_factory=list)
    observed_generation: Annotated[int, Field(ge=0)] = 0
    replicas: Annotated[int, Field(ge=0)] = 0
    ready_replicas: Annotated[int, Field(ge=0)] = 0
    selector: Annotated[str, Field(max_length=1024)] = ""
    backends: Annotated[list[BackendStatus], Field(max_length=1024)] = Field(default_factory=list)


class BackendPool(Model):
    api_version: Literal["rollyard.dev/v1alpha1"] = API_VERSION
    kind: Literal["BackendPool"] = "BackendPool"
    metadata: ObjectMeta
    spec: BackendPoolSpec
    status: BackendPoolStatus = Field(default_factory=BackendPoolStatus)
