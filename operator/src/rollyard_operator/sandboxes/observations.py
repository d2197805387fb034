"""Find starting sandboxes that already accept connections. A kubelet probes at most once per second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Final

from rollyard_process.backoff import Backoff

from rollyard_operator.kube import labels
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import PodCache, key_of, uid_of
from rollyard_operator.pods.observed_sandbox import ObservedSandbox
from rollyard_operator.pods.sandboxes import secret_of, token_hash
from rollyard_operator.pods.status import observed_sandbox, starting_address

CONNECT_SECONDS = 0.5
_PAUSES: Final = Backoff(first=0.01, longest=0.5, factor=1.25)
AT_ONCE = 64
"""The number of connections that are tried at the same time."""
Address = tuple[str, int]


async def connect(host: str, port: int) -> None:
    """Open a connection and close it.

    Raises:
        OSError: No process listens at that address, or it cannot be reached.
    """
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


class PortProbes:
    """Tries each port that it is given until the port has answered once.

    This can only be faster than the kubelet's probe. Where a network policy keeps the operator away from the
    pods, the result of the kubelet's probe is used alone.

    Args:
        answered: Called when a port has answered.
    """

    def __init__(
        self,
        answered: Callable[[], object],
        connect: Callable[[str, int], Awaitable[None]] = connect,
    ) -> None:
        self._on_answer = answered
        self._connect = connect
        self._addresses: dict[str, Address] = {}
        self._answered: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def has_answered(self, uid: str) -> bool:
        """Return whether the port of the pod with this uid has answered."""
        return uid in self._answered

    def want(self, addresses: Mapping[str, Address]) -> None:
        """Set the addresses to try, by uid of the pod. Ports that are not listed are not tried any more."""
        if addresses.keys() != self._addresses.keys():
            self._addresses = dict(addresses)
            self._answered &= addresses.keys()
            self._news.set()

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._news.wait()
                self._news.clear()
                for uid in self._tasks.keys() - self._addresses.keys():
                    self._tasks.pop(uid).cancel()
                for uid, address in self._addresses.items():
                    known = self._tasks.get(uid)
                    if known is None or (known.done() and uid not in self._answered):
                        self._tasks[uid] = group.create_task(self._try(uid, address), name=f"port of {uid}")

    async def _try(self, uid: str, address: Address) -> None:
        failures = 0
        while True:
            try:
                async with self._at_once, asyncio.timeout(CONNECT_SECONDS):
                    await self._connect(*address)
                break
            except (OSError, TimeoutError):
                failures += 1
                await asyncio.sleep(_PAUSES.pause(failures))
        self._answered.add(uid)
        self._on_answer()


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
        sandboxes = []
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
            sandboxes.append(sandbox)
        self._seen = seen
        self._probes.want(ports)
        self._deleted = {uid: at for uid, at in self._deleted.items() if uid in seen}
        return sandboxes

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
