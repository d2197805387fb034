"""Read-only calls for people: rollouts sorted, filtered and searched, and the statistics of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from rollyard_client.call import Call, as_json, known, listed, segment
from rollyard_client.requests.jobs import JOBS

RolloutSort = Literal[
    "id", "ended", "-ended", "reward", "-reward", "duration", "-duration", "-tokens", "since"
]
PAGE_ROWS: Final = 200


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """Which rollouts of a job are listed, and in which order. None and "" stand for no restriction.

    An order or a filter by what only ended rollouts have lists only these. `since` lists those that have not
    ended, with the ones that have been in their state for longest first.
    """

    sort: RolloutSort = "id"
    stage: str | None = None
    status: str | None = None
    reason: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    task: str | None = None
    """The task's id."""
    after_time: float | None = None
    """The earliest end, in seconds since the epoch."""
    before_time: float | None = None
    """The time before which the rollouts ended, in seconds since the epoch."""
    search: str | None = None
    """Words that the conversation must all have, in upper or lower case."""
    retried: bool | None = None


EVERY_ROLLOUT: Final = RolloutQuery()
"""The query of all rollouts of a job, by id."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A rollout in a list, which may or may not have ended."""

    id: str
    task_id: str
    sample: int
    status: str
    """`queued`, `leased`, `succeeded`, `failed` or `cancelled`."""
    stage: str | None
    """The stage that it waits for or is in, or None once it has ended."""
    reason: str
    reward: float | None
    since: float
    """When it entered its state, in seconds since the epoch."""
    ended_at: float | None
    seconds: float
    """The seconds of work in all stages, without waits."""
    tokens: int
    """The sampled tokens."""
    attempts: int
    """The failures before this result that counted."""
    worker: str
    node: str
    policy_version: str

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> RolloutRow:
        """Return the row that a server sent. Unknown fields are left out."""
        return known(cls, item)


def rollout_rows(
    name: str, namespace: str, selection: RolloutQuery, after: str | None
) -> Call[tuple[list[RolloutRow], str | None]]:
    """Return the call that reads a page of rows. `after` is the continuation of the last page."""
    query = {**asdict(selection), "slim": True, "limit": PAGE_ROWS, "namespace": namespace, "continue": after}
    return Call("GET", f"{JOBS}/{segment(name)}/rollouts", listed(RolloutRow.of), query=query)


def statistics(name: str, namespace: str) -> Call[dict[str, Any]]:
    """Return the call that reads the statistics that the control plane keeps of a job."""
    return Call("GET", f"{JOBS}/{segment(name)}/statistics", as_json, query={"namespace": namespace})


def overview() -> Call[dict[str, Any]]:
    """Return the call that reads the overview of the fleet."""
    return Call("GET", "/v1/overview", as_json)
