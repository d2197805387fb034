"""A parser of server-sent events, and the events of a job that they carry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

# A model is imported when it is first used, because it takes a third of a second to build all of them.
import rollyard_crds as crds

from rollyard_client.call import known

if TYPE_CHECKING:
    from rollyard_crds.rolloutjob import RolloutCounts

MAX_LINE: Final = 1 << 20
LAST_EVENTS: Final = ("end", "dropped")
"""The events after which a stream ends."""


@dataclass(frozen=True, slots=True)
class StageTransition:
    """The new state of one rollout."""

    rollout: str
    """Its id."""
    stage: str | None
    """The stage that it waits for or is in, or None once it has ended."""
    status: str
    """`queued`, `leased`, `succeeded`, `failed` or `cancelled`."""
    reward: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event of a job, by its `name`.

    - `transition`: a rollout has entered or left a stage, or has ended
    - `counts`: the counts of rollouts have changed
    - `missed`: events after `last_id` are not kept any more
    - `dropped`: the reader fell behind, and the stream ends
    - `end`: the job has ended
    """

    name: str
    data: dict[str, Any]
    """The event as the server sent it, for those that `transition` and `counts` do not describe."""
    id: str = ""

    @property
    def transition(self) -> StageTransition | None:
        """The transition of a rollout, or None for another event."""
        return known(StageTransition, self.data) if self.name == "transition" else None

    @property
    def counts(self) -> RolloutCounts | None:
        """The new counts of rollouts, or None for another event."""
        return crds.RolloutCounts.model_validate(self.data) if self.name == "counts" else None


class Parser:
    """A parser from lines to events, as the HTML standard says ("event stream interpretation")."""

    def __init__(self) -> None:
        self._name = ""
        self._id = ""
        self._data: list[str] = []

    def feed(self, line: str) -> Iterator[JobEvent]:
        """Take one line without its newline, and yield the event that the line completes, if any."""
        if not line:
            if self._data:
                yield JobEvent(self._name or "message", orjson.loads("\n".join(self._data)), self._id)
            self._name, self._data, self._id = "", [], ""
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value[:MAX_LINE])
        elif name == "id":
            self._id = value
