"""The kinds of objects that the operator uses, and their paths in the Kubernetes API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class KubeResource:
    """A kind of object, as the paths of the API name it."""

    api: str
    """The API version: `v1`, or a group and a version."""
    plural: str

    @property
    def root(self) -> str:
        """The path of the API version."""
        return f"/api/{self.api}" if "/" not in self.api else f"/apis/{self.api}"

    def path(self, namespace: str | None, name: str = "", sub: str = "") -> str:
        """Return the path of an object, of a subresource, or of all objects (without `name`)."""
        parts = [self.root]
        if namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, sub) if part]
        return "/".join(parts)


RESOURCES: Mapping[str, KubeResource] = {
    "Pod": KubeResource("v1", "pods"),
    "Service": KubeResource("v1", "services"),
    "ConfigMap": KubeResource("v1", "configmaps"),
    "Secret": KubeResource("v1", "secrets"),
    "Event": KubeResource("v1", "events"),
    "NetworkPolicy": KubeResource("networking.k8s.io/v1", "networkpolicies"),
    "RolloutJob": KubeResource("rollyard.dev/v1alpha1", "rolloutjobs"),
    "BackendPool": KubeResource("rollyard.dev/v1alpha1", "backendpools"),
}
OWN_KINDS = ("RolloutJob", "BackendPool")
"""The kinds that the operator reconciles. kopf watches them."""
