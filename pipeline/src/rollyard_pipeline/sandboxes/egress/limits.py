"""What the proxy grants a sandbox, and what the sandbox has used."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from rollyard_process.log_text import one_line

from rollyard_pipeline.errors import WorkerError
from rollyard_pipeline.sandboxes.tunnels import TunnelLimits

log = logging.getLogger(__name__)

MAX_NOTES: Final = 20
"""The number of refusals of one sandbox that are logged in one stage."""
SPENT: Final = "the sandbox has moved as many bytes as it may in one stage"
_SHOWN: Final = 300


@dataclass(frozen=True, slots=True)
class EgressLimits(TunnelLimits):
    """The bounds of one sandbox's network in one stage, and the bound of a worker."""

    total_bytes: int = 4 << 30
    """The bytes in both directions."""
    connection_seconds: float = 600.0
    idle_seconds: float = 120.0
    """The seconds for which both ends of a connection may be silent at the same time."""
    connect_seconds: float = 10.0
    head_seconds: float = 15.0
    """The seconds in which a request, and the first message of TLS, must have come."""
    reserved: int = 8
    """The number of connections that a sandbox may have, however many the others hold."""
    worker_connections: int = 256
    """The number of connections of one worker at which sandboxes get no more than the reserved ones."""


class EgressRefused(WorkerError):
    """What a program of the sandbox asked for is refused. The message may be shown to the policy.

    The reason is `RequestRefused` (the proxy takes no such request), `NotTls` (the bytes are not an
    acceptable ClientHello), `DestinationRefused` (the destination is not allowed), `HostUnresolved` (the host
    has no address at present) or `NetworkSpent` (the sandbox has used up the bytes that it may move).

    Args:
        status: The status of the proxy's answer.
        detail: The text for the log, by default the message. Nothing is logged if it is empty.
    """

    def __init__(
        self, message: str, reason: str = "RequestRefused", status: int = 400, *, detail: str | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status
        self.detail = message if detail is None else detail


class Meter:
    """The bytes and the refusals of one sandbox.

    Args:
        name: The rollout, for the log.
    """

    def __init__(self, name: str, limits: EgressLimits) -> None:
        self._name = name
        self._left = limits.total_bytes
        self._notes: set[str] = set()

    @property
    def spent(self) -> bool:
        """Whether no byte is left."""
        return self._left <= 0

    def count(self, size: int) -> None:
        """Count bytes that are about to be moved.

        Raises:
            EgressRefused: They are more than the sandbox may still move.
        """
        self._left -= size
        if self._left < 0:
            raise EgressRefused(SPENT, "NetworkSpent", 503)

    def note(self, text: str) -> None:
        """Log a refusal once, and at most `MAX_NOTES` of them in all."""
        text = one_line(text)[:_SHOWN]
        if text in self._notes or len(self._notes) >= MAX_NOTES:
            return
        self._notes.add(text)
        more = "; further refusals are not logged" if len(self._notes) == MAX_NOTES else ""
        log.warning("network of %s: refused: %s%s", self._name, text, more)
