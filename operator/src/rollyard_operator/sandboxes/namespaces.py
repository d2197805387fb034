"""What a namespace needs before its first sandbox: the network policy, and an owner of the warm pods.

And what it must not have: a policy that opens the network of sandboxes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from rollyard_operator.kube.client import Kube, KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import uid_of
from rollyard_operator.pods.network_policies import egress_trouble
from rollyard_operator.pods.sandboxes import warm_owner, warm_reference
from rollyard_operator.pods.workloads import network_policy
from rollyard_operator.settings import OperatorSettings

SEEN_SECONDS = 2.0
"""A list of policies is used for this long: sandboxes are made in bursts."""
FORBIDDEN = 403
AGAIN_SECONDS = 600.0
"""Applied again this long after the last time, whatever happened to it meanwhile."""
_log = logging.getLogger(__name__)


class Namespaces:
    """Applies both, once in a while; all methods raise KubeError."""

    def __init__(self, kube: Kube, settings: OperatorSettings) -> None:
        self._kube = kube
        self._settings = settings
        self._applied: dict[tuple[str, str], tuple[float, Object]] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._policies: dict[str, tuple[float, list[Object]]] = {}
        self._warned: set[str] = set()

    async def close(self, namespace: str) -> None:
        """The sandboxes' network policy stands (where it is the operator's business)."""
        if self._settings.network_policies:
            await self._ensure("NetworkPolicy", namespace, network_policy)

    async def open_to(self, namespace: str, pod: Mapping[str, str]) -> str:
        """Why a sandbox with these labels is not kept from sending, as far as policies tell; empty: it is."""
        isolation = self._settings.isolation
        if not isolation.required or isolation.policies == "ignore":
            return ""
        policies = await self._listed(namespace)
        return "" if policies is None else egress_trouble(policies, pod, self._settings.network_policies)

    async def _listed(self, namespace: str) -> list[Object] | None:
        """The namespace's policies; None where the operator has no right to list them."""
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
        """Owner reference of the namespace's warm pods."""
        owner = await self._ensure("ConfigMap", namespace, warm_owner)
        return warm_reference(owner["metadata"]["name"], uid_of(owner))

    def forget(self, namespace: str) -> None:
        """It was seen to be missing: look at it again."""
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
