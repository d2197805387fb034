"""Waiting until the sandbox's network is closed, because a new pod on Kubernetes may reach others at first.

The cluster's network engine applies a NetworkPolicy some time after the pod has its address, and a cluster
without such an engine never applies it. Therefore the server itself tries to reach what must be out of reach
before it accepts clients.
"""

from __future__ import annotations

import select
import signal
import socket
import sys
from errno import EINPROGRESS
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

NOT_ISOLATED: Final = 78  # The exit status of a server that is not isolated (EX_CONFIG).
DEFAULT_SECONDS: Final = 10.0
_TRY_SECONDS: Final = 0.25
_PAUSE_SECONDS: Final = 0.02
_TERMINATION_LOG: Final = "/dev/termination-log"
"""The file whose content Kubernetes shows as the container's last message."""


class ForbiddenAddress:
    """An address that must not be reachable, as IP address and port, because a sandbox resolves no names."""

    def __init__(self, text: str) -> None:
        host, separator, port = text.rpartition(":")
        host = host.strip("[]")
        self.family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.inet_pton(self.family, host)
        except OSError:
            host = ""
        if not (separator and host and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(
                f"{text!r} is not IP:PORT, such as 10.96.0.1:443 or [fd00::1]:443 (names cannot be resolved)"
            )
        self.text = text
        self.address = (host, int(port))


def wait_isolated(targets: Sequence[ForbiddenAddress], seconds: float) -> str | None:
    """Try to connect to every target until none accepts a connection.

    A refusal is an answer. Silence may also come from a slow peer, and must therefore occur twice in a row.

    Returns:
        None when no target accepts a connection, or a message if one still does after `seconds`.
    """
    deadline = monotonic() + seconds
    silent_before = False
    before = signal.signal(signal.SIGTERM, _leave)  # Process 1 ignores signals that it does not handle.
    try:
        while True:
            open_ones, silent = _try_all(targets)
            if not open_ones and (not silent or silent_before):
                return None
            silent_before = silent and not open_ones
            if monotonic() >= deadline:
                break
            sleep(_PAUSE_SECONDS)
    finally:
        signal.signal(signal.SIGTERM, before)
    shown = ", ".join(target.text for target in open_ones) or "a target that answers now and then"
    return (
        f"NotIsolated: after {seconds:g} s this sandbox still reaches {shown}; does the cluster's network "
        "engine enforce NetworkPolicy, and is there one for sandboxes in this namespace?"
    )


def refuse(message: str) -> None:
    """Report why the server does not start, on standard error and where Kubernetes looks for it."""
    print(message, file=sys.stderr, flush=True)
    try:
        # The file is never created, because only a kubelet reads it.
        with open(_TERMINATION_LOG, "r+", encoding="utf-8") as file:
            file.write(message)
    except OSError:
        return


def _leave(number: int, frame: object) -> None:
    sys.exit(0)


def _try_all(targets: Sequence[ForbiddenAddress]) -> tuple[list[ForbiddenAddress], bool]:
    """Return the targets that accept a connection, and whether one of the others was merely silent."""
    pending: dict[int, tuple[socket.socket, ForbiddenAddress]] = {}
    reached: list[ForbiddenAddress] = []
    poll = select.poll()
    try:
        for target in targets:
            sock = socket.socket(target.family, socket.SOCK_STREAM)
            sock.setblocking(False)
            code = sock.connect_ex(target.address)
            if code == EINPROGRESS:
                pending[sock.fileno()] = (sock, target)
                poll.register(sock, select.POLLOUT)
            else:
                sock.close()
                if code == 0:
                    reached.append(target)
        end = monotonic() + _TRY_SECONDS
        while pending and (seconds := end - monotonic()) > 0:
            for number, _ in poll.poll(seconds * 1000):
                poll.unregister(number)
                sock, target = pending.pop(number)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    reached.append(target)
                sock.close()
        return reached, bool(pending)
    finally:
        for sock, _ in pending.values():
            sock.close()
