"""The settings of an operator: a YAML file with keys in camelCase. Every field is checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator
from rollyard_crds.base import Model, Name
from rollyard_crds.fields.pod_template import (
    LocalReference,
    PodResources,
    PodSecurityContext,
    TopologySpreadConstraint,
)

from rollyard_operator.allowed import Allowed
from rollyard_operator.errors import OperatorError

Image = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^\S+$")]
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")


class SettingsError(OperatorError, ValueError):
    """The operator's settings cannot be used. The message names the field."""

    reason = "InvalidSettings"


def _host_port(text: str) -> str:
    match = _HOST_PORT.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT, such as 10.96.0.1:443 or [fd00::1]:443")
    return text


HostPort = Annotated[str, Field(max_length=259), AfterValidator(_host_port)]


class Images(Model):
    """The container images of the installation."""

    worker: Image
    """The image of stage workers."""
    engine: Image
    """The image of backends with `engine.type: embedded`."""
    vllm: Image = "vllm/vllm-openai:v0.32.0"
    """The image of backends with `engine.type: vllm`."""
    sandbox: Image
    """The image with the folder of the exec server, which is mounted at /.rollyard into every sandbox."""
    sandbox_default: Image
    """The image of sandboxes whose jobs and tasks name no image."""


class Isolation(Model):
    """What a sandbox must not be able to reach before it is handed out."""

    required: bool = True
    """False hands out sandboxes unchecked, at your risk, for a cluster without a NetworkPolicy engine."""
    checks: Annotated[list[HostPort], Field(max_length=16)] = Field(default_factory=list)
    """The addresses to check, which answer an unrestricted pod.

    The operator resolves names. An empty list means the API server, the control plane, the cluster's DNS and
    the metadata address of clouds.
    """
    external: Annotated[list[HostPort], Field(max_length=16)] = Field(default_factory=list)
    """Additional addresses outside the cluster's own networks. The operator reports if none answers."""
    policies: Literal["refuse", "ignore"] = "refuse"
    """Whether a sandbox that a NetworkPolicy of its namespace permits to send is refused or accepted."""
    seconds: Annotated[float, Field(gt=0, le=300)] = 10.0
    """A sandbox that still reaches one of the addresses after this many seconds gives up."""


class SandboxCreation(Model):
    """The token bucket for the creation of sandbox pods in all namespaces together."""

    per_second: Annotated[float, Field(gt=0, le=10_000)] = 10.0
    """The number of pods per second in the long run."""
    burst: Annotated[int, Field(ge=1, le=10_000)] = 20
    """The number of pods that may be made at once after a quiet time."""


class TraceSettings(Model):
    """The receiver of the traces of rollouts, for stage workers. Only the installation chooses it."""

    endpoint: Annotated[str, Field(pattern=r"^(https?://[^\s/?#@]+(/[^\s?#]*)?)?$", max_length=2048)] = ""
    """The base URL of an OpenTelemetry receiver (OTLP over HTTP). With "", nothing is traced."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The fraction of groups whose rollouts are traced."""


class HubSettings(Model):
    """How pods reach the Hugging Face Hub, for models and tokenizers that pools name as OWNER/NAME."""

    claim: Annotated[str, Field(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")] = ""
    """The PersistentVolumeClaim with the cache, in every namespace with pools. With "", each pod has its own
    cache, which ends with it."""
    token_secret: Annotated[str, Field(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")] = ""
    """The Secret with the token, in every namespace with pools. With "", there is no token."""
    token_key: Annotated[str, Field(max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = "HF_TOKEN"
    """The key of the token in its Secret."""
    endpoint: Annotated[str, Field(pattern=r"^(https?://[^\s/?#@]+(/[^\s?#]*)?)?$", max_length=2048)] = ""
    """The URL of a mirror. With "", it is that of the hub."""


class ContainerDefaults(Model):
    """The defaults for containers whose template does not set these values."""

    resources: PodResources = Field(default_factory=PodResources)
    """Requests and limits. A resource that a template names replaces the one named here."""


class PodDefaults(Model):
    """What the installer sets for all pods of jobs and pools whose template says nothing else."""

    scheduler_name: Annotated[str, Field(max_length=253)] = ""
    """The scheduler of all pods. With "", it is the cluster's."""
    topology_spread_constraints: Annotated[list[TopologySpreadConstraint], Field(max_length=8)] = Field(
        default_factory=list
    )
    """How all pods are spread over nodes or zones."""
    pod_security_context: PodSecurityContext = Field(default_factory=PodSecurityContext)
    """The user and groups of stage workers and backends. Those of sandboxes are `sandbox.runAsUser`."""


class SandboxDefaults(Model):
    """How sandbox pods are made. Their size comes with the claim."""

    cpu_request_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    """The share of a sandbox's `cpu` that the scheduler reserves. Sandboxes mostly wait for the model."""
    memory_request_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of a sandbox's `memory` that the scheduler reserves."""
    run_as_user: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1000
    """The user and group id of all processes in a sandbox."""
    termination_grace_seconds: Annotated[int, Field(ge=0, le=60)] = 1
    """The time between SIGTERM and SIGKILL of a sandbox that is no longer needed, in seconds."""


def _worker_resources() -> ContainerDefaults:
    return ContainerDefaults(
        resources=PodResources(requests={"cpu": "100m", "memory": "256Mi"}, limits={"memory": "2Gi"})
    )


def _engine_resources() -> ContainerDefaults:
    return ContainerDefaults(
        resources=PodResources(requests={"cpu": "500m", "memory": "512Mi"}, limits={"memory": "4Gi"})
    )


class OperatorSettings(Model):
    """The settings of an operator."""

    instance: Name
    """The name of this installation. Its objects all have it as the label `rollyard.dev/instance`."""
    control_plane_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=2048)]
    """The URL at which the operator and the stage workers reach the control plane."""
    control_plane_ca_file: Path | None = None
    """The CA certificates (PEM) of the control plane, if the system's are not sufficient.

    The operator passes them to the workers as key `ca.crt` of the Secret of their job.
    """
    token_file: Path
    """The file with the control plane's token of the role `driver`."""
    worker_token_file: Path
    """The file with the control plane's token of the role `worker`.

    The tokens of jobs are derived from it. The file is read regularly because the token may change.
    """
    release_namespace: Name
    """The namespace in which the operator and the control plane run."""
    namespaces: Annotated[list[Name], Field(max_length=256)] = Field(default_factory=list)
    """The namespaces that the operator serves. An empty list means all namespaces."""
    allow: Allowed = Field(default_factory=Allowed)
    """What templates of jobs and pools may contain in addition to what is always permitted."""
    reserved_secrets: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    """The Secrets of the release's namespace that no template may name, no matter what `allow` permits."""
    reserved_claims: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    """The PersistentVolumeClaims of the release's namespace that no template may name."""
    images: Images
    """The container images of the installation."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """The pull policy of the images above. A job's own images use IfNotPresent, or Never if this is Never."""
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=16)] = Field(default_factory=list)
    """The Secrets with registry credentials, expected in every namespace in which the operator makes pods."""
    image_volume: Literal["auto", "always", "never"] = "auto"
    """How the exec server's folder gets into a sandbox: as an image volume, or copied by an init container.

    `auto` uses an image volume from Kubernetes 1.35 on, where these are enabled by default.
    """
    isolation: Isolation = Field(default_factory=Isolation)
    """The check of a sandbox's network isolation."""
    network_policies: bool = True
    """Whether the operator keeps a NetworkPolicy in every namespace with sandboxes. If False, you do that."""
    sandbox_creation: SandboxCreation = Field(default_factory=SandboxCreation)
    """How fast sandbox pods are made."""
    ready_workers: Annotated[int, Field(ge=0, le=100)] = 0
    """The number of stage workers that stand ready in each namespace that the operator serves.

    A new job whose stages have default templates takes its first workers from them.
    """
    worker: ContainerDefaults = Field(default_factory=_worker_resources)
    """The defaults for stage workers."""
    engine: ContainerDefaults = Field(default_factory=_engine_resources)
    """The defaults for backends with `engine.type: embedded`.
    Backends of vLLM have what their pool says and no other limit.
    """
    sandbox: SandboxDefaults = Field(default_factory=SandboxDefaults)
    """The defaults for sandboxes."""
    pods: PodDefaults = Field(default_factory=PodDefaults)
    """The defaults for all pods."""
    hub: HubSettings = Field(default_factory=HubSettings)
    """How pods reach the Hugging Face Hub."""
    traces: TraceSettings = Field(default_factory=TraceSettings)
    """The receiver of traces, which stage workers send spans to."""
    log_format: Literal["text", "json"] = "text"
    """The form of the log lines of stage workers and of backends with `engine.type: embedded`."""
    unschedulable_seconds: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """A sandbox pod that no node accepts for this many seconds fails its claim.

    Pods held back by a scheduling gate (Kueue) wait without limit.
    """
    image_pull_seconds: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    """A sandbox pod whose image cannot be pulled for this many seconds fails its claim.

    An image that can never be pulled (a malformed name, or absent with `Never`) fails it at once.
    """
    api_server_version: Annotated[str, Field(pattern=r"^([0-9]+\.[0-9]+)?$", max_length=16)] = ""
    """The cluster's `major.minor` version, which the operator reads when it starts. Empty means unknown."""

    @model_validator(mode="after")
    def _checks_need_required(self) -> OperatorSettings:
        for name in ("checks", "external"):
            if getattr(self.isolation, name) and not self.isolation.required:
                raise ValueError(
                    f"'isolation.{name}' have no effect with 'isolation.required: false'; remove them"
                )
        return self

    @property
    def image_volumes(self) -> bool:
        """Whether the exec server's folder is mounted as an image volume."""
        if self.image_volume != "auto":
            return self.image_volume == "always"
        major, _, minor = self.api_server_version.partition(".")
        return bool(minor) and (int(major), int(minor)) >= (1, 35)

    def looks_after(self, namespace: str) -> bool:
        """Return whether this operator serves the objects of a namespace."""
        return not self.namespaces or namespace in self.namespaces


def parse_settings(text: str, source: str = "settings") -> OperatorSettings:
    """Return the settings in a YAML text.

    Raises:
        SettingsError: The text is not YAML, or a field is missing, unknown or wrong. The message names
            `source` and each field.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{source}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise SettingsError(f"{source}: expected a mapping with 'instance', 'controlPlaneUrl', 'images', …")
    try:
        return OperatorSettings.model_validate(data)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in item['loc']) or 'settings'}: "
            + item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        ]
        raise SettingsError(f"{source}: " + "; ".join(lines)) from error


def load_settings(path: Path) -> OperatorSettings:
    """Return the settings in a YAML file.

    Raises:
        SettingsError: The file cannot be read, or `parse_settings` raised the error.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_settings(text, str(path))
