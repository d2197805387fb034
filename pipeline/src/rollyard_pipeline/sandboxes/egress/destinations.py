"""The way from the name that a program asks for to the addresses that the proxy connects to.

These are public addresses that are not this machine's own.
"""

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

from rollyard_pipeline.sandboxes.egress.limits import EgressRefused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# The lists are written out, because the properties of `ipaddress` differ between releases of Python. They
# follow the registries of special-purpose addresses (RFC 6890 and its successors).
# Machines of clouds find their own metadata here. Some of these addresses are in networks below.
_METADATA: Final = {
    "a metadata service": (
        "168.63.129.16/32",
        "169.254.169.254/32",
        "100.100.100.200/32",
        "192.0.0.192/32",
        "fd00:ec2::254/128",
        "fd20:ce::254/128",
    ),
}
_REFUSED_4: Final = {
    "this network": ("0.0.0.0/8",),
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
    "shared by a carrier": ("100.64.0.0/10",),
    "loopback": ("127.0.0.0/8",),
    "link-local": ("169.254.0.0/16",),
    "reserved": (
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "240.0.0.0/4",
    ),
    "multicast": ("224.0.0.0/4",),
}
_REFUSED_6: Final = {
    "loopback": ("::1/128",),
    "an IPv4 address in another form": (
        "::/96",
        "::ffff:0:0/96",
        "::ffff:0:0:0/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2001::/32",
        "2002::/16",
    ),
    "private": ("fc00::/7", "fec0::/10"),
    "link-local": ("fe80::/10",),
    "multicast": ("ff00::/8",),
    "reserved": ("2001::/23", "2001:db8::/32", "2620:4f:8000::/48", "3fff::/20"),
}
PINNABLE: Final = frozenset({"private", "shared by a carrier", "reserved"})
"""What kind of address the installer may pin a host to, instead of a public one."""
_PUBLIC_6: Final = ipaddress.IPv6Network("2000::/3")
_NETWORKS: Final = tuple(
    (kind, ipaddress.ip_network(text))
    for table in (_METADATA, _REFUSED_4, _REFUSED_6)
    for kind, texts in table.items()
    for text in texts
)

RESOLVE_SECONDS: Final = 10.0
_KNOWN_SECONDS: Final = 30.0
_RESOLVERS: Final = 2
_MOST_ADDRESSES: Final = 32
_NEVER: Final = float("-inf")
_ABSENT: Final = (socket.EAI_NONAME, socket.EAI_NODATA)
"""The errors of a name that has no address, as opposed to one whose servers do not answer."""

Resolve = Callable[[str], Awaitable[list[Address]]]
"""Returns the addresses of a host. It raises OSError if there are none."""


def why_refused(address: Address) -> str:
    """Return what kind of address this is, or "" if it is a public one of another machine."""
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
        return "link-local"
    for kind, network in _NETWORKS:
        if address.version == network.version and address in network:
            return kind
    if isinstance(address, ipaddress.IPv6Address) and address not in _PUBLIC_6:
        return "reserved"
    return "this machine's own" if is_own(address) else ""


def is_own(address: Address) -> bool:
    """Return whether this machine itself has the address: the kernel then sends from the same one."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # A datagram socket sends nothing here.
            return bool(ipaddress.ip_address(probe.getsockname()[0]) == address)
    except OSError:
        return False  # There is no route, so a connection fails, too.


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
            raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is not a host: {error}") from error
        return list(dict.fromkeys(ipaddress.ip_address(entry[4][0]) for entry in entries))

    def close(self) -> None:
        """End the threads, without waiting for those that still resolve a name."""
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
            host: The name in the form of `allowed_hosts.host_name`, or None if it is not a DNS name.

        Raises:
            EgressRefused: The list does not contain the host and port, or an address of the host is not
                public or belongs to the infrastructure. Or the name has no address, or those of the
                installation are not known yet (reason HostUnresolved).
        """
        if host is None:
            raise _refused("only hosts with a DNS name can be reached, and no IP addresses")
        if not any(rule.covers(host, port) for rule in rules):
            raise _refused(f"{host}:{port} is not in allowedHosts")
        try:
            addresses = (await self._resolve(host))[:_MOST_ADDRESSES]
        except (OSError, TimeoutError) as error:
            raise _unresolved(f"{host} cannot be resolved") from error
        if not addresses:
            raise _unresolved(f"{host} has no address")
        for address in addresses:
            kind = self._check(address)
            if kind and not (kind in PINNABLE and self._pinned(host, port, address)):
                # The policy must not learn the address: it may be one of the inner network.
                raise _refused(
                    f"{host} has an address that is not public, or that sandboxes may not reach",
                    f"{host}:{port} has the address {address}, which is {kind}",
                )
        try:
            inside = await self._infrastructure.contains(host, addresses)
        except OSError as error:
            raise _unresolved(f"{host} cannot be checked at present") from error
        if inside:
            raise _refused(
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


def _refused(message: str, detail: str | None = None) -> EgressRefused:
    return EgressRefused(message, "DestinationRefused", 403, detail=detail)


def _unresolved(message: str) -> EgressRefused:
    return EgressRefused(message, "HostUnresolved", 502, detail="")
