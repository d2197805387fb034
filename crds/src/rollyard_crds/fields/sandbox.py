"""The sandbox of a job's rollouts: its image, its limits and its network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from rollyard_crds.base import CheckedEnv, Model, cel
from rollyard_crds.fields.allowed_hosts import MAX_HOSTS, AllowedHost, HostRule
from rollyard_crds.fields.pod_template import Placement
from rollyard_crds.fields.quantity import Quantity


class SandboxResources(Model):
    """Limits of one sandbox."""

    cpu: Quantity = "1"
    """The number of cores."""
    memory: Quantity = "1Gi"
    """The memory limit of all its processes together."""
    disk: Quantity = "1Gi"
    """The size limit of its work folder and of everything else that it can write."""
    processes: Annotated[int, Field(ge=16, le=65_536)] = 512
    """The most processes and threads at once."""


HOSTS_NEED_ALLOWLIST: Final = "give 'allowedHosts' with 'network: allowlist', and only with it"
HOSTS_NEED_ALLOWLIST_RULE: Final = (
    "has(self.allowedHosts) == (has(self.network) && self.network == 'allowlist')",
    HOSTS_NEED_ALLOWLIST,
)


class SandboxSpec(Model):
    """The sandbox of every rollout; tasks may add to it."""

    model_config = ConfigDict(json_schema_extra=cel(HOSTS_NEED_ALLOWLIST_RULE))

    image: Annotated[str, Field(max_length=1024)] | None = None
    """Kubernetes: a container image, with or without `docker://`. Under bubblewrap: a root folder; nothing
    means the host's read-only system (on Kubernetes: the installation's default image)."""
    images: (
        Annotated[
            dict[
                Annotated[str, Field(min_length=1, max_length=1024)],
                Annotated[str, Field(min_length=1, max_length=1024)],
            ],
            Field(max_length=1024),
        ]
        | None
    ) = None
    """What this platform uses instead of images that tasks name, with or without `docker://`: container
    images, SIF files or root folders, by the name in the task."""
    network: Literal["none", "allowlist"] = "none"
    """`none`: no network at all. `allowlist`: HTTP and HTTPS to `allowedHosts` through a proxy, in Init and
    Run. That of Eval is `stages.eval.network`."""
    allowed_hosts: Annotated[list[AllowedHost], Field(min_length=1, max_length=MAX_HOSTS)] | None = None
    """Names such as `pypi.org`, `*.example.org` (all names below) or `example.org:8443`; without a port, 80
    and 443. The installer must allow each of them."""
    resources: SandboxResources = Field(default_factory=SandboxResources)
    """Limits of each sandbox."""
    env: Annotated[dict[str, str], Field(max_length=256), CheckedEnv] = Field(default_factory=dict)
    """Environment variables of every command."""
    warm: Annotated[int, Field(ge=0, le=1024)] = 4
    """Sandboxes that each Init worker keeps started and unclaimed; on Kubernetes, for the whole job. None
    where neither the agent nor the handler needs a sandbox before Eval.
    Bubblewrap starts one in about 10 ms, and keeps none unless its worker has `--no-sandbox-templates`."""
    template: Placement = Field(default_factory=Placement)
    """Kubernetes only: where sandbox pods may run."""

    @model_validator(mode="after")
    def _hosts_of_an_allowlist(self) -> SandboxSpec:
        if (self.allowed_hosts is not None) != (self.network == "allowlist"):
            raise ValueError(HOSTS_NEED_ALLOWLIST)
        try:
            _ = self.host_rules
        except ValueError as error:
            raise ValueError(f"'allowedHosts': {error}") from error
        return self

    @property
    def host_rules(self) -> tuple[HostRule, ...]:
        """The hosts that programs inside may reach; none with `network: none`."""
        return tuple(HostRule.parse(text) for text in self.allowed_hosts or ())

    def narrowed(self, hosts: Sequence[str] | None, field: str = "sandbox.allowedHosts") -> SandboxSpec:
        """Return these settings with the network of a task.

        Args:
            hosts: Those of `allowedHosts` that the task may reach, or None for all of them.
            field: The field of the job that lists the hosts, for the message.

        Raises:
            ValueError: The task names a host that the job does not. The message names it.
        """
        if hosts is None:
            return self
        for text in hosts:
            if not any(rule.contains(HostRule.parse(text)) for rule in self.host_rules):
                listed = ", ".join(self.allowed_hosts or ()) or "none"
                raise ValueError(f"sandbox.allowedHosts: {text} is not among the job's {field} ({listed})")
        network: Literal["none", "allowlist"] = "allowlist" if hosts else "none"
        return self.model_copy(update={"network": network, "allowed_hosts": list(hosts) or None})
