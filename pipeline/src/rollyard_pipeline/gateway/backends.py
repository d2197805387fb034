"""The access of one rollout to the model, of which several turns at once need several."""

from __future__ import annotations

import time
from collections.abc import Callable

from rollyard_crds.lease import BackendAssignment, RunStats

from rollyard_pipeline.backends.session import BackendSession, joined_mode


class BackendSessions:
    """The backend sessions of one rollout, each of which samples one turn at a time.

    Args:
        make: Returns a further session.
    """

    def __init__(self, make: Callable[[], BackendSession]) -> None:
        self._make = make
        self._all: list[BackendSession] = []
        self._idle: list[BackendSession] = []
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._waited_until = 0.0
        self.waited_seconds = 0.0
        """The time in which a backend was paused, updated or too busy, or none was ready, in seconds.

        Stretches in which several turns wait at the same time count once."""
        self.on_wait: Callable[[float], None] | None = None
        """Called with every stretch of such seconds as it passes."""
        self._add()

    def take(self) -> BackendSession:
        """Return a session that samples no turn. The one that was used last is taken first."""
        if len(self._idle) == len(self._all):
            self._busy_since = time.monotonic()
        if not self._idle:
            self._add()
        return self._idle.pop()

    def give_back(self, session: BackendSession) -> None:
        """Take back a session whose turn has ended."""
        session.on_tokens = None
        self._idle.append(session)
        if len(self._idle) == len(self._all):
            self._busy_seconds += time.monotonic() - self._busy_since

    @property
    def backend(self) -> BackendAssignment:
        """The backend that is used first."""
        return self._all[0].backend

    @property
    def logprobs_mode(self) -> str:
        """The kind of log-probabilities; see `BackendSession.logprobs_mode`."""
        modes: set[str] = set().union(*(session.modes for session in self._all))
        return joined_mode(modes)

    @property
    def model_seconds(self) -> float:
        """The time in which at least one turn was sampled, without `waited_seconds`, in seconds."""
        busy = len(self._idle) < len(self._all)
        running = time.monotonic() - self._busy_since if busy else 0.0
        return max(0.0, self._busy_seconds + running - self.waited_seconds)

    @property
    def stats(self) -> RunStats:
        """What was counted of all requests."""
        stats = RunStats()
        for session in self._all:
            stats.sampled_tokens += session.stats.sampled_tokens
            stats.discarded_tokens += session.stats.discarded_tokens
            stats.requests += session.stats.requests
        return stats

    def _add(self) -> None:
        session = self._make()
        if self._all:
            session.backend = self.backend  # It may be another one than that of the lease.
        session.on_wait = lambda seconds: self._waited(session.waited_until, seconds)
        self._all.append(session)
        self._idle.append(session)

    def _waited(self, until: float, seconds: float) -> None:
        """Add a stretch that ends at `until`, without what is counted of it already."""
        fresh = min(seconds, until - self._waited_until)
        if fresh > 0:
            self._waited_until = until
            self.waited_seconds += fresh
            if self.on_wait is not None:
                self.on_wait(fresh)
