"""Listening sockets of the control plane."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from rollyard_api.core.problems import ControlPlaneError


class NoSocket(ControlPlaneError):
    """An address cannot be listened on. The message says why."""

    reason = "AddressUnavailable"


def listening_socket(host: str, port: int, option: str) -> socket.socket:
    """Return a listening socket; `option` is what chooses another port.

    A host that begins with a slash is the path of a Unix socket.

    Raises:
        NoSocket: The address is not available.
    """
    try:
        if host.startswith("/"):
            return _unix_socket(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _bound(made, (host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"is in use: stop what listens there, or choose another with {option} (0: any free one)"
        else:
            why = f"cannot be listened on: {error.strerror}"
        where = host if host.startswith("/") else f"port {port} on {host}"
        raise NoSocket(f"{where} {why}") from error


def _bound(made: socket.socket, address: tuple[str, int] | str) -> socket.socket:
    try:
        made.bind(address)
        if isinstance(address, str):
            os.chmod(address, 0o600)
        made.listen(1024)
    except OSError:
        made.close()
        raise
    return made


def write_port(path: Path, sock: socket.socket) -> None:
    """Write the port on which a socket listens, which is 0 for a Unix socket, to a file.

    The file appears as a whole.
    """
    port = 0 if sock.family == socket.AF_UNIX else sock.getsockname()[1]
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(f"{port}\n")
    scratch.replace(path)


def cut_off_stalled(sock: socket.socket, seconds: int) -> None:
    """Let the kernel close connections whose client accepts no data for `seconds`."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # This exists on Linux only; accepted connections inherit it.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


def _unix_socket(path: str) -> socket.socket:
    """Return a Unix socket that only this user can access, in place of one that no process uses.

    Raises:
        OSError: The path is not available.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            Path(path).unlink(missing_ok=True)
        else:
            raise OSError(errno.EADDRINUSE, "another process listens there")
    return _bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path)
