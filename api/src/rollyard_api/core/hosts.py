"""Names and addresses of hosts, and the Host headers that a listener accepts. This module is pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
"""The form of a host's DNS name."""
MAX_HOST: Final = 253
"""The largest number of characters of such a name."""

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def address_of(host: str) -> _Address | None:
    """Return a host, with or without brackets, as an IP address, or None for a name."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


class HostCheck:
    """The Host headers that a listener accepts, so that no web page reaches it under a name of its own.

    A name that an attacker's page resolves to this machine (DNS rebinding) is in no list. An IP address as
    the host cannot be rebound, but on a loopback listener only loopback addresses make sense.

    Args:
        bound: The address that the listener is bound to.
        names: Further names.
    """

    def __init__(self, bound: str, names: Sequence[str]) -> None:
        own = address_of(bound)
        self._any_address = own is not None and not own.is_loopback
        self._names = {"localhost", bound.lower(), *(name.lower() for name in names)}

    def __call__(self, header: str) -> bool:
        """Return whether a Host header, which may end in a port, names this listener."""
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?", header)
        if match is None:
            return False
        host = match[1].lower()
        address = address_of(host)
        if address is not None:
            return self._any_address or address.is_loopback
        return host.removesuffix(".") in self._names
