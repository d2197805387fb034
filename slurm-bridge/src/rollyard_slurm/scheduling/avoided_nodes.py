"""Nodes that workers recently could not use, and that new jobs exclude. This module is pure."""

from __future__ import annotations

from datetime import datetime, timedelta

AVOID_SECONDS = 600.0


class AvoidedNodes:
    """Some nodes, each for ten minutes, and only while another node will do."""

    def __init__(self) -> None:
        self._until: dict[str, datetime] = {}

    def add(self, node: str, now: datetime) -> None:
        """Avoids a node, because a worker ended for a reason that lies in the node."""
        if node:
            self._until[node] = now + timedelta(seconds=AVOID_SECONDS)

    def expire(self, now: datetime) -> None:
        """Forgets the nodes whose time is over."""
        self._until = {node: until for node, until in self._until.items() if until > now}

    def clear(self) -> None:
        """Forgets all nodes, because no other node will do."""
        self._until.clear()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, sorted."""
        return tuple(sorted(self._until))
