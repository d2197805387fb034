"""The settings of an operator: a YAML file in camelCase, of which every field is checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator
from rollyard_crds.base import Model, Name
from rollyard_crds.fields.pod_template import LocalReference, PodResources

from rollyard_operator.allowed import Allowed

Image = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^\S+$")]
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")


class SettingsError(ValueError):
    """The operator's settings cannot be used; the message names the field."""


def _host_port(text: str) -> str:
    match = _HOST_PORT.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT, such as 10.96.0.1:443 or [fd00::1]:443")
    return text


HostPort = Annotated[str, Field(max_length=259), AfterValidator(_host_port)]


class Images(Model):
    """Container images that the installation brings along."""

    worker: Image
    """Stage workers."""
    engine: Image
    """Backends of `engine.type: embedded`."""
    vllm: Image = "vllm/vllm-openai:v0.32.0"
    """Backends of `engine.type: vllm`."""
    sandbox: Image
    """Holds the exec server's folder, mounted at /.rollyard into every sandbox."""
    sandbox_default: Image
    """Sandboxes of jobs and tasks that name no image."""


class Isolation(Model):
    """What a sandbox must not be able to reach before it is handed out."""

    required: bool = True
    """False: sandboxes are handed out unchecked (a cluster without a NetworkPolicy engine, at your risk)."""
    checks: Annotated[list[HostPort], Field(max_length=16)] = Field(default_factory=list)
    """Addresses that answer from an unrestricted pod. Names are resolved by the operator. Empty: the API
    server, the control plane, the cluster's DNS and the metadata address of clouds."""
    external: Annotated[list[HostPort], Field(max_length=16)] = Field(default_factory=list)
    """Further ones outside of the cluster's own networks. The operator says so where none of them answers."""
    policies: Literal["refuse", "ignore"] = "refuse"
    """What becomes of sandboxes that a NetworkPolicy of their namespace permits to send."""
    seconds: Annotated[float, Field(gt=0, le=300)] = 10.0
    """After which a sandbox that still reaches one of them gives up."""


class SandboxCreation(Model):
    """Token bucket over the creation of sandbox pods, all namespaces together."""

    per_second: Annotated[float, Field(gt=0, le=10_000)] = 10.0
    """Pods a second, in the long run."""
    burst: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Pods at once after a quiet time."""


class ContainerDefaults(Model):
    """What containers get whose template says nothing."""

    resources: PodResources = Field(default_factory=PodResources)
    """Requests and limits; a template that names a resource wins over the one named here."""


class SandboxDefaults(Model):
    """How sandbox pods are made; their size comes with the claim."""

    cpu_request_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of a sandbox's `cpu` that the scheduler sets aside: sandboxes mostly wait for the model."""
    memory_request_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a sandbox's `memory` that the scheduler sets aside."""
    run_as_user: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1000
    """User and group id of everything in a sandbox."""
    termination_grace_seconds: Annotated[int, Field(ge=0, le=60)] = 1
    """Between SIGTERM and SIGKILL of a sandbox that nobody needs any more."""


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
    """Name of this installation; on every child as label `rollyard.dev/instance`."""
    control_plane_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=2048)]
    """As the operator and the stage workers reach it."""
    control_plane_ca_file: Path | None = None
    """CA certificates (PEM) of the control plane, where the system's do not do. The operator hands it on to
    the workers as key `ca.crt` of their job's Secret."""
    token_file: Path
    """File with the control plane's token of the role `driver`."""
    worker_token_file: Path
    """File with the control plane's token of the role `worker`, from which those of jobs are derived. It is
    read again, so that the token may change."""
    worker_token_secret: Annotated[str, Field(min_length=1, max_length=253)] = "rollyard-worker"
    """Secret with that token that earlier versions put into each job's namespace; it is removed."""
    release_namespace: Name
    """Where the operator and the control plane run."""
    namespaces: Annotated[list[Name], Field(max_length=256)] = Field(default_factory=list)
    """Namespaces that it looks after; empty: all."""
    allow: Allowed = Field(default_factory=Allowed)
    """What templates of jobs and pools may hold beside what is always permitted."""
    reserved_secrets: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    """Secrets of the release's namespace that no template may name, whatever `allow` says."""
    reserved_claims: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    """PersistentVolumeClaims of the release's namespace that no template may name."""
    images: Images
    """Container images."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the images above are pulled; a job's own are pulled IfNotPresent, or never if this says Never."""
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=16)] = Field(default_factory=list)
    """Secrets with registry credentials, in every namespace with children."""
    image_volume: Literal["auto", "always", "never"] = "auto"
    """The exec server's folder comes as an image volume, or is copied by an init container. `auto`: as an
    image volume from Kubernetes 1.35 on, where they are on by default."""
    isolation: Isolation = Field(default_factory=Isolation)
    """The check of a sandbox's network isolation."""
    network_policies: bool = True
    """The operator keeps a NetworkPolicy for the sandboxes in every namespace with some. False: you do."""
    sandbox_creation: SandboxCreation = Field(default_factory=SandboxCreation)
    """How fast sandbox pods are made."""
    worker: ContainerDefaults = Field(default_factory=_worker_resources)
    """Stage workers."""
    engine: ContainerDefaults = Field(default_factory=_engine_resources)
    """Backends of `engine.type: embedded`; those of vLLM have what their pool says, and no limit besides."""
    sandbox: SandboxDefaults = Field(default_factory=SandboxDefaults)
    """Sandboxes."""
    unschedulable_seconds: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """A sandbox pod that no node takes for this long fails its claim. Pods held back by a scheduling gate
    (Kueue) wait for as long as it takes."""
    image_pull_seconds: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    """A sandbox pod whose image cannot be pulled for this long fails its claim; an image that can never be
    pulled (a malformed name, or absent with `Never`) fails it at once."""
    cluster_domain: Annotated[str, Field(min_length=1, max_length=253)] = "cluster.local"
    """DNS domain of the cluster."""
    api_server_version: Annotated[str, Field(pattern=r"^([0-9]+\.[0-9]+)?$", max_length=16)] = ""
    """`major.minor` of the cluster, as the operator finds it at its start; empty: unknown."""

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
        """Whether the objects of a namespace are this operator's."""
        return not self.namespaces or namespace in self.namespaces


def parse_settings(text: str, source: str = "settings") -> OperatorSettings:
    """Settings from YAML text.

    Raises:
        SettingsError: no YAML, or a field is missing, unknown or wrong; names `source` and each field.
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
    """Settings from a YAML file.

    Raises:
        SettingsError: as `parse_settings`, or the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_settings(text, str(path))
