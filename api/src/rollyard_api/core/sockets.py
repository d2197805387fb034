"""Listening sockets of the control plane."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from rollyard_api.core.errors import OptionInvalid


def listening_socket(host: str, port: int, option: str) -> socket.socket:
    """Return a listening socket; `option` is the option that chooses another port.

    A host that begins with a slash is the path of a Unix socket, which only this user can access.

    Raises:
        OptionInvalid: The address is not available.
    """
    is_path = host.startswith("/")
    family = socket.AF_UNIX if is_path else socket.AF_INET6 if ":" in host else socket.AF_INET
    listener: socket.socket | None = None
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
        if is_path:
            _remove_unused(host)
            listener.bind(host)
            os.chmod(host, 0o600)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            why = f"is in use: stop what listens there, or choose another with {option} (0: any free one)"
        else:
            why = f"cannot be listened on: {error.strerror}"
        where = host if is_path else f"port {port} on {host}"
        raise OptionInvalid(f"{where} {why}", reason="AddressUnavailable") from error
    return listener


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


def _remove_unused(path: str) -> None:
    """Remove a Unix socket on which no process listens.

    Raises:
        OSError: A process listens there, or the path cannot be used.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            Path(path).unlink(missing_ok=True)
        else:
            raise OSError(errno.EADDRINUSE, "another process listens there")
