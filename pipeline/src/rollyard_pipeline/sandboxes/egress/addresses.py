"""The addresses to which the proxy of sandboxes connects: public ones that are not this machine's own."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

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
"""What an address may be that the installer pins a host to, in the place of a public one."""
_PUBLIC_6: Final = ipaddress.IPv6Network("2000::/3")
_NETWORKS: Final = tuple(
    (kind, ipaddress.ip_network(text))
    for table in (_METADATA, _REFUSED_4, _REFUSED_6)
    for kind, texts in table.items()
    for text in texts
)


def why_refused(address: Address) -> str:
    """Return what the address is in the place of a public one of another machine, or "" if it is that."""
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
