"""The options of the exec server."""

from __future__ import annotations

from rollyard_sandbox.isolation import network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from rollyard_sandbox.isolation.command_namespaces import NamespaceOptions

MAX_SESSIONS: Final = 64
MAX_OUTPUT: Final = 16 * 1024 * 1024  # bytes


class ServerOptions:
    """The options of one server. `command_line` parses and checks them; `serve` takes them as they are.

    Args:
        listen: The addresses to listen on (see `ExecServer.listen`).
        workdir: The folder in which sessions start.
        lease: The seconds after which the server kills everything and ends, unless a client renews the
            lease. None means that it never does.
        token: The token that clients must show, or None if they need none. TCP needs a token or its hash.
        token_sha256: The SHA-256 of the token that clients must show, in hex. The server knows only this
            hash until a client shows the token, and proves from then on that it knows it (see `proof`).
        isolation_checks: The addresses that must be out of reach before the server listens.
        isolation_seconds: How long the server waits for that before it exits with NOT_ISOLATED.
        max_sessions: The largest number of sessions at the same time.
        max_output: The upper bound of a request's max_output, in bytes.
        ready_fd: The descriptor to which one JSON line (pid, listen) is written when the server is ready.
        own_pid_namespace: Whether the pid namespace is the server's own: only the server and pid 1 may then
            survive kill_all.
        secret: The secret that the server proves to know when a client asks it; with None it proves nothing.
        allow_loopback: Whether TCP connections may come from this machine itself, that is from the
            sandbox's own commands. If the server listens on a loopback address only, they always may.
        namespaces: The namespaces of commands. With None commands share those of the server.
        filter_calls: Whether commands get a filter of system calls (see `isolation.seccomp`), and limits on
            what sandboxes share (see `isolation.protections`).
        yielding: Whether commands run at the lowest priority. This is for a sandbox whose processor time is
            limited by a control group, in which they compete with nothing but the server.
    """

    def __init__(
        self,
        *,
        listen: list[str],
        workdir: str = "/",
        lease: float | None = None,
        token: str | None = None,
        token_sha256: str | None = None,
        isolation_checks: tuple[network.ForbiddenAddress, ...] = (),
        isolation_seconds: float = network.DEFAULT_SECONDS,
        max_sessions: int = MAX_SESSIONS,
        max_output: int = MAX_OUTPUT,
        ready_fd: int | None = None,
        own_pid_namespace: bool = False,
        filter_calls: bool = True,
        namespaces: NamespaceOptions | None = None,
        secret: bytes | None = None,
        allow_loopback: bool = False,
        yielding: bool = False,
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
        self.namespaces = namespaces
        self.secret = secret
        self.allow_loopback = allow_loopback
        self.yielding = yielding
