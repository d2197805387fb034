"""The parts of a pod that a spec may choose. Names, command, ports and security are the operator's."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from rollyard_crds.base import NAME_PATTERN, Model, cel
from rollyard_crds.fields.quantity import Quantity

LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
LabelValue = Annotated[str, Field(max_length=63)]
Text = Annotated[str, Field(max_length=4096)]
Id = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""The number of a user or a group other than root."""

OWN_CONTAINERS: Final = ("backend", "model", "worker")
"""The names of the operator's own containers."""
_OWN_NAME: Final = f"'name' must not be one of {', '.join(OWN_CONTAINERS)}, or begin with 'rollyard-'"
_TWICE: Final = "'initContainers' has two of the name"


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


class TopologySpreadConstraint(Model):
    """How evenly pods are spread over parts of the cluster, as in Kubernetes' PodSpec."""

    max_skew: Annotated[int, Field(ge=1, le=10_000)]
    """The largest difference between the numbers of pods in two parts."""
    topology_key: LabelKey
    """The label of nodes whose values are the parts, such as `topology.kubernetes.io/zone`."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """What the scheduler does with a pod that it cannot place in this way."""
    label_selector: dict[str, Any]
    """The pods of the namespace that count, such as `matchLabels: {rollyard.dev/pool: NAME}`."""
    min_domains: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """The smallest number of parts; only with `DoNotSchedule`."""


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
    scheduler_name: Annotated[str, Field(max_length=253)] = ""
    """The scheduler that places the pods; default: the installation's."""
    topology_spread_constraints: Annotated[list[TopologySpreadConstraint], Field(max_length=8)] = Field(
        default_factory=list
    )
    """How the pods are spread over nodes or zones; default: the installation's."""
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=16)] = Field(default_factory=list)
    """Secrets of the namespace with registry credentials, in addition to those of the installation."""


class PodSecurityContext(Model):
    """The user and groups of a pod's processes. All else of a pod's security is the operator's."""

    run_as_user: Id | None = None
    """User; default: 10001."""
    run_as_group: Id | None = None
    """First group; default: 10001."""
    fs_group: Id | None = None
    """The group that gets the pod's volumes, for kinds of volumes that have owners; default: 10001."""
    fs_group_change_policy: Literal["Always", "OnRootMismatch"] | None = None
    """When the files of a volume get this group; default: if its topmost folder has another one."""
    supplemental_groups: Annotated[list[Id], Field(max_length=32)] = Field(default_factory=list)
    """Further groups, such as those of a file server."""


class InitContainer(Model):
    """A container that ends before a pod's own one starts.

    It sees the volumes of the template that it mounts and a `/tmp` of its own, and none of the operator's.
    Its root is read-only, and its security is the pod's.
    """

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                f"!(self.name in {list(OWN_CONTAINERS)}) && !self.name.startsWith('rollyard-')",
                _OWN_NAME,
            )
        )
    )

    name: Annotated[str, Field(pattern=NAME_PATTERN, min_length=1, max_length=63)]
    """Its name in the pod."""
    image: Annotated[str, Field(min_length=1, max_length=1024)]
    """Container image."""
    command: Annotated[list[Text], Field(max_length=64)] = Field(default_factory=list)
    """The program with its first arguments; default: the image's."""
    args: Annotated[list[Text], Field(max_length=256)] = Field(default_factory=list)
    """Arguments; default: the image's."""
    env: Annotated[list[dict[str, Any]], Field(max_length=128)] = Field(default_factory=list)
    """Environment variables, as in a container."""
    resources: PodResources = Field(default_factory=PodResources)
    """Its resources; default: those of stage workers."""
    volume_mounts: Annotated[list[dict[str, Any]], Field(max_length=32)] = Field(default_factory=list)
    """Where volumes of the template are mounted, as in a container."""

    @model_validator(mode="after")
    def _not_our_own(self) -> InitContainer:
        if self.name in OWN_CONTAINERS or self.name.startswith("rollyard-"):
            raise ValueError(_OWN_NAME)
        return self


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
    init_containers: Annotated[
        list[InitContainer],
        Field(
            max_length=8,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = Field(default_factory=list)
    """Containers that run one after the other before the pod's own one."""
    pod_security_context: PodSecurityContext = Field(default_factory=PodSecurityContext)
    """User and groups of all containers of the pod; default: the installation's."""

    @model_validator(mode="after")
    def _distinct_init_containers(self) -> PodTemplate:
        names = [one.name for one in self.init_containers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{_TWICE} {name!r}")
        return self
