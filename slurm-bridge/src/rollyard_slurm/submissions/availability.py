"""What can be used of Slurm: whether it answers, and which nodes new jobs avoid.

While Slurm does not answer, everything counts as it was last seen.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

AVOID_SECONDS: Final = 600.0
"""The time for which a node is avoided, in seconds."""


class SlurmAvailability:
    """Records whether Slurm answers.

    Args:
        say: A function that is called with a line for the user of the bridge at each change.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.trouble = ""
        """The reason why Slurm does not answer. It is empty while Slurm answers."""
        self.answered_once = False
        """Whether Slurm has answered since the bridge started. Nothing is submitted before that."""

    def lost(self, trouble: str) -> None:
        """Note that Slurm does not answer, and why."""
        if trouble != self.trouble:
            self._say(f"Slurm does not answer, everything counts as last seen: {trouble}")
        self.trouble = trouble

    def answered(self) -> None:
        """Note that Slurm answers."""
        if self.trouble:
            self._say(f"Slurm answers again (it did not: {self.trouble})")
        self.trouble = ""
        self.answered_once = True


class AvoidedNodes:
    """The nodes that new jobs avoid. Each is avoided for ten minutes, and only while other nodes will do."""

    def __init__(self) -> None:
        self._until: dict[str, datetime] = {}

    def add(self, node: str, now: datetime) -> None:
        """Add a node on which a worker ended for a reason that lies in the node."""
        if node:
            self._until[node] = now + timedelta(seconds=AVOID_SECONDS)

    def expire(self, now: datetime) -> None:
        """Forget the nodes that have been avoided for ten minutes."""
        self._until = {node: until for node, until in self._until.items() if until > now}

    def clear(self) -> None:
        """Forget all nodes. This is called when no other node will do."""
        self._until.clear()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The sorted names of the nodes."""
        return tuple(sorted(self._until))
