"""The calls that read a job's results, and the records that they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import orjson

# A model is imported when it is first used, because it takes a third of a second to build all of them.
import rollyard_crds as crds

from rollyard_client.call import Call, known, listed, segment
from rollyard_client.errors import AnswerInvalid
from rollyard_client.requests.jobs import JOBS, NDJSON

if TYPE_CHECKING:
    import httpx
    from rollyard_crds.lease import LiveTurn
    from rollyard_crds.task import Task
    from rollyard_crds.trajectory import Attempt, Timings, Trajectory, UnscoredTrajectory

PARQUET: Final = "application/vnd.apache.parquet"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a job's results: JSON lines, the cursor after them, and whether no more will follow."""

    lines: list[bytes]
    cursor: str
    finished: bool
    cursors: list[str] = field(default_factory=list)
    """The cursor after each line. That of the last one does not skip what follows it on the page."""

    @property
    def cursors_after(self) -> list[str]:
        """The cursor after each line. The last one is the page's own."""
        return [*self.cursors[:-1], self.cursor] if self.cursors else []


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one task that have a reward, as a GRPO or DAPO trainer needs them."""

    group_id: str
    task_id: str
    delivered: bool
    informative: bool
    reason: str
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """A summary of one rollout, which may or may not have ended."""

    id: str
    task_id: str
    group_id: str
    sample_index: int
    stage: str | None
    status: str
    attempt: int
    reason: str
    message: str
    reward: float | None
    timings: Timings
    worker: str
    backend: str
    attempts: list[Attempt] = field(default_factory=list)
    """What did not end well so far, oldest first; see `Trajectory.attempts`."""
    attempts_dropped: int = 0

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> RolloutSummary:
        """Return the summary that a server sent. Unknown fields are left out."""
        from rollyard_crds.trajectory import Timings

        attempts = [crds.Attempt.model_validate(entry) for entry in item.get("attempts", [])]
        timings = Timings.model_validate(item["timings"])
        return known(cls, {**item, "attempts": attempts, "timings": timings})


@dataclass(frozen=True, slots=True)
class RunningRollout:
    """A rollout that has not ended, as far as it has come."""

    stage: str | None
    status: str
    turns: list[LiveTurn]
    """The messages of its conversation that its worker has sent. The last one may be in the middle of being
    sampled (`running`). A worker sends them only while somebody reads them, so the first answer has none."""
    dropped: int
    """The number of earlier messages that were dropped."""


def tasks(name: str, namespace: str, ids: Sequence[str]) -> Call[list[Task]]:
    """Return the call that reads tasks by their ids, at most 32."""

    def parse(answer: httpx.Response) -> list[Task]:
        return [crds.Task.model_validate_json(line) for line in answer.content.split(b"\n") if line]

    return Call("GET", f"{JOBS}/{segment(name)}/tasks", parse, query={"namespace": namespace, "id": [*ids]})


def page(answer: httpx.Response) -> Page:
    """Return the page that an answer holds.

    Raises:
        AnswerInvalid: It does not list one cursor for each line.
    """
    lines = [line for line in answer.content.split(b"\n") if line]
    cursors = listed_cursors(answer.headers.get("rollyard-cursors", ""))
    if len(cursors) != len(lines):
        raise AnswerInvalid(f"a page has {len(lines)} lines, and Rollyard-Cursors lists {len(cursors)}")
    return Page(
        lines,
        answer.headers["rollyard-cursor"],
        answer.headers["rollyard-finished"] == "true",
        cursors,
    )


def listed_cursors(header: str) -> list[str]:
    """Return the cursors that a header lists: their common beginning, and the steps from number to number."""
    begin, _, steps = header.partition(";")
    return [f"{begin}{number}" for number in accumulate(int(step) for step in steps.split(",") if step)]


def trajectory(line: bytes) -> Trajectory:
    """Return the Trajectory that a JSON line holds."""
    return crds.Trajectory.model_validate_json(line)


def unscored_trajectory(line: bytes) -> UnscoredTrajectory:
    """Return the UnscoredTrajectory that a JSON line holds."""
    return crds.UnscoredTrajectory.model_validate_json(line)


def group(line: bytes) -> Group:
    """Return the Group that a JSON line holds."""
    document = orjson.loads(line)
    members = [crds.Trajectory.model_validate(item) for item in document.pop("trajectories")]
    return Group(**document, trajectories=members)


def trajectories(
    name: str, namespace: str, *, cursor: str, wait: float, limit: int, status: str | None
) -> Call[Page]:
    """Return the call that reads a page of ended rollouts.

    Args:
        cursor: The cursor at which the page begins. An empty one begins at the first rollout.
        wait: The seconds that the server waits for the first item.
        limit: The largest number of items of the page.
        status: Return only rollouts that ended with this status. None selects all.
    """
    query = {"namespace": namespace, "cursor": cursor, "wait": wait, "limit": limit, "status": status}
    return Call("GET", f"{JOBS}/{segment(name)}/trajectories", page, query=query, accept=NDJSON, wait=wait)


def unscored(name: str, namespace: str, *, cursor: str, wait: float, limit: int) -> Call[Page]:
    """Return the call that reads a page of rollouts that wait for the trainer's reward.

    The arguments are those of `trajectories`.
    """
    query = {"namespace": namespace, "cursor": cursor, "wait": wait, "limit": limit}
    return Call("GET", f"{JOBS}/{segment(name)}/unscored", page, query=query, accept=NDJSON, wait=wait)


def parquet(name: str, namespace: str, *, cursor: str, limit: int) -> Call[tuple[bytes, str, bool]]:
    """Return the call that reads a Parquet file of up to `limit` trajectories.

    Its result is the file, the cursor after it, and whether nothing follows.
    """

    def parse(answer: httpx.Response) -> tuple[bytes, str, bool]:
        headers = answer.headers
        return answer.content, headers["rollyard-cursor"], headers["rollyard-finished"] == "true"

    query = {"namespace": namespace, "cursor": cursor, "limit": limit}
    return Call("GET", f"{JOBS}/{segment(name)}/trajectories", parse, query=query, accept=PARQUET)


def groups(
    name: str, namespace: str, *, cursor: str, wait: float, limit: int, informative: bool, dropped: bool
) -> Call[Page]:
    """Return the call that reads a page of ended groups. The other arguments are those of `trajectories`.

    Args:
        informative: Leave out the groups whose rewards are all equal.
        dropped: Include the groups of which too few rollouts survived.
    """
    query = {
        "namespace": namespace,
        "cursor": cursor,
        "wait": wait,
        "limit": limit,
        "informative": informative,
        "dropped": dropped,
    }
    return Call("GET", f"{JOBS}/{segment(name)}/groups", page, query=query, accept=NDJSON, wait=wait)


def rollouts(
    name: str, namespace: str, *, stage: str | None, status: str | None, retried: bool, after: str | None
) -> Call[tuple[list[RolloutSummary], str | None]]:
    """Return the call that reads a page of summaries. `after` is the continuation of the last page."""
    query: dict[str, Any] = {"namespace": namespace, "stage": stage, "status": status, "continue": after}
    if retried:
        query["retried"] = True
    return Call("GET", f"{JOBS}/{segment(name)}/rollouts", listed(RolloutSummary.of), query=query)


def rollout(name: str, namespace: str, rollout_id: str) -> Call[Trajectory]:
    """Return the call that reads the trajectory of one ended rollout."""
    path = f"{JOBS}/{segment(name)}/rollouts/{segment(rollout_id)}"
    return Call("GET", path, lambda answer: trajectory(answer.content), query={"namespace": namespace})


def running_rollout(name: str, namespace: str, rollout_id: str) -> Call[RunningRollout]:
    """Return the call that reads a rollout that has not ended."""

    def parse(answer: httpx.Response) -> RunningRollout:
        from rollyard_crds.lease import LiveTurn

        body = orjson.loads(answer.content)
        turns = [LiveTurn.model_validate(turn) for turn in body["turns"]]
        return known(RunningRollout, {**body, "turns": turns})

    path = f"{JOBS}/{segment(name)}/rollouts/{segment(rollout_id)}/live"
    return Call("GET", path, parse, query={"namespace": namespace})


def events(name: str, namespace: str) -> tuple[str, dict[str, str]]:
    """Return the path and the query of a job's event stream."""
    return f"{JOBS}/{segment(name)}/events", {"namespace": namespace}
