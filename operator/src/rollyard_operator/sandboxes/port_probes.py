"""Find starting sandboxes that already accept connections. A kubelet probes at most once per second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

from rollyard_process.backoff import Backoff

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
        self._tell = answered
        self._connect = connect
        self._wanted: dict[str, Address] = {}
        self._answered: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._places = asyncio.Semaphore(AT_ONCE)

    def has_answered(self, uid: str) -> bool:
        """Return whether the port of the pod with this uid has answered."""
        return uid in self._answered

    def want(self, addresses: Mapping[str, Address]) -> None:
        """Set the addresses to try, by uid of the pod. Ports that are not listed are not tried any more."""
        if addresses.keys() != self._wanted.keys():
            self._wanted = dict(addresses)
            self._answered &= addresses.keys()
            self._news.set()

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._news.wait()
                self._news.clear()
                for uid in self._tasks.keys() - self._wanted.keys():
                    self._tasks.pop(uid).cancel()
                for uid, address in self._wanted.items():
                    known = self._tasks.get(uid)
                    if known is None or (known.done() and uid not in self._answered):
                        self._tasks[uid] = group.create_task(self._try(uid, address), name=f"port of {uid}")

    async def _try(self, uid: str, address: Address) -> None:
        failures = 0
        while True:
            try:
                async with self._places, asyncio.timeout(CONNECT_SECONDS):
                    await self._connect(*address)
                break
            except (OSError, TimeoutError):
                failures += 1
                await asyncio.sleep(_PAUSES.pause(failures))
        self._answered.add(uid)
        self._tell()
