"""A list of the nodes that workers recently could not use. New jobs exclude them. This module is pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

AVOID_SECONDS: Final = 600.0
"""The time for which a node is avoided, in seconds."""


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
