"""The time for which the pool of a rollout has no ready backend, which is neither its fault nor a failure."""

from __future__ import annotations

from rollyard_crds.lease import RouteResponse


class Outage:
    """Adds up the seconds of outages between two answers of a backend.

    The control plane says that there is an outage when it is asked for another backend.
    """

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def lasts(self) -> bool:
        """Whether the control plane had no ready backend when it was last asked."""
        return self._since is not None

    def seconds(self, now: float) -> float:
        """Return the seconds of outages until the monotonic time `now` since the last answer."""
        return self._before + (0.0 if self._since is None else now - self._since)

    def note(self, answer: RouteResponse, now: float) -> None:
        """Take note of what the control plane answered.

        An answer without backend and reason changes nothing, because the control plane could not be asked.
        """
        if answer.backend is None and answer.reason in ("", "NoBackendReady"):
            if answer.reason and self._since is None:
                self._since = now
            return
        self._before, self._since = self.seconds(now), None

    def end(self) -> None:
        """Forget all outages, because a backend has answered."""
        self._before, self._since = 0.0, None
