"""The exec server: `python -I -m rollyard_sandbox.server --listen unix:/path --workdir /work`.

The server has one thread and one event loop. It acts as the init of what runs in the sandbox: orphans become
its children, and it reaps them. SIGTERM or the end of its lease kills all processes and ends the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from rollyard_sandbox import proof
from rollyard_sandbox.errors import ConnectionLost, SandboxError
from rollyard_sandbox.execution import processes
from rollyard_sandbox.execution.event_loop import EventLoop
from rollyard_sandbox.isolation import network
from rollyard_sandbox.isolation.protections import (
    FAILED,
    NOT_CONFINED,
    Protections,
    limit_shared_resources,
)
from rollyard_sandbox.server.connection import Connection
from rollyard_sandbox.server.operations import Operations
from rollyard_sandbox.server.options import ServerOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

LEASE_ENDED: Final = 75  # The exit status when the lease was not renewed (EX_TEMPFAIL).
_MAX_CONNECTIONS: Final = 64  # The limit of connections that have greeted.
_MAX_STRANGERS: Final = 32  # The limit of connections that have not greeted yet.
_ACCEPTS_AT_ONCE: Final = 64


class ExecServer:
    """The exec server: its listening sockets, its connections and its lease."""

    def __init__(self, options: ServerOptions, protections: Protections) -> None:
        self._loop = EventLoop()
        self._options = options
        self._token = options.token
        self._token_sha256 = options.token_sha256
        self._derived_token: str | None = None
        self._strangers: dict[Connection, None] = {}
        self._connections: set[Connection] = set()
        self._listeners: list[socket.socket] = []
        self._unix_paths: list[str] = []
        self._status = 0
        self._operations = Operations(self._loop, options, protections, self._lease_ended)

    def listen(self, address: str) -> str:
        """Start to accept connections, and return the address for clients, with a TCP port 0 resolved."""
        scheme, _, rest = address.partition(":")
        if scheme == "unix" and rest:
            listener = socket.socket(socket.AF_UNIX)
            before = os.umask(0o177)
            try:
                listener.bind(rest)
            finally:
                os.umask(before)
            self._unix_paths.append(rest)
        elif scheme == "fd" and rest.isdigit():
            # Whoever started the server has bound it, because its path need not be visible in here.
            listener = socket.socket(fileno=int(rest))
            listener.set_inheritable(False)
        else:
            host, port = _split_tcp(address)
            if host == "*":
                listener = _every_address(port)
            else:
                listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, port))
            url_host = f"[{host}]" if ":" in host else host
            address = f"tcp://{url_host}:{listener.getsockname()[1]}"
        listener.setblocking(False)
        listener.listen(128)
        self._listeners.append(listener)
        guarded = listener.family != socket.AF_UNIX and not (
            self._options.allow_loopback or _is_loopback(listener.getsockname()[0])
        )
        self._loop.watch(listener.fileno(), lambda events: self._accept_all(listener, guarded))
        return address

    def run(self) -> int:
        """Serve until shutdown, SIGTERM or the end of the lease, and return the exit status."""
        self._loop.install_signals({signal.SIGTERM: self._loop.stop, signal.SIGINT: self._loop.stop})
        self._loop.reap()
        self._loop.run()
        for connection in [*self._connections, *self._strangers]:
            connection.close()
        for listener in self._listeners:
            listener.close()
        self._operations.kill_all()
        self._operations.close()
        for path in self._unix_paths:
            try:
                os.unlink(path)
            except OSError:
                continue  # Its folder has been removed already.
        return self._status

    def _lease_ended(self) -> None:
        for connection in list(self._connections):
            # Request 0 stands for the connection itself: everything that waits on it learns the reason.
            connection.refuse(0, ConnectionLost("the sandbox's lease has ended, because it was not renewed"))
        self._status = LEASE_ENDED
        self._loop.stop()

    # The methods below accept and authorize connections.

    def _accept_all(self, listener: socket.socket, guarded: bool) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # No client waits, or no descriptors are left, in which case the client will retry.
            if guarded and _comes_from_here(sock):
                sock.close()
            else:
                self._accept(sock)

    def _accept(self, sock: socket.socket) -> None:
        """Add a connection that has not greeted yet; if there are too many of these, close the oldest one.

        Such a connection never takes the place of one that has greeted.
        """
        if len(self._strangers) >= _MAX_STRANGERS:
            next(iter(self._strangers)).close()
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._strangers[Connection(self._loop, sock, self._frame, self._closed)] = None

    def _closed(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._connections.discard(connection)

    def _frame(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        if not connection.greeted:
            request = header.get("id")
            if not self._authorized(header):
                connection.refuse(
                    request if isinstance(request, int) else 0,
                    SandboxError(
                        "the first request must be hello with the server's token", reason="Unauthorized"
                    ),
                )
                connection.close_when_sent()
                return
            if len(self._connections) >= _MAX_CONNECTIONS:
                connection.close()
                return
        self._operations.handle(connection, header, body)
        if connection.greeted and connection in self._strangers:
            del self._strangers[connection]
            self._connections.add(connection)

    def _authorized(self, header: dict[str, Any]) -> bool:
        if header.get("op") != "hello":
            return False
        if self._token is None and self._token_sha256 is None:
            return True
        from hmac import compare_digest

        token = header.get("token")
        if not isinstance(token, str):
            return False
        token_bytes = token.encode("utf-8", "surrogatepass")
        if self._token_sha256 is None:
            return self._token is None or compare_digest(token_bytes, self._token.encode())
        if self._derived_token is not None and compare_digest(token_bytes, self._derived_token.encode()):
            return True
        from hashlib import sha256

        if not compare_digest(sha256(token_bytes).hexdigest(), self._token_sha256):
            return False
        if self._token is not None:
            return compare_digest(token_bytes, self._token.encode())
        self._derived_token, key = proof.derived(token)
        self._operations.prove_token(key)
        return True


def _every_address(port: int) -> socket.socket:
    """Return a socket bound to all IPv4 and IPv6 addresses, or to all IPv4 ones if the kernel has no IPv6."""
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", port))


def _split_tcp(address: str) -> tuple[str, int]:
    host, separator, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not separator or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--listen: {address!r} is none of unix:/path, tcp://host:port and fd:N")
    return host.strip("[]"), int(port)


def serve(options: ServerOptions) -> int:
    """Run a server until shutdown, SIGTERM or the end of the lease, and return the exit status."""
    if os.getpid() != 1:  # Process 1 inherits orphans anyway.
        processes.become_subreaper()
    if options.filter_calls:
        limit_shared_resources(own_users=options.namespaces is not None)
    try:
        protections = Protections(
            filter_calls=options.filter_calls, namespaces=options.namespaces, yielding=options.yielding
        )
    except OSError as error:
        print(f"{NOT_CONFINED}: {error}", file=sys.stderr)
        return FAILED
    if options.isolation_checks:
        problem = network.wait_isolated(options.isolation_checks, options.isolation_seconds)
        if problem is not None:
            network.refuse(problem)
            return network.NOT_ISOLATED
    server = ExecServer(options, protections)
    try:
        addresses = [server.listen(address) for address in options.listen]
    except (OSError, ValueError) as error:
        print(f"cannot listen: {error}", file=sys.stderr)
        return 2
    if options.ready_fd is not None:
        os.write(options.ready_fd, json.dumps({"pid": os.getpid(), "listen": addresses}).encode() + b"\n")
        os.close(options.ready_fd)
    return server.run()


# The functions below decide which peers may connect: the sandbox's commands must not reach the server by TCP.


def _is_loopback(address: str) -> bool:
    """Return whether this numeric IPv4 or IPv6 address means the machine itself."""
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def _comes_from_here(connection: socket.socket) -> bool:
    """Return whether the other end of a TCP connection is in this network namespace, at whatever address."""
    try:
        peer = connection.getpeername()
    except OSError:
        return True  # The peer is gone again.
    if _is_loopback(peer[0]):
        return True
    with socket.socket(connection.family, socket.SOCK_DGRAM) as probe:
        try:
            # The kernel binds to addresses of this machine only.
            probe.bind((peer[0], 0, *peer[2:]))
        except OSError:
            return False
    return True
