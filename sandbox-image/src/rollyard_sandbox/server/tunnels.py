"""The ways out of a sandbox: loopback ports, whose connections the worker takes over one by one.

A sandbox has no network. A worker that lends it one, or the gateway to its model, turns connections of its
own to the server into tunnels and keeps a few of them waiting. A program that connects to the loopback port
gets one of these, and from then on the server only moves bytes between the two. It reads none of them: the
worker's end decides what is reached. The worker can end this at any time by closing its connections. An
evaluation begins with all tunnels closed. No further one to the gateway is opened in the sandbox's lifetime,
and none to a network either unless the worker has asked for that.

Each purpose has a port and tunnels of its own. The loopback belongs to the network namespace of the sandbox:
with bubblewrap and Apptainer, in a container and in a pod, no other sandbox can reach the port. Sandboxes of
the kind `process` share the loopback of their machine. They get no network, and what protects the gateway
there is the key that each call must show.
"""

from __future__ import annotations

import socket
from collections import deque

from rollyard_sandbox.execution.event_loop import READ, WRITE
from rollyard_sandbox.frames import TUNNEL_READY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

    from rollyard_sandbox.execution.event_loop import EventLoop, Timer

MAX_TUNNELS: Final = 128
"""The number of tunnels of one purpose, waiting and in use, that one server holds."""
_BACKLOG: Final = 64
_LINGER_SECONDS: Final = 30.0
_NEXT_SECONDS: Final = 2.0
"""The time after the end of the last tunnel in which the worker may bring another one."""
_CHUNK: Final = 64 * 1024  # bytes
_SOCKET_BUFFER: Final = 128 * 1024  # bytes of the kernel for each direction of a program's connection


class Tunnels:
    """A loopback port of one sandbox and the tunnels of its worker, for one purpose."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._listener: socket.socket | None = None
        self._closed = False
        self._paused = False
        self._lent = False
        self._last: Timer | None = None
        self._waiting: deque[socket.socket] = deque()
        self._new: set[socket.socket] = set()
        self._pairs: set[_Pair] = set()

    @property
    def closed(self) -> bool:
        """Whether the tunnels were closed for good."""
        return self._closed

    def full(self) -> bool:
        """Return whether no further tunnel is taken."""
        return len(self._waiting) + len(self._new) + len(self._pairs) >= MAX_TUNNELS

    def port(self) -> int:
        """Return the port on 127.0.0.1 to which programs connect. It stays the same.

        Raises:
            OSError: No port can be opened.
        """
        if self._listener is None:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                # Accepted connections inherit these sizes, which bounds their part of the kernel's memory.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
                # They inherit this, too: each small piece of an answer is sent at once.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                listener.bind(("127.0.0.1", 0))
                listener.listen(_BACKLOG)
            except OSError:
                listener.close()
                raise
            self._listener = listener
            self._loop.watch(listener.fileno(), self._accept)
        port: int = self._listener.getsockname()[1]
        return port

    def add(self, sock: socket.socket) -> None:
        """Take over a worker's connection, on which it sends `TUNNEL_READY` before the tunnel is used."""
        sock.setblocking(False)
        self._lent = True
        if self._last is not None:
            self._last.cancel()
            self._last = None
        self._new.add(sock)
        self._loop.watch(sock.fileno(), lambda events: self._from_worker(sock))

    def close(self, *, for_good: bool) -> None:
        """Close the port and every tunnel. With `for_good`, no other one is opened in this sandbox."""
        self._closed = self._closed or for_good
        if self._last is not None:
            self._last.cancel()
            self._last = None
        self._lent = self._paused = False
        if self._listener is not None:
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for sock in [*self._waiting, *self._new]:
            self._drop(sock)
        for pair in list(self._pairs):
            pair.close()

    def _from_worker(self, sock: socket.socket) -> None:
        """Handle what comes on a tunnel that no program uses: `TUNNEL_READY`, or the worker's end."""
        try:
            data = sock.recv(2)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data == TUNNEL_READY and sock in self._new:
            self._new.discard(sock)
            self._waiting.append(sock)
            self._resume()
        else:
            self._drop(sock)
            self._returned()

    def _drop(self, sock: socket.socket) -> None:
        self._loop.unwatch(sock.fileno())
        sock.close()
        self._new.discard(sock)
        if sock in self._waiting:
            self._waiting.remove(sock)

    def _accept(self, events: int) -> None:
        if self._listener is None:
            return
        for _ in range(_BACKLOG):
            if not self._waiting and self._lent:
                # The worker is about to bring further tunnels. Until then, programs wait in the kernel.
                self._paused = True
                self._loop.unwatch(self._listener.fileno())
                return
            try:
                program, _ = self._listener.accept()
            except OSError:
                return
            if not self._waiting:
                program.close()  # No worker lends anything now.
                continue
            tunnel = self._waiting.popleft()
            self._loop.unwatch(tunnel.fileno())
            program.setblocking(False)
            pair = _Pair(self._loop, program, tunnel, self._returned, self._ended)
            self._pairs.add(pair)
            pair.start()

    def _ended(self, pair: _Pair) -> None:
        self._pairs.discard(pair)
        self._returned()

    def _returned(self) -> None:
        """Note that a tunnel is gone. After the last one, programs wait a moment for another."""
        if self._closed or self._last is not None or self._waiting or self._new:
            return
        if self._lent and not any(pair.lent for pair in self._pairs):
            self._last = self._loop.call_later(_NEXT_SECONDS, self._not_lent)

    def _not_lent(self) -> None:
        self._last = None
        self._lent = False
        self._resume()

    def _resume(self) -> None:
        if self._paused and self._listener is not None:
            self._paused = False
            self._loop.watch(self._listener.fileno(), self._accept)


class _Pair:
    """A program's connection and its tunnel. Each direction ends by itself, and the pair with both."""

    def __init__(
        self,
        loop: EventLoop,
        program: socket.socket,
        tunnel: socket.socket,
        on_returned: Callable[[], None],
        on_end: Callable[[_Pair], None],
    ) -> None:
        self._loop = loop
        self._on_returned = on_returned
        self._on_end = on_end
        self._closed = False
        self.lent = True
        """Whether the worker has not ended its part."""
        outward, inward = _Direction(program, tunnel), _Direction(tunnel, program)
        outward.data += TUNNEL_READY
        self._directions = (outward, inward)
        self._timer: Timer | None = None
        self._watched: dict[socket.socket, int] = {program: 0, tunnel: 0}

    def start(self) -> None:
        """Begin to move bytes."""
        self._move(0)

    def close(self) -> None:
        """Close both connections."""
        if self._closed:
            return
        self._closed = True
        self.lent = False
        if self._timer is not None:
            self._timer.cancel()
        for sock, events in self._watched.items():
            if events:
                self._loop.unwatch(sock.fileno())
            sock.close()
        self._on_end(self)

    def _move(self, events: int) -> None:
        if self._closed:
            return
        try:
            for direction in self._directions:
                direction.move()
        except OSError:
            self.close()
            return
        if all(direction.over for direction in self._directions):
            self.close()
            return
        for sock in self._watched:
            self._watch(sock)
        if self.lent and self._directions[1].over:
            # What the program sends now reaches nobody. It gets time to read the rest, but not forever.
            self.lent = False
            self._timer = self._loop.call_later(_LINGER_SECONDS, self.close)
            self._on_returned()

    def _watch(self, sock: socket.socket) -> None:
        events = 0
        for direction in self._directions:
            if direction.source is sock and not direction.ended and not direction.data:
                events |= READ
            if direction.target is sock and direction.data:
                events |= WRITE
        before, self._watched[sock] = self._watched[sock], events
        if events == before:
            return
        if not events:
            # Otherwise a connection that is broken would be reported again and again.
            self._loop.unwatch(sock.fileno())
        elif before:
            self._loop.change(sock.fileno(), events)
        else:
            self._loop.watch(sock.fileno(), self._move, events)


class _Direction:
    """The bytes from one socket to the other, of which at most `_CHUNK` are held here."""

    __slots__ = ("data", "ended", "over", "source", "target")

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.data = bytearray()
        self.ended = False
        self.over = False

    def move(self) -> None:
        """Move what can be moved now.

        Raises:
            OSError: One of the connections is broken.
        """
        if not self.data and not self.ended:
            try:
                self.data += self.source.recv(_CHUNK)
            except BlockingIOError:
                return
            self.ended = not self.data
        if self.data:
            try:
                sent = self.target.send(self.data)
            except BlockingIOError:
                return
            del self.data[:sent]
        if self.ended and not self.data and not self.over:
            self.over = True
            self.target.shutdown(socket.SHUT_WR)
