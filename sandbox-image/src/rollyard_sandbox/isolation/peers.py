"""The check which peers may connect: the sandbox's own commands must not reach the server over TCP."""

from __future__ import annotations

import socket


def is_loopback(address: str) -> bool:
    """Return whether this numeric IPv4 or IPv6 address means the machine itself."""
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def listens_on_loopback(listener: socket.socket) -> bool:
    """Return whether only the machine itself can connect to this TCP listener."""
    return is_loopback(listener.getsockname()[0])


def comes_from_here(connection: socket.socket) -> bool:
    """Return whether the other end of a TCP connection is in this network namespace, at whatever address."""
    try:
        peer = connection.getpeername()
    except OSError:
        return True  # The peer is gone again.
    if is_loopback(peer[0]):
        return True
    with socket.socket(connection.family, socket.SOCK_DGRAM) as probe:
        try:
            # The kernel binds to addresses of this machine only.
            probe.bind((peer[0], 0, *peer[2:]))
        except OSError:
            return False
    return True
