"""Keeping tunnels to one sandbox ready, and serving those that programs use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from rollyard_sandbox.client.wire import SandboxTunnel
from rollyard_sandbox.errors import SandboxError

log = logging.getLogger(__name__)

_TRIES: Final = 5
_PAUSE: Final = 1.0  # seconds

OpenTunnel = Callable[[], Awaitable[SandboxTunnel]]
"""Opens a further tunnel to the sandbox."""
ServeTunnel = Callable[[SandboxTunnel], Awaitable[None]]
"""Serves a tunnel that a program uses, to the end of its connection."""


@dataclass(frozen=True, slots=True)
class TunnelLimits:
    """The bounds of one sandbox's connections for one purpose."""

    connections: int = 32
    """The number of connections at the same time. Further ones wait."""
    waiting: int = 4
    """The number of tunnels that are kept ready for programs."""
    per_second: float = 20.0
    """The number of connections in each second, on average."""
    burst: int = 64
    """The number of connections that may come at once before the average counts."""


class ConnectionPace:
    """Bounds how often something happens: `burst` times at once, and then `per_second` on average."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._step = 1.0 / per_second
        self._lead = burst * self._step
        self._next = float("-inf")

    async def turn(self) -> None:
        """Wait until it may happen again."""
        now = asyncio.get_running_loop().time()
        self._next = max(self._next, now - self._lead) + self._step
        if self._next > now:
            await asyncio.sleep(self._next - now)


@asynccontextmanager
async def lent_tunnels(
    open_tunnel: OpenTunnel, serve: ServeTunnel, limits: TunnelLimits, name: str
) -> AsyncIterator[int]:
    """Serve the programs that connect to a loopback port of a sandbox, for the time of this context.

    An exec server that ends, or takes no more tunnels, ends the serving and not the context.

    Args:
        name: What is lent to whom, for the log.

    Returns:
        The port.

    Raises:
        rollyard_sandbox.errors.SandboxError: The exec server does not answer, or refuses the first tunnel.
    """
    first = await open_tunnel()
    lending = _Lending(open_tunnel, serve, limits, name)
    task = asyncio.create_task(lending.run(first), name="sandbox-tunnels")
    try:
        yield first.port
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Lending:
    """The tunnels of one sandbox, of which a few wait for programs."""

    def __init__(self, open_tunnel: OpenTunnel, serve: ServeTunnel, limits: TunnelLimits, name: str) -> None:
        self._open = open_tunnel
        self._serve = serve
        self._name = name
        self._places = asyncio.Semaphore(limits.connections)
        self._waiting = asyncio.Semaphore(limits.waiting)
        self._pace = ConnectionPace(limits.per_second, limits.burst)

    async def run(self, first: SandboxTunnel) -> None:
        """Keep tunnels ready until the exec server takes no more, or the task is cancelled."""
        failures = 0
        async with asyncio.TaskGroup() as group:
            await self._places.acquire()
            await self._waiting.acquire()
            group.create_task(self._used(first))
            while failures < _TRIES:
                await self._places.acquire()
                await self._waiting.acquire()
                await self._pace.turn()
                try:
                    tunnel = await self._open()
                except SandboxError as error:
                    self._places.release()
                    self._waiting.release()
                    failures += error.reason != "TooManyTunnels"  # Programs give tunnels back in time.
                    if error.reason == "TunnelRefused" or failures == _TRIES:
                        log.info("%s: it ends: %s", self._name, error)
                        return
                    await asyncio.sleep(_PAUSE)
                    continue
                failures = 0
                group.create_task(self._used(tunnel))

    async def _used(self, tunnel: SandboxTunnel) -> None:
        try:
            try:
                used = await tunnel.used()
            finally:
                self._waiting.release()
            if used:
                await self._serve(tunnel)
        except Exception as error:
            # An oversight in what serves ends one connection, and not all of the sandbox.
            log.warning("%s: %s: %s", self._name, type(error).__name__, error)
        finally:
            tunnel.close()
            self._places.release()
