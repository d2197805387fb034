"""What a namespace needs before its first sandbox: the network policy, and an owner of the warm pods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollyard_operator.kube import Kube
from rollyard_operator.labels import Object
from rollyard_operator.objectcache import uid_of
from rollyard_operator.pods import network_policy
from rollyard_operator.sandboxpods import warm_owner, warm_reference
from rollyard_operator.settings import OperatorSettings

AGAIN_SECONDS = 600.0
"""Applied again this long after the last time, whatever happened to it meanwhile."""


class Namespaces:
    """Applies both, once in a while; all methods raise KubeError."""

    def __init__(self, kube: Kube, settings: OperatorSettings) -> None:
        self._kube = kube
        self._settings = settings
        self._applied: dict[tuple[str, str], tuple[float, Object]] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    async def close(self, namespace: str) -> None:
        """The sandboxes' network policy stands (where it is the operator's business)."""
        if self._settings.network_policies:
            await self._ensure("NetworkPolicy", namespace, network_policy)

    async def warm_reference(self, namespace: str) -> Object:
        """Owner reference of the namespace's warm pods."""
        owner = await self._ensure("ConfigMap", namespace, warm_owner)
        return warm_reference(owner["metadata"]["name"], uid_of(owner))

    def forget(self, namespace: str) -> None:
        """It was seen to be missing: look at it again."""
        self._applied = {key: one for key, one in self._applied.items() if key[1] != namespace}

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
