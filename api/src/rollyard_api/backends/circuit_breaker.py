"""The circuit breaker of one backend, which is a pure state machine.

While the circuit is closed, it counts failures in a row, and THRESHOLD of them open it. While it is
open, nothing is routed to the backend. After a pause one probe decides (half-open): an answer closes
the circuit, and a failure opens it again for twice the time. A circuit that a probe has closed is on
probation: it keeps its count, so the next failure opens it at once and for longer, until a rollout
has completed there. This keeps a backend that can answer one request but not many from flapping.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollyard_crds.backendpool import Circuit
from rollyard_process.backoff import Backoff

THRESHOLD = 3
"""The number of failures in a row that open a circuit."""
FIRST_PAUSE = 2.0
"""The seconds before the first probe. Each further failure doubles them, up to LONGEST_PAUSE."""
LONGEST_PAUSE = 60.0
PROBE_SECONDS = 10.0
"""The time within which a probe must be answered, in seconds."""
STUCK_SECONDS = 3 * PROBE_SECONDS
"""The seconds after which a probe without a verdict counts as lost with its control plane.

Another replica may then probe.
"""
_MOST = THRESHOLD + 16
"""The limit of the failure count. The pause has reached its maximum long before."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """The state of one backend's circuit; `opened_at` is when it opened, or when its probe began."""

    circuit: Circuit = "Closed"
    failures: int = 0
    opened_at: float | None = None

    @property
    def pause(self) -> float:
        """The seconds from the opening of the circuit to the next probe."""
        return Backoff(FIRST_PAUSE, LONGEST_PAUSE).pause(self.failures - THRESHOLD + 1)

    def due_in(self, now: float) -> float | None:
        """Return the seconds until a probe may begin, at least 0, or None while the circuit is closed."""
        if self.circuit == "Closed":
            return None
        wait = self.pause if self.circuit == "Open" else STUCK_SECONDS
        return max(0.0, (self.opened_at or 0.0) + wait - now)

    def failed(self, now: float) -> Breaker:
        """Return the state after a failed request. A late failure, with an open circuit, changes nothing."""
        if self.circuit != "Closed":
            return self
        failures = min(self.failures + 1, _MOST)
        if failures < THRESHOLD:
            return replace(self, failures=failures)
        return Breaker("Open", failures, now)

    def completed(self) -> Breaker:
        """Return the state after a completed Run, from which failures are counted from zero again."""
        return replace(self, failures=0) if self.circuit == "Closed" else self

    def probing(self, now: float) -> Breaker:
        """Return the state in which a probe has begun."""
        return replace(self, circuit="HalfOpen", opened_at=now)

    def probed(self, answered: bool, now: float) -> Breaker:
        """Return the state after the probe's verdict."""
        if answered:
            return Breaker("Closed", self.failures, None)
        return Breaker("Open", min(self.failures + 1, _MOST), now)

    def restarted(self, now: float) -> Breaker:
        """Return the state after a restart of the server; if the circuit is open, a probe is due at once."""
        return self if self.circuit == "Closed" else Breaker("Open", THRESHOLD, now - FIRST_PAUSE)
