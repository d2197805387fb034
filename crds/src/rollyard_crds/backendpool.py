"""BackendPool: the inference backends that serve one model."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from rollyard_crds.base import (
    API_VERSION,
    LIST_MAP_BY_TYPE,
    CheckedEnv,
    Condition,
    Model,
    ObjectMeta,
    Path,
    PlacementName,
    cel,
)
from rollyard_crds.fields.pod_template import PodTemplate

BackendUrl = Annotated[str, Field(pattern=r"^https?://[^\s]+$", max_length=2048)]


class ExternalEngine(Model):
    """Servers that run already and speak vLLM's API."""

    urls: Annotated[list[BackendUrl], Field(min_length=1, max_length=1024)]
    """Base URLs, without `/v1`."""


class EngineResources(Model):
    """What one backend needs."""

    gpu: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of one backend, all on one node; 0: the driver neither requests nor restricts any."""


_EXTERNAL: Final = "'external' is required with 'type: external', and only there"
_STARTED: Final = "'args' and 'env' have no effect on external servers; remove them"
_TOKEN: Final = (
    "'env' must not hold HF_TOKEN, which all readers of the pool would see; remove it: the driver downloads "
    "the model, with a token of its own"
)
_VLLM: Final = "'command' and 'resources' belong to 'type: vllm'; remove them"


class EngineSpec(Model):
    """The engine: `embedded` or `vllm` (started by the driver), or `external` (yours)."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("(self.type == 'external') == has(self.external)", _EXTERNAL),
            ("self.type != 'external' || (size(self.args) == 0 && size(self.env) == 0)", _STARTED),
            ("!('HF_TOKEN' in self.env)", _TOKEN),
            ("self.type == 'vllm' || (size(self.command) == 0 && !has(self.resources))", _VLLM),
        )
    )

    type: Literal["embedded", "external", "vllm"] = "embedded"
    """`embedded` and `vllm`: started and restarted by the driver; `external`: servers that you run."""
    command: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=64)] = Field(
        default_factory=list
    )
    """vLLM: the command that starts its API server; default: `vllm serve`. The driver adds the arguments it
    needs."""
    args: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=256)] = Field(
        default_factory=list
    )
    """Further arguments of the engine's command line; `$(BACKEND_INDEX)` is the replica's, from 0."""
    env: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=128), CheckedEnv] = (
        Field(default_factory=dict)
    )
    """Environment of the engine; `$(BACKEND_INDEX)` as in `args`."""
    resources: EngineResources | None = None
    """The resources that each backend needs (vLLM)."""
    start_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 900
    """A backend that does not answer its first completion within this time is restarted."""
    external: ExternalEngine | None = None
    """Where the external servers are."""

    @model_validator(mode="after")
    def _of_its_type(self) -> EngineSpec:
        if (self.type == "external") != (self.external is not None):
            raise ValueError(_EXTERNAL)
        if self.type == "external" and (self.args or self.env):
            raise ValueError(_STARTED)
        if "HF_TOKEN" in self.env:
            raise ValueError(_TOKEN)
        if self.type != "vllm" and (self.command or self.resources is not None):
            raise ValueError(_VLLM)
        return self


_PLACED: Final = "'placement' has no effect on external servers; remove it"
_IMMUTABLE: Final = "'placement' is immutable: delete the pool and create it again"


class BackendPoolSpec(Model):
    """Which model to serve, on how many backends, and with which engine."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("!has(self.placement) || self.engine.type != 'external'", _PLACED),
            ("has(self.placement) == has(oldSelf.placement)", _IMMUTABLE),
        )
    )

    model: Path
    """A model folder, a model of the Hugging Face Hub that the driver downloads (`OWNER/NAME` or
    `OWNER/NAME@REVISION`), or the name that external servers serve it under."""
    tokenizer: Path | None = None
    """Folder with tokenizer.json and the chat template, or a model of the hub; default: `model`."""
    replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Number of backends that the driver keeps running; external pools have one for each URL instead."""
    engine: EngineSpec = Field(default_factory=EngineSpec)
    """What serves the model."""
    template: PodTemplate = Field(default_factory=PodTemplate)
    """Kubernetes only: image, resources and placement of the backends' pods. `engine.resources.gpu` asks
    for GPUs."""
    max_active_rollouts: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Rollouts in Run on each backend; more wait in the Run queue. Default: as many as the KV cache of the
    backend has room for, each with a quarter of the model's context, from 8 to 1,024; 256 for a server that
    does not report both."""
    placement: (
        Annotated[PlacementName, Field(json_schema_extra=cel(("self == oldSelf", _IMMUTABLE)))] | None
    ) = None
    """The driver that starts the backends, where the control plane has several; default: the one it came
    with. Stage workers must reach them."""

    @model_validator(mode="after")
    def _started_by_a_driver(self) -> BackendPoolSpec:
        if self.placement is not None and self.engine.type == "external":
            raise ValueError(_PLACED)
        return self


BackendWeights = Literal["Current", "Updating", "Stale", "Failed"]
Circuit = Literal["Closed", "Open", "HalfOpen"]


class BackendStatus(Model):
    """One backend, as its driver and the router see it."""

    url: BackendUrl
    """Base URL, without `/v1`."""
    ready: bool = False
    """Healthy: it has answered its health check and a first completion."""
    active_rollouts: Annotated[int, Field(ge=0)] = 0
    """Unfinished rollouts that are assigned to it."""
    max_active_rollouts: Annotated[int, Field(ge=1)] | None = None
    """The most of them: the pool's `maxActiveRollouts`, or what follows from its KV cache."""
    context_tokens: Annotated[int, Field(ge=1)] | None = None
    """The context of its model, as the server says."""
    kv_cache_tokens: Annotated[int, Field(ge=1)] | None = None
    """The tokens that its KV cache holds, as the server says."""
    policy_version: Annotated[str, Field(max_length=128)] = ""
    """Label of the weights with which it samples."""
    weights: BackendWeights = "Current"
    """`Current`; `Updating`; `Stale` (behind the pool's policy version, gets no rollouts); `Failed`."""
    circuit: Circuit = "Closed"
    """`Open` after repeated failures: no rollouts; `HalfOpen`: one probe decides."""
    draining: bool = False
    """It takes no further rollouts, and stops when it has none left."""
    restart_requested: bool = False
    """Its weights are wrong, and only a restart of the server puts them right."""
    running_requests: Annotated[int, Field(ge=0)] | None = None
    """As the server's own metrics say."""
    waiting_requests: Annotated[int, Field(ge=0)] | None = None
    """As the server's own metrics say; more than 0 for a long time means that it is overloaded."""
    prefix_cache_hit_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of prompt tokens found in the server's prefix cache, over the last minutes."""
    tokens_per_second: Annotated[float, Field(ge=0)] | None = None
    """Sampled tokens per second of one rollout's model time, as measured; rollouts are distributed by it."""
    trains: Annotated[str, Field(max_length=512)] = ""
    """Whether it has what training needs: `yes`, or `no` and what it lacks, with the option to add; or
    `unknown`. Empty until it was asked."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """Why it is not ready."""


class BackendPoolStatus(Model):
    """The status of a pool, which its driver writes."""

    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(
        default_factory=list, json_schema_extra=LIST_MAP_BY_TYPE
    )
    """`Ready`, `Progressing` and `Degraded`."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The generation of the spec that this status was made from."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Backends that exist."""
    ready_replicas: Annotated[int, Field(ge=0)] = 0
    """Backends that take rollouts: they are ready, not draining, and have the pool's weights."""
    ready_text: Annotated[str, Field(max_length=32)] = ""
    """The same for people, with the wanted backends, such as `1/2`. Programs read `readyReplicas`."""
    policy_version: Annotated[str, Field(max_length=128)] = ""
    """Label of the newest weights that every backend should have; empty before the first update."""
    paused: bool = False
    """Whether the pool is paused: no rollout enters Run, and the servers sample nothing."""
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
    """The kind of this object."""
    metadata: ObjectMeta
    """Name, namespace, labels, annotations."""
    spec: BackendPoolSpec
    """What is wanted."""
    status: BackendPoolStatus = Field(default_factory=BackendPoolStatus)
    """The status, which the driver writes."""
