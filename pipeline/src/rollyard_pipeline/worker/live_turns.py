"""What heartbeats send of rollouts that somebody watches: the messages that were not sent before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rollyard_crds.lease import LiveTurn, LiveTurns

from rollyard_pipeline.control_plane.leases import HeldLease

MAX_BYTES: Final = 1 << 20
"""The bytes of all messages in one heartbeat, by their characters."""
MAX_ROLLOUT_BYTES: Final = 64 << 10
"""The bytes of the messages of one rollout in one heartbeat."""
MAX_ROLLOUTS: Final = 64
_TURN_BYTES: Final = 256
"""About what a message takes beside its texts."""


class LiveTurnsToSend:
    """Which rollouts are watched, and how much of each was sent."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[int, int]] = {}
        """The fencing token and the number of the next message to send, by watched rollout."""

    @property
    def watched(self) -> bool:
        """Whether somebody watches a rollout of this worker."""
        return bool(self._sent)

    def take(self, held: Iterable[HeldLease]) -> list[LiveTurns]:
        """Return what is new of the watched rollouts among these leases, as much as fits into a heartbeat."""
        found: list[LiveTurns] = []
        room = MAX_BYTES
        for item in held:
            if room <= 0:
                break
            lease = item.lease
            if lease.rollout not in self._sent or item.live is None or len(found) == MAX_ROLLOUTS:
                continue
            token, first = self._sent[lease.rollout]
            if token != lease.token:
                first = 0
            turns = _fitting(item.live(first), min(room, MAX_ROLLOUT_BYTES))
            if turns:
                room -= sum(map(_size, turns))
                found.append(LiveTurns(rollout=lease.rollout, token=lease.token, turns=turns))
        return found

    def answered(self, sent: Sequence[LiveTurns], watched: Iterable[str]) -> None:
        """Note that a heartbeat with these turns arrived, and which rollouts are watched now."""
        after = {one.rollout: (one.token, one.turns[-1].no + 1) for one in sent}
        # A rollout that is watched for the first time, or again, is sent from its beginning.
        self._sent = {rollout: after.get(rollout) or self._sent.get(rollout) or (0, 0) for rollout in watched}


def _size(turn: LiveTurn) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in turn.tool_calls)
    # A character may take six bytes in JSON.
    return _TURN_BYTES + 6 * (len(turn.text) + calls)


def _fitting(turns: Sequence[LiveTurn], room: int) -> list[LiveTurn]:
    """Return the first turns that fit, but at least one if there is any room at all."""
    chosen: list[LiveTurn] = []
    for turn in turns:
        room -= _size(turn)
        if room < 0 and chosen:
            break
        chosen.append(turn)
        if room < 0:
            break
    return chosen
