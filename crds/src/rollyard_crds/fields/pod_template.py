"""The parts of a pod that a spec may choose. Names, command, ports and security are the operator's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rollyard_crds.base import Model
from rollyard_crds.fields.quantity import Quantity

LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
LabelValue = Annotated[str, Field(max_length=63)]


class LocalReference(Model):
    """An object in the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Its name."""


class PodResources(Model):
    """Requests and limits, by resource name (`cpu`, `memory`, `nvidia.com/gpu`, …)."""

    requests: Annotated[dict[LabelKey, Quantity], Field(max_length=32)] = Field(default_factory=dict)
    """What the scheduler reserves."""
    limits: Annotated[dict[LabelKey, Quantity], Field(max_length=32)] = Field(default_factory=dict)
    """What the container may not exceed."""


class Placement(Model):
    """The nodes where a pod may run and the account it runs as, as in Kubernetes' PodSpec."""

    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(default_factory=dict)
    """Further labels of the pods."""
    annotations: Annotated[dict[LabelKey, Annotated[str, Field(max_length=4096)]], Field(max_length=32)] = (
        Field(default_factory=dict)
    )
    """Further annotations of the pods."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Annotated[list[dict[str, Any]], Field(max_length=32)] = Field(default_factory=list)
    """Taints that the pods tolerate."""
    affinity: dict[str, Any] = Field(default_factory=dict)
    """Node and pod affinity."""
    priority_class_name: Annotated[str, Field(max_length=253)] = ""
    """PriorityClass of the pods."""
    runtime_class_name: Annotated[str, Field(max_length=253)] = ""
    """RuntimeClass of the pods, such as `gvisor`."""
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=16)] = Field(default_factory=list)
    """Secrets of the namespace with registry credentials, in addition to those of the installation."""


class PodTemplate(Placement):
    """The parts of a stage worker's or a backend's pod that may be chosen."""

    image: Annotated[str, Field(max_length=1024)] = ""
    """Container image; default: the installation's."""
    resources: PodResources = Field(default_factory=PodResources)
    """The container's resources; default: the installation's."""
    env: Annotated[list[dict[str, Any]], Field(max_length=128)] = Field(default_factory=list)
    """Further environment variables, as in a container: `{name, value}` or `{name, valueFrom}`."""
    volumes: Annotated[list[dict[str, Any]], Field(max_length=32)] = Field(default_factory=list)
    """Further volumes, as in a pod."""
    volume_mounts: Annotated[list[dict[str, Any]], Field(max_length=32)] = Field(default_factory=list)
    """Where the volumes are mounted, as in a container."""
