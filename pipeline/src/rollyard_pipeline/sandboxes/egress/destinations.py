"""From the name that a program asks for to the addresses that the proxy connects to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import urlsplit

from rollyard_crds.fields.allowed_hosts import HostRule

from rollyard_pipeline.errors import WorkerError
from rollyard_pipeline.sandboxes.egress.addresses import PINNABLE, Address, is_own, why_refused

RESOLVE_SECONDS: Final = 10.0
_KNOWN_SECONDS: Final = 30.0
_RESOLVERS: Final = 2
_MOST_ADDRESSES: Final = 32
_NEVER: Final = float("-inf")
_ABSENT: Final = (socket.EAI_NONAME, socket.EAI_NODATA)
"""The errors of a name that has no address, in contrast to one whose servers do not answer."""

Resolve = Callable[[str], Awaitable[list[Address]]]
"""Returns the addresses of a host. It raises OSError if there are none."""


class DestinationRefused(WorkerError):
    """The destination is not allowed. The message may be shown to the policy; `detail` is for the log."""

    reason = "DestinationRefused"

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail or message


class Unresolved(WorkerError):
    """The host has no address at present."""

    reason = "HostUnresolved"


class SystemResolver:
    """Resolves names as this machine does, in two threads at most.

    A look-up cannot be cancelled: a thread is free only when the name servers have answered or been given up.
    Each sandbox therefore has a resolver of its own, which keeps its slow names from delaying others.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="resolve")

    async def __call__(self, host: str) -> list[Address]:
        """Return the addresses of a host.

        Raises:
            OSError: It has none, or the answer takes too long.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                entries = await loop.run_in_executor(
                    self._threads, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                )
        except UnicodeError as error:
            raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no host: {error}") from error
        return list(dict.fromkeys(ipaddress.ip_address(entry[4][0]) for entry in entries))

    def close(self) -> None:
        """End the threads, without a wait for those that still resolve a name."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Infrastructure:
    """The control plane and the backends that a worker knows. No sandbox reaches their addresses.

    Args:
        urls: The installation's own URLs, whose addresses must be known before anything is reached. Those of
            backends (`add`) need not be: an author could name one that nobody can resolve.
    """

    def __init__(self, resolve: Resolve, urls: Iterable[str] = ()) -> None:
        self._resolve = resolve
        self._known: dict[str, tuple[float, frozenset[Address]]] = {}
        for url in urls:
            self.add(url)
        self._own = frozenset(self._known)

    def add(self, url: str) -> None:
        """Forbid the host of a URL from now on."""
        try:
            host = (urlsplit(url).hostname or "").removesuffix(".")
        except ValueError:
            return  # The worker cannot reach such a URL either.
        if host and host not in self._known:
            self._known[host] = (_NEVER, frozenset())

    async def contains(self, host: str, addresses: Iterable[Address]) -> bool:
        """Return whether the host, or one of its addresses, belongs to the infrastructure.

        A name of the infrastructure that cannot be resolved now keeps its last addresses.

        Raises:
            OSError: A name of the installation has never been resolved, and may yet have an address.
        """
        if host in self._known:
            return True
        candidates = set(addresses)
        for name, (when, _) in list(self._known.items()):
            if time.monotonic() - when > _KNOWN_SECONDS:
                try:
                    self._known[name] = (time.monotonic(), frozenset(await self._addresses(name)))
                except OSError as error:
                    absent = isinstance(error, socket.gaierror) and error.errno in _ABSENT
                    if name in self._own and when == _NEVER and not absent:
                        raise
                    self._known[name] = (time.monotonic(), self._known[name][1])
            if candidates & self._known[name][1]:
                return True
        return False

    async def _addresses(self, name: str) -> list[Address]:
        try:
            return [ipaddress.ip_address(name)]
        except ValueError:
            return await self._resolve(name)


class Destinations:
    """The checks between a host and port that a program asks for and the addresses that are connected to.

    Args:
        resolve: Resolves a name, once for each connection.
        infrastructure: The hosts that are refused wherever they are.
        check: Returns why an address is refused, or "".
        pins: The installer's rules that let hosts have addresses which are not public.
    """

    def __init__(
        self,
        resolve: Resolve,
        infrastructure: Infrastructure,
        check: Callable[[Address], str] = why_refused,
        pins: tuple[HostRule, ...] = (),
    ) -> None:
        self._pins = pins
        self._resolve = resolve
        self._infrastructure = infrastructure
        self._check = check

    async def addresses(self, host: str | None, port: int, rules: Iterable[HostRule]) -> list[Address]:
        """Return the addresses to connect to, all of which have been checked.

        Args:
            host: The name in the form of `allowed_hosts.host_name`, or None if it is no DNS name.

        Raises:
            DestinationRefused: The list does not contain the host and port, or an address of the host is not
                public or belongs to the infrastructure.
            Unresolved: The name has no address, or those of the installation are not known yet.
        """
        if host is None:
            raise DestinationRefused("only hosts with a DNS name can be reached, and no IP addresses")
        if not any(rule.covers(host, port) for rule in rules):
            raise DestinationRefused(f"{host}:{port} is not in allowedHosts")
        try:
            addresses = (await self._resolve(host))[:_MOST_ADDRESSES]
        except (OSError, TimeoutError) as error:
            raise Unresolved(f"{host} cannot be resolved") from error
        if not addresses:
            raise Unresolved(f"{host} has no address")
        for address in addresses:
            kind = self._check(address)
            if kind and not (kind in PINNABLE and self._pinned(host, port, address)):
                # The policy must not learn the address: it may be one of the inner network.
                raise DestinationRefused(
                    f"{host} has an address that is not public, or that sandboxes may not reach",
                    f"{host}:{port} has the address {address}, which is {kind}",
                )
        try:
            inside = await self._infrastructure.contains(host, addresses)
        except OSError as error:
            raise Unresolved(f"{host} cannot be checked at present") from error
        if inside:
            raise DestinationRefused(
                f"{host} has an address that is not public, or that sandboxes may not reach",
                f"{host}:{port} is the control plane or a backend",
            )
        return addresses

    def _pinned(self, host: str, port: int, address: Address) -> bool:
        """Return whether the installer lets the host have this address, which is not this machine's own."""
        pinned = any(
            rule.network is not None and rule.covers(host, port) and address in rule.network
            for rule in self._pins
        )
        return pinned and not is_own(address)
