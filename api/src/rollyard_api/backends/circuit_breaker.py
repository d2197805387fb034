"""The circuit breaker of one backend: a pure state machine.

Closed, it counts failures in a row; THRESHOLD of them open it. Open, nothing is routed there;
after a pause one probe decides (half-open): an answer closes it, a failure opens it again for
twice the time. A circuit that a probe has closed is on probation: it keeps its count, so that the
next failure opens it at once and for longer, until a rollout has completed there. A backend that
answers one request and drowns in many does not flap then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollyard_crds.backendpool import Circuit
from rollyard_crds.backoff import Backoff

THRESHOLD = 3
"""Failures in a row that open a circuit."""
FIRST_PAUSE = 2.0
"""Seconds before the first probe; doubled up to LONGEST_PAUSE."""
LONGEST_PAUSE = 60.0
PROBE_SECONDS = 10.0
"""A probe must be answered within this time."""
STUCK_SECONDS = 3 * PROBE_SECONDS
"""A probe without a verdict for this long died with its control plane: another may probe."""
_MOST = THRESHOLD + 16
"""The count stays here: the pause has long been the longest."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """State of one backend's circuit; `opened_at`: when it opened, or when its probe began."""

    circuit: Circuit = "Closed"
    failures: int = 0
    opened_at: float | None = None

    @property
    def pause(self) -> float:
        """Seconds from opening to the next probe."""
        return Backoff(FIRST_PAUSE, LONGEST_PAUSE).pause(self.failures - THRESHOLD + 1)

    def due_in(self, now: float) -> float | None:
        """Seconds until a probe may begin, at least 0; None while the circuit is closed."""
        if self.circuit == "Closed":
            return None
        wait = self.pause if self.circuit == "Open" else STUCK_SECONDS
        return max(0.0, (self.opened_at or 0.0) + wait - now)

    def failed(self, now: float) -> Breaker:
        """A request failed. What comes late, while it is open already, changes nothing."""
        if self.circuit != "Closed":
            return self
        failures = min(self.failures + 1, _MOST)
        if failures < THRESHOLD:
            return replace(self, failures=failures)
        return Breaker("Open", failures, now)

    def completed(self) -> Breaker:
        """A rollout's Run was completed there: failures are counted from zero again."""
        return replace(self, failures=0) if self.circuit == "Closed" else self

    def probing(self, now: float) -> Breaker:
        """A probe begins."""
        return replace(self, circuit="HalfOpen", opened_at=now)

    def probed(self, answered: bool, now: float) -> Breaker:
        """The probe's verdict."""
        if answered:
            return Breaker("Closed", self.failures, None)
        return Breaker("Open", min(self.failures + 1, _MOST), now)

    def restarted(self, now: float) -> Breaker:
        """The server is new: if the circuit is open, its first probe is due at once."""
        return self if self.circuit == "Closed" else Breaker("Open", THRESHOLD, now - FIRST_PAUSE)
