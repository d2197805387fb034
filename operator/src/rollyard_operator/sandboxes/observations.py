"""The sandbox pods as the planner sees them: what the cluster shows, and what the operator has just done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime

from rollyard_operator.kube import labels
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import PodCache, key_of, uid_of
from rollyard_operator.pods.observed_sandbox import ObservedSandbox
from rollyard_operator.pods.sandboxes import secret_of, token_hash
from rollyard_operator.pods.status import observed_sandbox, starting_address
from rollyard_operator.sandboxes.port_probes import Address, PortProbes


class SandboxObservations:
    """Reads the sandbox pods of the cache. A pod that has not changed is read once.

    Args:
        key: The secrets of sandboxes are derived from it.
        not_isolated: Called with the namespace of a pod whose network isolation does not hold.
    """

    def __init__(
        self, pods: PodCache, probes: PortProbes, key: str, not_isolated: Callable[[str], object]
    ) -> None:
        self._pods = pods
        self._probes = probes
        self._key = key
        self._not_isolated = not_isolated
        self._seen: dict[str, tuple[str, ObservedSandbox]] = {}
        self._deleted: dict[str, datetime] = {}

    @property
    def last(self) -> Iterable[ObservedSandbox]:
        """The sandboxes that the last look found."""
        return (seen for _, seen in self._seen.values())

    def look(self) -> list[ObservedSandbox]:
        """Return all sandboxes, and probe the ports of those that start."""
        found = []
        seen: dict[str, tuple[str, ObservedSandbox]] = {}
        ports: dict[str, Address] = {}
        for pod in self._pods.pods(component="sandbox"):
            uid, version = uid_of(pod), str(pod["metadata"].get("resourceVersion"))
            known = self._seen.get(uid)
            if known is None or known[0] != version:
                known = (version, self.read(pod))
                trouble = known[1].trouble
                if trouble is not None and trouble.reason == "NotIsolated":
                    self._not_isolated(known[1].namespace)
            seen[uid] = known
            sandbox = known[1]
            if sandbox.state == "starting" and (port := starting_address(pod)) is not None:
                ports[uid] = port
                if self._probes.has_answered(uid):
                    # The exec server listens only after its isolation checks passed, so a pod that accepts
                    # connections is ready.
                    sandbox = replace(sandbox, state="ready", trouble=None)
            deleted_at = self._deleted.get(uid)
            if deleted_at is not None and sandbox.state != "stopping":
                sandbox = replace(sandbox, state="stopping", gone_due=deleted_at)
            found.append(sandbox)
        self._seen = seen
        self._probes.want(ports)
        self._deleted = {uid: at for uid, at in self._deleted.items() if uid in seen}
        return found

    def read(self, pod: Object) -> ObservedSandbox:
        """Return the sandbox in a pod, as the pod itself shows it."""
        return observed_sandbox(pod, token_hash(self.secret(pod)))

    def secret(self, pod: Object) -> str:
        """Return the secret of the sandbox in a pod."""
        namespace, name = key_of(pod)
        return secret_of(self._key, namespace, name, labels.annotation_of(pod, labels.NONCE))

    def deleted(self, uid: str, gone_due: datetime) -> None:
        """Store that a pod was deleted and is due to be gone, before the cluster shows it."""
        self._deleted[uid] = gone_due
