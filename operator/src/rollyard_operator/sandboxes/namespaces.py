"""What a namespace needs before its first sandbox: the network policy and an owner of the warm pods.

The namespace must also not have a policy that opens the network of sandboxes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.interface import Kube
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import uid_of
from rollyard_operator.pods.network_policies import egress_trouble
from rollyard_operator.pods.sandboxes import warm_owner, warm_reference
from rollyard_operator.pods.workloads import network_policy
from rollyard_operator.settings import OperatorSettings

SEEN_SECONDS = 2.0
"""How long a list of policies is reused, in seconds. Sandboxes are made in bursts."""
FORBIDDEN = 403
AGAIN_SECONDS = 600.0
"""The policy and the owner are applied again after this many seconds, whatever happened in between."""
_log = logging.getLogger(__name__)


class Namespaces:
    """Applies the network policy and the owner of warm pods regularly. All methods raise KubeError."""

    def __init__(self, kube: Kube, settings: OperatorSettings) -> None:
        self._kube = kube
        self._settings = settings
        self._applied: dict[tuple[str, str], tuple[float, Object]] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._policies: dict[str, tuple[float, list[Object]]] = {}
        self._warned: set[str] = set()

    async def close(self, namespace: str) -> None:
        """Make sure that the network policy for sandboxes exists, if that is left to the operator."""
        if self._settings.network_policies:
            await self._ensure("NetworkPolicy", namespace, network_policy)

    async def open_to(self, namespace: str, pod: Mapping[str, str]) -> str:
        """Return why the policies do not keep a sandbox with these labels from sending.

        An empty string means that they do, or that the settings do not ask for it.
        """
        isolation = self._settings.isolation
        if not isolation.required or isolation.policies == "ignore":
            return ""
        policies = await self._listed(namespace)
        return "" if policies is None else egress_trouble(policies, pod, self._settings.network_policies)

    async def _listed(self, namespace: str) -> list[Object] | None:
        """Return the policies of the namespace, or None if the operator has no right to list them."""
        async with self._locks.setdefault(("policies", namespace), asyncio.Lock()):
            known, now = self._policies.get(namespace), asyncio.get_running_loop().time()
            if known is not None and now - known[0] < SEEN_SECONDS:
                return known[1]
            try:
                found = await self._kube.list("NetworkPolicy", namespace)
            except KubeError as error:
                if error.status != FORBIDDEN:
                    raise
                if namespace not in self._warned:
                    self._warned.add(namespace)
                    _log.warning("policies that open sandboxes are not noticed in %s: %s", namespace, error)
                return None
            self._policies[namespace] = (now, found)
            return found

    async def warm_reference(self, namespace: str) -> Object:
        """Return the owner reference for the warm pods of the namespace."""
        owner = await self._ensure("ConfigMap", namespace, warm_owner)
        return warm_reference(owner["metadata"]["name"], uid_of(owner))

    def forget(self, namespace: str) -> None:
        """Forget what was applied to the namespace. This is called when something was found missing there."""
        self._applied = {key: one for key, one in self._applied.items() if key[1] != namespace}
        self._policies.pop(namespace, None)

    async def _ensure(
        self, kind: str, namespace: str, wanted: Callable[[str, OperatorSettings], Object]
    ) -> Object:
        key = kind, namespace
        async with self._locks.setdefault(key, asyncio.Lock()):
            known, now = self._applied.get(key), asyncio.get_running_loop().time()
            if known is not None and now - known[0] < AGAIN_SECONDS:
                return known[1]
            made = await self._kube.apply(wanted(namespace, self._settings))
            self._applied[key] = (now, made)
            return made
