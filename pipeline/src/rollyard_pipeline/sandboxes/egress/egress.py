"""Lending sandboxes a network: tunnels to their exec servers, with a proxy at the worker's end of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from rollyard_crds.fields.allowed_hosts import HostRule
from rollyard_crds.rolloutjob import SandboxSpec
from rollyard_sandbox.client.wire import SandboxTunnel

from rollyard_pipeline.sandboxes.egress.destinations import (
    Address,
    Destinations,
    Infrastructure,
    Resolve,
    SystemResolver,
    why_refused,
)
from rollyard_pipeline.sandboxes.egress.limits import EgressLimits, Meter
from rollyard_pipeline.sandboxes.egress.proxy import EgressProxy, Stream
from rollyard_pipeline.sandboxes.errors import SandboxImpossible
from rollyard_pipeline.sandboxes.interface import Sandbox
from rollyard_pipeline.sandboxes.tunnels import lent_tunnels

PROXY_VARIABLES: Final = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
NO_PROXY_VARIABLES: Final = ("no_proxy", "NO_PROXY")
_NO_PROXY: Final = "localhost,127.0.0.1,::1"
_UNISOLATED: Final = ("process",)
_CLOSING_SECONDS: Final = 5.0
"""The time in which an answer that has been sent can still be read before its connection is cut."""


def proxy_variables(port: int, author: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that lead programs to the proxy, without those that the author has set."""
    variables = dict.fromkeys(PROXY_VARIABLES, f"http://127.0.0.1:{port}")
    variables |= dict.fromkeys(NO_PROXY_VARIABLES, _NO_PROXY)
    return {name: value for name, value in variables.items() if name not in author}


class Egress:
    """What all sandboxes of one worker share: the hosts of the installation, and bounds.

    Args:
        forbidden: URLs of the installation itself, whose hosts no sandbox reaches.
        resolve: Resolves all names. By default this is done as this machine does it, for each sandbox apart.
        check: Returns why an address is refused, or "". By default public addresses are permitted.
    """

    def __init__(
        self,
        forbidden: Iterable[str] = (),
        limits: EgressLimits | None = None,
        resolve: Resolve | None = None,
        check: Callable[[Address], str] = why_refused,
    ) -> None:
        self.limits = limits or EgressLimits()
        """The bounds of each sandbox."""
        self._resolver = SystemResolver()
        self._resolve = resolve
        self._check = check
        self.infrastructure = Infrastructure(resolve or self._resolver, forbidden)
        """The hosts that no sandbox reaches."""
        self._served = 0

    def close(self) -> None:
        """End the threads that resolve the names of the installation."""
        self._resolver.close()

    @asynccontextmanager
    async def lent(
        self,
        sandbox: Sandbox,
        spec: SandboxSpec,
        name: str,
        author: Mapping[str, str],
        pins: tuple[HostRule, ...] = (),
    ) -> AsyncIterator[Mapping[str, str]]:
        """Lend a sandbox the network that its job asks for, for the time of this context.

        With `network: none` this does nothing.

        Args:
            name: The rollout, for the log.
            author: The variables of the job and the task, which stay as they are.
            pins: The installer's rules that let hosts have addresses which are not public.

        Returns:
            The variables that lead programs to the network, which the sandbox's own commands get, too.

        Raises:
            SandboxImpossible: Sandboxes of this kind already share the network of their machine, so a list
                of hosts could not be enforced.
            rollyard_sandbox.errors.SandboxError: The exec server does not answer.
        """
        rules = spec.host_rules
        if not rules:
            yield {}
            return
        kind = sandbox.handle.provider
        if kind in _UNISOLATED:
            raise SandboxImpossible(
                f"network: allowlist: sandboxes of kind '{kind}' have the network of their machine, "
                "so allowedHosts could not be enforced; use another kind, such as bubblewrap",
                "NetworkImpossible",
            )
        resolver = SystemResolver()
        connections = _Connections(self, self.proxy(rules, name, self._resolve or resolver, pins))
        open_tunnel, label = sandbox.client.tunnel, f"network of {name}"
        try:
            async with lent_tunnels(open_tunnel, connections.serve, self.limits, label) as port:
                variables = proxy_variables(port, author)
                await sandbox.client.set_env(variables)
                yield variables
        finally:
            resolver.close()

    def proxy(
        self, rules: tuple[HostRule, ...], name: str, resolve: Resolve, pins: tuple[HostRule, ...] = ()
    ) -> EgressProxy:
        """Return a proxy for one sandbox."""
        destinations = Destinations(resolve, self.infrastructure, self._check, pins)
        return EgressProxy(rules, destinations, Meter(name, self.limits), self.limits)

    def begin(self, own: int) -> bool:
        """Count a connection that begins. The result is False if the worker serves too many.

        Args:
            own: The number of connections of the same sandbox that are served.
        """
        if own >= self.limits.reserved and self._served >= self.limits.worker_connections:
            return False
        self._served += 1
        return True

    def end(self) -> None:
        """Count a connection that has ended."""
        self._served -= 1


class _Connections:
    """The connections of one sandbox to its proxy."""

    def __init__(self, egress: Egress, proxy: EgressProxy) -> None:
        self._egress = egress
        self._proxy = proxy
        self._served = 0

    async def serve(self, tunnel: SandboxTunnel) -> None:
        """Serve one connection, unless the worker serves too many."""
        if not self._egress.begin(self._served):
            return
        self._served += 1
        try:
            await self._proxy.serve(Stream(tunnel.reader, tunnel.writer))
            await _flushed(tunnel)
        finally:
            self._served -= 1
            self._egress.end()


async def _flushed(tunnel: SandboxTunnel) -> None:
    """End the answer, and wait a moment for the program to take it and to close its own end."""
    try:
        tunnel.writer.write_eof()
        async with asyncio.timeout(_CLOSING_SECONDS):
            while await tunnel.reader.read(4096):
                continue
    except (OSError, TimeoutError):
        return
