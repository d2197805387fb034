"""The exec server: `python -I -m rollyard_sandbox.server --listen unix:/path --workdir /work`.

One thread, one event loop. It is the init of what runs in the sandbox: orphans become its children and are
reaped, SIGTERM or the end of its lease kills all of them and ends it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from time import monotonic

from rollyard_sandbox import isolation, peers, processes, proof
from rollyard_sandbox.connection import Connection
from rollyard_sandbox.errors import Unauthorized
from rollyard_sandbox.eventloop import EventLoop
from rollyard_sandbox.operations import Operations
from rollyard_sandbox.walls import FAILED, NOT_CONFINED, Walls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

    from rollyard_sandbox.border import Inside
    from rollyard_sandbox.eventloop import Timer

LEASE_ENDED = 75  # exit status when the lease was not renewed (EX_TEMPFAIL)
MAX_SESSIONS = 64
MAX_OUTPUT = 16 * 1024 * 1024
_MAX_CONNECTIONS = 64  # that have greeted
_MAX_STRANGERS = 32  # that have not
_ACCEPTS_AT_ONCE = 64


class Options:
    """What the command line can say; `main` parses and checks one, `serve` takes it as it is.

    Args:
        listen: addresses, see `Server.listen`.
        workdir: where sessions start.
        lease: seconds after which the server kills everything and ends when nobody renews; None: never.
        token: what clients must show; None: nothing. TCP needs one, or its hash.
        token_sha256: the SHA-256 of what clients must show, in hex: the server knows no more until a client
            shows it, and proves from then on that it does (see `proof`).
        isolation_checks: addresses that must be out of reach before the server listens.
        isolation_seconds: how long it waits for that, before it exits with NOT_ISOLATED.
        max_sessions: sessions at once.
        max_output: bytes, upper bound of a request's max_output.
        ready_fd: where one JSON line (pid, listen) is written when the server is ready.
        own_pid_namespace: only the server and pid 1 may survive kill_all.
        secret: what the server proves to know when a client asks it; None: it proves nothing.
        allow_loopback: whether connections over TCP may come from this machine itself, that is from the
            sandbox's own commands; where it listens on a loopback address only, they may in any case.
        inside: what commands find beyond a border between them and the server; None: there is none.
        filter_calls: whether commands get a filter of system calls (see `callfilter`).
    """

    __slots__ = (
        "allow_loopback", "filter_calls", "inside", "isolation_checks", "isolation_seconds", "lease",
        "listen", "max_output", "max_sessions", "own_pid_namespace", "ready_fd", "secret", "token",
        "token_sha256", "workdir",
    )  # fmt: skip

    def __init__(
        self,
        *,
        listen: list[str],
        workdir: str = "/",
        lease: float | None = None,
        token: str | None = None,
        token_sha256: str | None = None,
        isolation_checks: tuple[isolation.Target, ...] = (),
        isolation_seconds: float = isolation.DEFAULT_SECONDS,
        max_sessions: int = MAX_SESSIONS,
        max_output: int = MAX_OUTPUT,
        ready_fd: int | None = None,
        own_pid_namespace: bool = False,
        filter_calls: bool = True,
        inside: Inside | None = None,
        secret: bytes | None = None,
        allow_loopback: bool = False,
    ) -> None:
        self.listen = listen
        self.workdir = workdir
        self.lease = lease
        self.token = token
        self.token_sha256 = token_sha256
        self.isolation_checks = isolation_checks
        self.isolation_seconds = isolation_seconds
        self.max_sessions = max_sessions
        self.max_output = max_output
        self.ready_fd = ready_fd
        self.own_pid_namespace = own_pid_namespace
        self.filter_calls = filter_calls
        self.inside = inside
        self.secret = secret
        self.allow_loopback = allow_loopback


class Server:
    """Listening sockets, connections, the lease."""

    def __init__(self, options: Options, walls: Walls) -> None:
        self._loop = EventLoop()
        self._walls = walls
        self._token = options.token
        self._token_sha256 = options.token_sha256
        self._derived_token: str | None = None
        self._allow_loopback = options.allow_loopback
        self._strangers: dict[Connection, None] = {}
        self._connections: set[Connection] = set()
        self._listeners: list[socket.socket] = []
        self._unix_paths: list[str] = []
        self._own_namespace: bool = options.own_pid_namespace or os.getpid() == 1
        self._lease_timer: Timer | None = None
        self._lease_end: float | None = None
        self._status = 0
        self._operations = Operations(
            self._loop,
            workdir=os.path.abspath(options.workdir),
            max_sessions=options.max_sessions,
            max_output=options.max_output,
            own_namespace=self._own_namespace,
            walls=walls,
            secret=options.secret,
            control=self,
        )
        if options.lease is not None:
            self.renew(options.lease)

    def listen(self, address: str) -> str:
        """Starts to accept connections; the address that clients use (a TCP port 0 has been resolved)."""
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
            # Bound by whoever started the server: its path need not be visible in here.
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
            shown = f"[{host}]" if ":" in host else host
            address = f"tcp://{shown}:{listener.getsockname()[1]}"
        listener.setblocking(False)
        listener.listen(128)
        self._listeners.append(listener)
        guarded = listener.family != socket.AF_UNIX and not (
            self._allow_loopback or peers.listens_on_loopback(listener)
        )
        self._loop.watch(listener.fileno(), lambda events: self._accept_all(listener, guarded))
        return address

    def run(self) -> int:
        """Serves until shutdown, SIGTERM or the end of the lease; the exit status."""
        self._loop.install_signals({signal.SIGTERM: self.shutdown, signal.SIGINT: self.shutdown})
        self._loop.reap()
        self._loop.run()
        for connection in [*self._connections, *self._strangers]:
            connection.close()
        for listener in self._listeners:
            listener.close()
        self.kill_all()
        self._operations.close()
        for path in self._unix_paths:
            try:
                os.unlink(path)
            except OSError:
                continue  # its folder has been removed already
        return self._status

    # What operations ask of the server

    def renew(self, seconds: float) -> None:
        """The lease ends in `seconds` from now."""
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        self._lease_end = monotonic() + seconds
        self._lease_timer = self._loop.call_later(seconds, self._lease_ended)

    def lease_left(self) -> float | None:
        """Seconds, None where there is no lease."""
        return None if self._lease_end is None else max(0.0, self._lease_end - monotonic())

    def kill_all(self) -> int:
        """Kills every process of the sandbox but this one; how many there were."""
        # Where there is a border, its first process goes, too, and comes again with the next command.
        border = self._walls.border
        first = border is not None and border.stands()
        count = processes.kill_everything(self._loop.reap, own_namespace=self._own_namespace)
        return count - first

    def survivors(self) -> int:
        """How many processes of the sandbox there still are."""
        return len(processes.alive_below(processes.snapshot(), own_namespace=self._own_namespace))

    def shutdown(self) -> None:
        """Ends the server after the current round of events."""
        self._loop.stop()

    def _lease_ended(self) -> None:
        self._status = LEASE_ENDED
        self._loop.stop()

    # Connections

    def _accept_all(self, listener: socket.socket, guarded: bool) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # nobody waits, or there are no descriptors: the client will retry
            if guarded and peers.comes_from_here(sock):
                sock.close()
            else:
                self._accept(sock)

    def _accept(self, sock: socket.socket) -> None:
        """A connection that has not greeted takes no place of one that has, and gives way to a newer one."""
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
                    Unauthorized("the first request must be hello with the server's token"),
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
        shown = token.encode("utf-8", "surrogatepass")
        if self._token_sha256 is None:
            return self._token is None or compare_digest(shown, self._token.encode())
        if self._derived_token is not None and compare_digest(shown, self._derived_token.encode()):
            return True
        from hashlib import sha256

        # Workers of an earlier release show the text that a later one has made of the token.
        token = token.removeprefix(proof.PROVEN)
        shown = token.encode("utf-8", "surrogatepass")
        if not compare_digest(sha256(shown).hexdigest(), self._token_sha256):
            return False
        if self._token is not None:
            return compare_digest(shown, self._token.encode())
        self._derived_token, key = proof.derived(token)
        self._operations.prove_token(key)
        return True


def _every_address(port: int) -> socket.socket:
    """Bound to all IPv4 and IPv6 addresses, or to all IPv4 ones where the kernel has no IPv6."""
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", port))


def _split_tcp(address: str) -> tuple[str, int]:
    host, separator, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not separator or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--listen: {address!r} is none of unix:/path, tcp://host:port and fd:N")
    return host.strip("[]"), int(port)


def _parse(arguments: list[str] | None) -> Namespace:
    import argparse  # 3 ms, which a sandbox that calls `serve` itself does not spend

    parser = argparse.ArgumentParser(prog="rollyard_sandbox.server", description="Exec server of a sandbox.")
    add = parser.add_argument
    add(
        "--listen",
        action="append",
        required=True,
        metavar="ADDRESS",
        help="unix:/path, tcp://host:port (host *: every address; port 0: any free one) or fd:N (a bound "
        "socket); may be repeated",
    )
    add("--workdir", default="/", help="where sessions start")
    add(
        "--lease", type=float, metavar="SECONDS", help="kill everything and exit when not renewed for so long"
    )
    add("--token-file", metavar="FILE", help="the token that clients must show; TCP needs it, or its hash")
    add("--token-sha256", metavar="HEX", help="SHA-256 of the token that clients must show, 64 hex digits")
    add(
        "--isolation-check",
        action="append",
        default=[],
        metavar="IP:PORT",
        help="listen only when this cannot be reached, else exit with "
        f"{isolation.NOT_ISOLATED}; may be repeated",
    )
    add(
        "--isolation-seconds",
        type=float,
        default=isolation.DEFAULT_SECONDS,
        metavar="SECONDS",
        help="how long to wait for that",
    )
    add("--max-sessions", type=int, default=MAX_SESSIONS)
    add(
        "--max-output",
        type=int,
        default=MAX_OUTPUT,
        metavar="BYTES",
        help="upper bound of a request's max_output",
    )
    add(
        "--ready-fd",
        type=int,
        metavar="N",
        help="write one JSON line (pid, listen) to this descriptor when ready, then close it",
    )
    add(
        "--own-pid-namespace",
        action="store_true",
        help="only this server and pid 1 may survive kill_all: the pid namespace is its own",
    )
    add(
        "--secret-fd",
        type=int,
        metavar="N",
        help=f"read {proof.SECRET_BYTES} bytes from this descriptor, which the server proves to know",
    )
    add(
        "--allow-loopback",
        action="store_true",
        help="accept TCP connections that come from this machine itself, where the server does not listen on "
        "a loopback address only",
    )
    options = parser.parse_args(arguments)
    if not os.path.isdir(options.workdir):
        parser.error(f"--workdir: {options.workdir} is not a directory")
    if options.lease is not None and options.lease <= 0:
        parser.error("--lease: must be more than 0 seconds")
    with_token = options.token_file is not None or options.token_sha256 is not None
    if not with_token and any(address.startswith("tcp:") for address in options.listen):
        parser.error("--listen: TCP needs --token-file or --token-sha256")
    if options.token_sha256 is not None:
        options.token_sha256 = options.token_sha256.lower()
        if len(options.token_sha256) != 64 or set(options.token_sha256) - set("0123456789abcdef"):
            parser.error("--token-sha256: must be 64 hexadecimal digits")
    if not 0 <= options.isolation_seconds <= 3600:
        parser.error("--isolation-seconds: must be between 0 and 3600 seconds")
    try:
        options.isolation_check = tuple(isolation.Target(text) for text in options.isolation_check)
    except ValueError as error:
        parser.error(f"--isolation-check: {error}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parse(arguments)
    token = None
    if options.token_file is not None:
        try:
            with open(options.token_file, encoding="utf-8") as file:
                token = file.read().strip()
        except OSError as error:
            print(f"--token-file: {error}", file=sys.stderr)
            return 2
        if not token:
            print(f"--token-file: {options.token_file} is empty", file=sys.stderr)
            return 2
    secret = None
    if options.secret_fd is not None:
        try:
            secret = proof.read_secret(options.secret_fd)
        except (OSError, ValueError) as error:
            print(f"--secret-fd: {error}", file=sys.stderr)
            return 2
    return serve(
        Options(
            listen=options.listen,
            workdir=options.workdir,
            lease=options.lease,
            token=token,
            token_sha256=options.token_sha256,
            isolation_checks=options.isolation_check,
            isolation_seconds=options.isolation_seconds,
            max_sessions=options.max_sessions,
            max_output=options.max_output,
            ready_fd=options.ready_fd,
            own_pid_namespace=options.own_pid_namespace,
            secret=secret,
            allow_loopback=options.allow_loopback,
        )
    )


def serve(options: Options) -> int:
    """Serves until shutdown, SIGTERM or the end of the lease; returns the exit status."""
    if os.getpid() != 1:  # process 1 inherits orphans anyway
        processes.become_subreaper()
    try:
        walls = Walls(filter_calls=options.filter_calls, inside=options.inside)
    except OSError as error:
        print(f"{NOT_CONFINED}: {error}", file=sys.stderr)
        return FAILED
    if options.isolation_checks:
        problem = isolation.wait_isolated(options.isolation_checks, options.isolation_seconds)
        if problem is not None:
            isolation.refuse(problem)
            return isolation.NOT_ISOLATED
    server = Server(options, walls)
    try:
        addresses = [server.listen(address) for address in options.listen]
    except (OSError, ValueError) as error:
        print(f"cannot listen: {error}", file=sys.stderr)
        return 2
    if options.ready_fd is not None:
        os.write(options.ready_fd, json.dumps({"pid": os.getpid(), "listen": addresses}).encode() + b"\n")
        os.close(options.ready_fd)
    return server.run()


if __name__ == "__main__":
    sys.exit(main())
