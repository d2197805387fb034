"""Nodes that workers could not use lately: the next ones are submitted with `--exclude`. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

AVOID_SECONDS = 600.0


class Avoided:
    """Some nodes, each for ten minutes, and only as long as another one will do."""

    def __init__(self) -> None:
        self._until: dict[str, datetime] = {}

    def note(self, node: str, now: datetime) -> None:
        """A worker ended there because of the node."""
        if node:
            self._until[node] = now + timedelta(seconds=AVOID_SECONDS)

    def pass_time(self, now: datetime) -> None:
        """Those whose time is over may be tried again."""
        self._until = {node: until for node, until in self._until.items() if until > now}

    def clear(self) -> None:
        """No other node will do: rather these again than none."""
        self._until.clear()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their names, sorted."""
        return tuple(sorted(self._until))
