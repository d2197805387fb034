"""The server's side of one connection: it reads frames, sends answers, and knows the requests in flight."""

from __future__ import annotations

import socket

from rollyard_sandbox.errors import CommandTooLarge, ProtocolError, SandboxError
from rollyard_sandbox.execution.event_loop import READ, WRITE
from rollyard_sandbox.frames import FrameReader, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

    from rollyard_sandbox.execution.event_loop import EventLoop

_READ: Final = 256 * 1024
_MAX_UNSENT: Final = 128 * 1024 * 1024  # bytes; a client that reads nothing is disconnected
_MAX_UNSENT_EVENTS: Final = 1024 * 1024  # bytes; above it output events are left out: the result has it all
_BODY_BEFORE_HELLO: Final = 4096  # bytes
HELLO_LIMIT: Final = 5.0  # seconds


class Connection:
    """One client's connection. `in_flight` maps each unanswered request to the function that cancels it."""

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        on_frame: Callable[[Connection, dict[str, Any], bytes], None],
        on_close: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._on_frame = on_frame
        self._on_close = on_close
        self._reader = FrameReader(_BODY_BEFORE_HELLO)
        self._unsent = bytearray()
        self.in_flight: dict[int, Callable[[], None]] = {}
        self.greeted = False
        self.closed = False
        self._closing = False
        loop.watch(sock.fileno(), self._ready)
        self._hello_timer = loop.call_later(HELLO_LIMIT, self.close)

    def greet(self, max_body: int) -> None:
        """Allow the client to use the server, and accept bodies of up to `max_body` bytes from now on."""
        self.greeted = True
        self._hello_timer.cancel()
        self._reader.allow_body(max_body)

    def answer(self, request: int, fields: dict[str, Any], body: bytes = b"") -> None:
        """Send the only answer to a request."""
        self.in_flight.pop(request, None)
        fields["id"] = request
        try:
            frame = encode(fields, body)
        except CommandTooLarge as error:
            frame = encode({"id": request, "error": error.reason, "message": f"the answer: {error}"})
        self._send(frame)

    def refuse(self, request: int, error: SandboxError) -> None:
        """Answer a request with an error."""
        self.answer(request, {"error": error.reason, "message": str(error)[:4000]})

    def event(self, request: int, body: bytes) -> None:
        """Send output of an unfinished request. It is left out if the client does not keep up."""
        if len(self._unsent) < _MAX_UNSENT_EVENTS:
            self._send(encode({"id": request, "event": "output"}, body))

    def close(self) -> None:
        """Close the connection. The requests in flight are cancelled."""
        if self.closed:
            return
        self.closed = True
        self._hello_timer.cancel()
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        cancels = list(self.in_flight.values())
        self.in_flight.clear()
        for cancel in cancels:
            cancel()
        self._on_close(self)

    def take_socket(self) -> socket.socket | None:
        """Give the socket away after the last answer, and return it. The server then has no such connection.

        The result is None, and nothing has changed, if bytes of this connection are still on their way.
        """
        if self.closed or self._unsent or self.in_flight or self._reader.unfinished:
            return None
        self.closed = True
        self._loop.unwatch(self._socket.fileno())
        self._on_close(self)
        return self._socket

    def close_when_sent(self) -> None:
        """Close the connection when all answers so far have been sent. Nothing more is read."""
        self._closing = True
        if not self._unsent:
            self.close()

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if self.closed or not events & ~WRITE:
            return
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            for header, body in self._reader.feed(data):
                self._on_frame(self, header, body)
                if self.closed or self._closing:
                    return
        except ProtocolError as error:
            self.refuse(0, error)
            self.close_when_sent()

    def _send(self, frame: bytes) -> None:
        if self.closed:
            return
        if self._unsent:
            if len(self._unsent) + len(frame) > _MAX_UNSENT:
                self.close()
                return
            self._unsent += frame
            return
        try:
            sent = self._socket.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The connection is closed later, because the caller is in the middle of something.
            self._loop.call_later(0.0, self.close)
            return
        if sent < len(frame):
            self._unsent += frame[sent:]
            self._loop.change(self._socket.fileno(), READ | WRITE)

    def _flush(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.change(self._socket.fileno(), READ)
            if self._closing:
                self.close()
