"""A reflector keeps a cache as the cluster is: it lists, watches, and lists again where that is needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from rollyard_operator.kube.client import GONE, TRY_AGAIN, KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import ObjectCache, key_of, uid_of
from rollyard_operator.kube.watch import WatchError, WatchEvent

REFUSED_SECONDS = 120.0
"""A cluster that refuses a watch for this long will not take it back, so that the operator ends."""
FORBIDDEN = 403
_log = logging.getLogger(__name__)


class Watcher(Protocol):
    """What a reflector asks of a cluster. Both raise KubeError; KubeWatch does it."""

    async def snapshot(self, kind: str, namespace: str | None, selector: str) -> tuple[list[Object], str]: ...
    def watch(
        self, kind: str, namespace: str | None, selector: str, version: str
    ) -> AsyncGenerator[WatchEvent, None]: ...


class Reflector:
    """Feeds a cache with the objects of one kind, in one namespace or (None) in all of them.

    It is level-based and needs no event in particular. Where one may have been lost, a list takes its place,
    which also shows what was deleted meanwhile.

    Args:
        selector: A label selector; the empty one selects all objects.
        access: Called with the refusal when a single namespace may not be read, and with None whenever it
            was read. It may be called repeatedly with the same state.
    """

    def __init__(
        self,
        watcher: Watcher,
        kind: str,
        namespace: str | None,
        selector: str,
        cache: ObjectCache,
        access: Callable[[KubeError | None], None] = lambda refused: None,
    ) -> None:
        self._watcher = watcher
        self._kind = kind
        self._namespace = namespace
        self._selector = selector
        self._cache = cache
        self._access = access
        self.settled = asyncio.Event()
        """Set once the objects were listed, or once a single namespace has refused to list them."""
        self._version = ""
        """Where the next watch begins. It is empty where a list has to come first."""
        self._failures = 0
        """The number of watches and lists in a row that brought nothing."""
        self._trouble = ""
        self._refused_since: float | None = None

    async def run(self) -> None:
        """Keep the cache until cancelled. An API server that does not answer is waited for without an end.

        Raises:
            KubeError: The cluster has refused for REFUSED_SECONDS, for example because the custom resources
                are not installed. A lack of rights in a single namespace is no such refusal: they may
                come, and the other namespaces are looked after meanwhile.
        """
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                self._refused_since = None
            except KubeError as error:
                self._failed(error)
            # Also after one that has just ended: an API server that ends each at once is not to be hurried.
            await asyncio.sleep(TRY_AGAIN.pause(self._failures + 1))
            self._failures += 1

    async def _list(self) -> None:
        listed, version = await self._watcher.snapshot(self._kind, self._namespace, self._selector)
        self._cache.take(listed, int(version or 0), self._namespace)
        self._version = version
        self._access(None)
        self.settled.set()

    async def _watch(self) -> None:
        stream = self._watcher.watch(self._kind, self._namespace, self._selector, self._version)
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
        self._access(None)
        if self._trouble:
            self._trouble = ""
            _log.info("%s: watched again", self._where())

    def _failed(self, error: KubeError) -> None:
        if isinstance(error, WatchError) or 400 <= error.status < 500:
            self._version = ""
        if error.status == FORBIDDEN and self._namespace is not None:
            self._access(error)
            self.settled.set()
        elif (
            (self._failures or not self.settled.is_set())
            and str(error) != self._trouble
            and error.status != GONE
        ):
            # A first failure of a watch is the API server's everyday business.
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
