"""BackendPool: the inference backends that serve one model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from rollyard_crds.base import API_VERSION, LIST_MAP_BY_TYPE, Condition, Model, ObjectMeta, Path, cel

BackendUrl = Annotated[str, Field(pattern=r"^https?://[^\s]+$", max_length=2048)]


class ExternalEngine(Model):
    """Servers that run already and speak vLLM's API."""

    urls: Annotated[list[BackendUrl], Field(min_length=1, max_length=1024)]
    """Base URLs, without `/v1`."""


class EngineSpec(Model):
    """Which engine serves: `embedded` (started by the driver) or `external` (yours)."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                "(self.type == 'external') == has(self.external)",
                "'external' is required with 'type: external', and only there",
            ),
            (
                "self.type != 'external' || size(self.args) == 0",
                "'args' has no effect on external servers; remove it",
            ),
        )
    )

    type: Literal["embedded", "external"] = "embedded"
    """`embedded`: started and restarted by the driver; `external`: servers that you run."""
    args: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=256)] = Field(
        default_factory=list
    )
    """Further arguments of the engine's command line."""
    external: ExternalEngine | None = None
    """Where the external servers are."""

    @model_validator(mode="after")
    def _external(self) -> EngineSpec:
        if (self.type == "external") != (self.external is not None):
            raise ValueError("'external' is required with 'type: external', and only there")
        if self.type == "external" and self.args:
            raise ValueError("'args' has no effect on external servers; remove it")
        return self


class BackendPoolSpec(Model):
    """Which model, how many backends, and the engine that serves."""

    model: Path
    """A model folder, or the name that external servers serve it under."""
    tokenizer: Path | None = None
    """Folder with tokenizer.json and the chat template; default: `model`."""
    replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Backends that the driver keeps running; external pools have one for each URL instead."""
    engine: EngineSpec = Field(default_factory=EngineSpec)
    """What serves the model."""
    max_active_rollouts: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Per backend; more wait in the Run queue."""


class BackendStatus(Model):
    """One backend, as its driver and the router see it."""

    url: BackendUrl
    """Base URL, without `/v1`."""
    ready: bool = False
    """Healthy: it answered its health check, and a first completion."""
    active_rollouts: Annotated[int, Field(ge=0)] = 0
    """Rollouts assigned to it and not ended."""
    policy_version: Annotated[str, Field(max_length=128)] = ""
    """Label of the weights that it samples with."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """Why it is not ready."""


class BackendPoolStatus(Model):
    """How a pool stands; written by its driver."""

    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(
        default_factory=list, json_schema_extra=LIST_MAP_BY_TYPE
    )
    """`Ready`, `Progressing` and `Degraded`."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The generation of the spec that this status was made from."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Backends that exist."""
    ready_replicas: Annotated[int, Field(ge=0)] = 0
    """Backends that can take rollouts."""
    selector: Annotated[str, Field(max_length=1024)] = ""
    """Label selector of the backends, for the scale subresource."""
    backends: Annotated[list[BackendStatus], Field(max_length=1024)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["url"]},
    )
    """Every backend of the pool."""


class BackendPool(Model):
    """The inference backends that serve one model; a pool may serve many jobs."""

    api_version: Literal["rollyard.dev/v1alpha1"] = API_VERSION
    """Group and version of this schema."""
    kind: Literal["BackendPool"] = "BackendPool"
    """What this object is."""
    metadata: ObjectMeta
    """Name, namespace, labels, annotations."""
    spec: BackendPoolSpec
    """What is wanted."""
    status: BackendPoolStatus = Field(default_factory=BackendPoolStatus)
    """How it stands; written by the driver."""
