"""The client's side of the Jupyter protocol: it sends execute requests and receives output, in one thread."""

from __future__ import annotations

import os
import re
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import zmq
from jupyter_client.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollyard_sandbox.execution.commands import Capture

_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")
_PROBE_INTERVAL: Final = 0.1  # seconds
"""The time between two probes. They repeat, as a subscription misses what was published before it arrived."""
_HIGH_WATER: Final = 20_000  # messages


class JupyterWire:
    """The shell and iopub sockets of one kernel.

    Attributes:
        succeeded: Whether the last cell raised no exception.
        result: The text of the last cell's last expression.
    """

    def __init__(self, connection: dict[str, Any], wake: int) -> None:
        self._session = Session(
            key=connection["key"].encode(), signature_scheme=connection["signature_scheme"]
        )
        self._context = zmq.Context()
        self._shell = self._socket(zmq.DEALER, connection, "shell_port")
        self._iopub = self._socket(zmq.SUB, connection, "iopub_port")
        self._iopub.setsockopt(zmq.SUBSCRIBE, b"")
        self._wake = wake
        self._poller = zmq.Poller()
        for source in (self._shell, self._iopub, wake):
            self._poller.register(source, zmq.POLLIN)
        self._request = ""
        self._replied = self._idle = False
        self.succeeded = False
        self.result = ""

    def _socket(self, kind: int, connection: dict[str, Any], port: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)  # milliseconds; the kernel binds when it has started
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.connect(f"ipc://{connection['ip']}-{connection[port]}")
        return socket

    def wait_until_ready(self, limit: float, is_wanted: Callable[[], bool]) -> bool:
        """Return whether the kernel answered on both sockets within `limit` seconds while `is_wanted()`."""
        deadline = monotonic() + limit
        sent, replied, published = set(), False, False
        while is_wanted() and monotonic() < deadline:
            sent.add(self._send("kernel_info_request", {}))
            probe_end = monotonic() + _PROBE_INTERVAL
            while (seconds := probe_end - monotonic()) > 0 and is_wanted():
                ready = dict(self._poller.poll(int(seconds * 1000) + 1))
                if self._wake in ready:
                    self._clear_wake()
                if self._shell in ready:
                    replied |= self._parent(self._receive(self._shell)) in sent
                if self._iopub in ready:
                    published |= self._parent(self._receive(self._iopub)) in sent
                if replied and published:
                    return True
        return False

    def execute(self, code: str) -> None:
        """Send a cell to the kernel."""
        self._replied = self._idle = self.succeeded = False
        self.result = ""
        self._request = self._send(
            "execute_request",
            {
                "code": code,
                "silent": False,
                "store_history": True,
                "user_expressions": {},
                "allow_stdin": False,
                "stop_on_error": False,
            },
        )

    def receive_until(self, deadline: float, capture: Capture) -> bool:
        """Collect output until the cell ends.

        Returns:
            False if `deadline` (of the monotonic clock) or a wake-up came first.
        """
        late = 0
        while not (self._replied and self._idle):
            ready = dict(self._poller.poll(_milliseconds(deadline)))
            # What was sent in time is still read, but a kernel that never stops sending prolongs no wait.
            late += monotonic() >= deadline
            if not ready or late > _HIGH_WATER:
                return False
            if self._iopub in ready:
                self._published(self._receive(self._iopub), capture)
            if self._shell in ready:
                message = self._receive(self._shell)
                if self._parent(message) == self._request:
                    self._replied = True
                    content = message.get("content")
                    self.succeeded = isinstance(content, dict) and content.get("status") == "ok"
            if self._wake in ready and len(ready) == 1:
                # The wake-up is handled last, because what the kernel sent before it died must not be lost.
                self._clear_wake()
                return False
        return True

    def close(self) -> None:
        """Close the sockets."""
        self._shell.close()
        self._iopub.close()
        self._context.term()

    def _published(self, message: dict[str, Any], capture: Capture) -> None:
        # The kernel's own code may send anything, so no field is taken for what the protocol says it is.
        kind, content = message.get("msg_type"), message.get("content")
        if not isinstance(content, dict):
            return
        if kind == "stream":
            # Output of earlier cells is included, because a thread that they started may still print.
            capture.add(_bytes(_text(content.get("text"))))
        elif kind in ("execute_result", "display_data", "update_display_data"):
            data = content.get("data")
            text = _text(data.get("text/plain")) if isinstance(data, dict) else ""
            if kind == "execute_result" and self._parent(message) == self._request:
                self.result = text.encode("utf-8", "replace").decode()
            capture.add((text + "\n").encode("utf-8", "replace"))
        elif kind == "error":
            lines = content.get("traceback")
            text = "\n".join(map(_text, lines)) if isinstance(lines, list) else ""
            capture.add((_ANSI.sub("", text) + "\n").encode("utf-8", "replace"))
        elif kind == "status" and self._parent(message) == self._request:
            self._idle |= content.get("execution_state") == "idle"

    def _send(self, kind: str, content: dict[str, Any]) -> str:
        message = self._session.send(self._shell, kind, content)
        assert message is not None
        identifier = message["header"]["msg_id"]
        assert isinstance(identifier, str)
        return identifier

    def _receive(self, socket: Any) -> dict[str, Any]:
        """Return the next message, or {} for one that is not signed with the kernel's key."""
        parts = socket.recv_multipart(zmq.NOBLOCK)
        try:
            _, parts = self._session.feed_identities(parts)
            message = self._session.deserialize(parts)
        except Exception:  # The kernel wrote the parts, and the session parses them.
            return {}
        return message if isinstance(message, dict) else {}

    @staticmethod
    def _parent(message: dict[str, Any]) -> str:
        header = message.get("parent_header")
        return _text(header.get("msg_id")) if isinstance(header, dict) else ""

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return


def _text(value: object) -> str:
    """Return `value` if it is a text, and otherwise an empty one."""
    return value if isinstance(value, str) else ""


def _bytes(text: str) -> bytes:
    """Return the bytes that a program has printed. Those that are not UTF-8 come as surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")  # No bytes are decoded to this text.


def _milliseconds(deadline: float) -> int:
    """Return the milliseconds until `deadline`, rounded up: rounding down would spin in the last one."""
    seconds = deadline - monotonic()
    return int(seconds * 1000) + 1 if seconds > 0 else 0
