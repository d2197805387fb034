"""Records of ended rollouts, read once for the many pieces that a page requests.

A record of 100,000 tokens takes some 20 MB as Python objects and 1 MB as arrays, so token lists stay the raw
arrays that the trajectory store has. The newest records stay in memory, up to a number of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import sqlalchemy as sa
from rollyard_crds.token_arrays import PackedSegment
from rollyard_crds.trajectory import turns_said
from sqlalchemy.engine import Connection

from rollyard_api.core.problems import NotFound
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import rollouts
from rollyard_api.trajectories.delivery import Piece

MAX_BYTES: Final = 128 << 20
"""The number of bytes that the kept records take together, by an estimate."""
MAX_ONE: Final = 32 << 20
"""The size in bytes from which a record is not kept."""
_RUN_BYTES: Final = 256
"""The bytes that a run of equal policy versions takes as Python objects."""


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """A conversation of a rollout: its own one, or a branch."""

    head: dict[str, Any]
    """A branch without its messages and turns. It is empty for the own conversation."""
    messages: list[dict[str, Any]]
    turns: list[dict[str, Any]]
    turn_of: dict[int, int]
    """The number of the turn that produced a message, by the message's number."""


@dataclass(frozen=True, slots=True)
class CompactRecord:
    """An ended rollout's record."""

    head: dict[str, Any]
    """The record without its segments and conversations."""
    conversations: dict[int, RecordedConversation]
    """The conversations by their numbers, the own one first."""
    segments: list[PackedSegment]
    size: int
    """The bytes that it takes, by an estimate."""

    @property
    def own(self) -> RecordedConversation:
        """The rollout's own conversation."""
        return next(iter(self.conversations.values()))


def compact(data: Piece) -> CompactRecord:
    """Return a record that is given in the form of `packed`. This call belongs in a thread."""
    head = msgpack.unpackb(data)
    segments = [PackedSegment.unchecked(segment) for segment in head.pop("segments")]
    conversations = {head.get("conversation", 0): _conversation({}, head)}
    conversations |= {branch["number"]: _conversation(branch, branch) for branch in head.pop("branches", ())}
    runs = sum(len(segment.policy_versions.runs) for segment in segments)
    # Anything but tokens takes as much memory as here, give or take the objects around short texts.
    return CompactRecord(head, conversations, segments, 2 * len(data) + _RUN_BYTES * runs + 4096)


def _conversation(head: dict[str, Any], document: dict[str, Any]) -> RecordedConversation:
    """Return the conversation of a document, from which its messages and turns are taken."""
    messages, turns = document.pop("messages", []), document.pop("turns", [])
    numbers = turns_said([message.get("role", "") for message in messages], len(turns))
    return RecordedConversation(head, messages, turns, numbers)


def row_of(conn: Connection, job: JobRow, rollout: str, query: sa.Select[Any]) -> Any:
    """Return the row of one of a job's rollouts in a query of `rollouts`.

    Raises:
        NotFound: The job has no such rollout.
    """
    row = conn.execute(query.where(rollouts.c.job_id == job.id, rollouts.c.id == rollout)).one_or_none()
    if row is None:
        raise NotFound(f"RolloutJob {job.name!r} has no rollout {rollout[:128]!r}", reason="RolloutNotFound")
    return row


class KeptRecords:
    """The records that were read last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], CompactRecord] = OrderedDict()
        self._bytes = 0

    def get(self, uid: str, rollout: str) -> CompactRecord | None:
        """Return the record of a rollout of the job with this uid, or None if it is not kept."""
        record = self._kept.get((uid, rollout))
        if record is not None:
            self._kept.move_to_end((uid, rollout))
        return record

    def put(self, uid: str, rollout: str, record: CompactRecord) -> None:
        """Keep a record, and forget the oldest ones for which there is no room."""
        if record.size > MAX_ONE or (uid, rollout) in self._kept:
            return
        self._kept[uid, rollout] = record
        self._bytes += record.size
        while self._bytes > MAX_BYTES:
            _, old = self._kept.popitem(last=False)
            self._bytes -= old.size
