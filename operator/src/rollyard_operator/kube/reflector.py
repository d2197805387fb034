"""Reflectors keep a cache in line with the cluster. They list, watch, and list again when necessary.

There are many pods, so they have a full reflector. kopf watches RolloutJobs and BackendPools, which are only
listed here.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from rollyard_operator.kube.client import GONE, TRY_AGAIN, KubeClient, WatchError
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.object_cache import ObjectCache, key_of, uid_of

REFUSED_SECONDS = 120.0
"""A cluster that refuses a watch for this many seconds will not accept it later, and the operator ends."""
LIST_SECONDS = 55.0
"""The time between two lists of a kind that kopf watches, in seconds: with the pauses, less than a minute."""
FORBIDDEN = 403
_log = logging.getLogger(__name__)


class NamespaceAccess:
    """Collects what the reflectors of each namespace may read.

    The contents of a `denied` namespace are unknown. An object that is missing in the caches may exist there.
    """

    def __init__(self) -> None:
        self._refused: dict[str, set[str]] = {}

    @property
    def denied(self) -> frozenset[str]:
        """The namespaces in which at least one kind of object may not be read."""
        return frozenset(self._refused)

    def refuse(self, namespace: str, kind: str, error: KubeError) -> None:
        """Note that objects of a kind may not be read."""
        if namespace not in self._refused:
            _log.warning("namespace %s is left alone until it may be read: %s", namespace, error)
        self._refused.setdefault(namespace, set()).add(kind)

    def permit(self, namespace: str | None, kind: str) -> None:
        """Note that objects of a kind were read."""
        kinds = self._refused.get(namespace or "", set())
        if kind in kinds:
            kinds.discard(kind)
            if not kinds:
                del self._refused[namespace or ""]
                _log.info("namespace %s may be read again", namespace)


class Reflector:
    """Feeds a cache with the objects of one kind, in one namespace or (None) in all of them.

    It is level-based and does not depend on any single event. If an event may have been lost, a new list
    replaces it and also shows which objects were deleted in the meantime.

    Args:
        selector: A label selector. An empty selector selects all objects.
        access: Learns whether a single namespace may be read.
    """

    def __init__(
        self,
        kube: KubeClient,
        kind: str,
        namespace: str | None,
        selector: str,
        cache: ObjectCache,
        access: NamespaceAccess | None = None,
    ) -> None:
        self._kube = kube
        self._kind = kind
        self._namespace = namespace
        self._selector = selector
        self._cache = cache
        self._access = access or NamespaceAccess()
        self.settled = asyncio.Event()
        """Set once the objects were listed, or once a single namespace has refused to list them."""
        self.readable = False
        """Whether the objects were listed, and no single namespace has refused it since."""
        self._version = ""
        """The resource version from which the next watch starts. If it is empty, a list comes first."""
        self._failures = 0
        """The number of consecutive watches and lists that returned nothing."""
        self._trouble = ""
        self._refused_since: float | None = None

    async def run(self) -> None:
        """Keep the cache until cancelled. The wait for an API server that does not answer has no limit.

        Raises:
            KubeError: The cluster has refused for REFUSED_SECONDS, for example because the custom resources
                are not installed. Missing rights in a single namespace do not count: they may be granted
                later, and the operator serves the other namespaces until then.
        """
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                self._refused_since = None
            except KubeError as error:
                self._failed(error)
            # The pause also follows a watch that ended normally, because the API server may end each watch at
            # once.
            await asyncio.sleep(TRY_AGAIN.pause(self._failures + 1))
            self._failures += 1

    async def _list(self) -> None:
        listed, version = await self._kube.snapshot(self._kind, self._namespace, self._selector)
        self._cache.take(listed, int(version or 0), self._namespace)
        self._version = version
        self._access.permit(self._namespace, self._kind)
        self.readable = True
        self.settled.set()

    async def _watch(self) -> None:
        stream = self._kube.watch(self._kind, self._namespace, self._selector, self._version)
        async with aclosing(stream) as events:
            async for event in events:
                if event.type == "DELETED":
                    self._cache.remove(key_of(event.object), uid_of(event.object))
                elif event.type in ("ADDED", "MODIFIED"):
                    self._cache.put(event.object)
                self._version = event.object["metadata"]["resourceVersion"]
                self._progressed()

    def _progressed(self) -> None:
        self._failures, self._refused_since = 0, None
        self._access.permit(self._namespace, self._kind)
        if self._trouble:
            self._trouble = ""
            _log.info("%s: watched again", self._where())

    def _failed(self, error: KubeError) -> None:
        if isinstance(error, WatchError) or 400 <= error.status < 500:
            self._version = ""
        if error.status == FORBIDDEN and self._namespace is not None:
            self._access.refuse(self._namespace, self._kind, error)
            self.readable = False
            self.settled.set()
        elif (
            (self._failures or not self.settled.is_set())
            and str(error) != self._trouble
            and error.status != GONE
        ):
            # The first failure of a watch is normal for an API server and is not logged.
            self._trouble = str(error)
            _log.warning("%s: %s", self._where(), error)
        if not self._is_refusal(error):
            self._refused_since = None
            return
        now = asyncio.get_running_loop().time()
        self._refused_since = now if self._refused_since is None else self._refused_since
        if now - self._refused_since > REFUSED_SECONDS:
            raise error

    def _is_refusal(self, error: KubeError) -> bool:
        if error.status == FORBIDDEN:
            return self._namespace is None
        return 400 <= error.status < 500 and error.status not in (408, 410, 429)

    def _where(self) -> str:
        return f"watch of {self._kind}s in {self._namespace or 'all namespaces'}"


class Lister(Reflector):
    """Lists a kind that kopf watches, for what a watch does not show: above all what was deleted while it was
    broken.
    """

    def __init__(
        self,
        kube: KubeClient,
        kind: str,
        namespace: str | None,
        cache: ObjectCache,
        access: NamespaceAccess,
    ) -> None:
        super().__init__(kube, kind, namespace, "", cache, access)
        self._due = asyncio.Event()

    def look(self) -> None:
        """List at once, because a watch was broken."""
        self._due.set()

    async def _watch(self) -> None:
        self._progressed()
        try:
            async with asyncio.timeout(LIST_SECONDS):
                await self._due.wait()
        except TimeoutError:
            pass
        self._due.clear()
        self._version = ""
