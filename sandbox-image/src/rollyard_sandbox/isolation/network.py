"""Waiting until the sandbox's network is closed: on Kubernetes a new pod may reach others for a moment.

A NetworkPolicy is applied by the cluster's network engine some time after the pod has its address, and by
none where the cluster has no such engine. So the server itself tries what must not be reachable, before it
lets anybody in.
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

NOT_ISOLATED = 78  # exit status (EX_CONFIG)
DEFAULT_SECONDS = 10.0
_TRY_SECONDS = 0.25
_PAUSE_SECONDS = 0.02
_TERMINATION_LOG = "/dev/termination-log"  # Kubernetes shows its content as the container's own last word


class ForbiddenAddress:
    """An address that must not be reachable, as IP address and port: a sandbox resolves no names."""

    __slots__ = ("address", "family", "text")

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
                f"{text!r} is no IP:PORT, such as 10.96.0.1:443 or [fd00::1]:443 (names cannot be resolved)"
            )
        self.text = text
        self.address = (host, int(port))


def wait_isolated(targets: Sequence[ForbiddenAddress], seconds: float) -> str | None:
    """Tries to connect to every target until none lets us; None then, else what is wrong after `seconds`.

    A refusal is an answer. Silence may also be a slow peer, so that it must be met twice in a row.
    """
    deadline = monotonic() + seconds
    silent_before = False
    before = signal.signal(signal.SIGTERM, _leave)  # process 1 ignores what it does not handle
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
    """Says why the server does not start, also where Kubernetes looks for it."""
    print(message, file=sys.stderr, flush=True)
    try:
        with open(_TERMINATION_LOG, "r+", encoding="utf-8") as file:  # never made: only a kubelet reads it
            file.write(message)
    except OSError:
        return


def _leave(number: int, frame: object) -> None:
    sys.exit(0)


def _try_all(targets: Sequence[ForbiddenAddress]) -> tuple[list[ForbiddenAddress], bool]:
    """Which targets accept a connection, and whether one of the others was merely silent."""
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
        while pending and (left := end - monotonic()) > 0:
            for number, _ in poll.poll(left * 1000):
                poll.unregister(number)
                sock, target = pending.pop(number)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    reached.append(target)
                sock.close()
        return reached, bool(pending)
    finally:
        for sock, _ in pending.values():
            sock.close()
