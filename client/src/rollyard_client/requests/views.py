"""Read-only calls for people: rollouts sorted, filtered and searched, and the statistics of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from rollyard_client.call import Call, as_json, known, listed, segment, typed
from rollyard_client.requests.jobs import JOBS

if TYPE_CHECKING:
    import httpx

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


@dataclass(frozen=True, slots=True)
class JobWaiting:
    """What keeps a job from working."""

    reason: str
    """A stable word in CamelCase."""
    message: str
    """A sentence for people."""


def waiting(name: str, namespace: str) -> Call[JobWaiting | None]:
    """Return the call that asks what a job waits for. Its result is None if the job works or has ended."""

    def parse(answer: httpx.Response) -> JobWaiting | None:
        for row in as_json(answer)["items"]:
            if (row["namespace"], row["name"]) == (namespace, name):
                waits = row["waits_for"]
                return None if waits is None else known(JobWaiting, waits)
        return None

    query = {"namespace": namespace, "search": name, "sort": "name", "limit": PAGE_ROWS}
    return Call("GET", "/v1/jobs", parse, query=query)


@dataclass(frozen=True, slots=True)
class RewardHistogram:
    """The rewards of a job."""

    n: int
    """How many there are."""
    min: float | None
    max: float | None
    mean: float | None
    bins: list[int]
    """How many lie in each of 20 parts of equal width from `min` to `max`."""
    zeros: int
    ones: int


@dataclass(frozen=True, slots=True)
class VersionRewards:
    """The rewards of the rollouts that began under one policy version."""

    version: str
    """The version, or "" before the first weight update."""
    index: int
    n: int
    mean: float


@dataclass(frozen=True, slots=True)
class TimeBucket:
    """The rollouts that ended within some seconds."""

    start: float
    """When it begins, in seconds since the epoch."""
    seconds: float
    n: int
    mean: float | None
    """The mean of their rewards."""
    tokens: int
    """The sampled tokens."""


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The rollouts that failed for one reason."""

    reason: str
    n: int
    stage: str
    """The stage of the newest."""
    example: str
    """The id of the newest."""
    message: str
    """The message of the newest, shortened."""


@dataclass(frozen=True, slots=True)
class TruncationCount:
    """The rollouts that were truncated for one reason."""

    reason: str
    n: int


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """The seconds that the rollouts of a job spent in one stage, added up."""

    queued: float
    """In its queue."""
    active: float
    """In the stage itself."""
    n: int
    """Its attempts."""


@dataclass(frozen=True, slots=True)
class JobStatistics:
    """The statistics that the control plane keeps of the ended rollouts of a job."""

    upto: int
    """How many rollouts are in it."""
    rewards: RewardHistogram
    by_version: list[VersionRewards]
    """At most the last 200 versions, oldest first."""
    by_time: list[TimeBucket]
    failures: list[FailureCount]
    """The most frequent first."""
    truncated: list[TruncationCount]
    """The most frequent first."""
    stages: dict[str, StageSeconds]
    model_seconds: float
    """The seconds of Run in which the model sampled, added up."""
    tool_seconds: float
    """The seconds of Run in which tools ran, added up."""
    own_seconds: float
    """The other seconds of Run, added up."""
    tokens: int
    """The sampled tokens."""
    tool_calls: int
    turns: int
    last_ended_at: float | None
    """When the last rollout ended, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """The rollouts of all jobs in one stage."""

    queued: int
    active: int
    slots: int
    """The places of all workers, as far as they are known."""


@dataclass(frozen=True, slots=True)
class FleetRates:
    """What ended in each of the last buckets of time, oldest first."""

    bucket_seconds: int
    start: float
    """When the first bucket begins, in seconds since the epoch."""
    rollouts: list[int]
    tokens: list[int]
    """The sampled tokens."""


@dataclass(frozen=True, slots=True)
class BackendOverview:
    """One inference server of a pool."""

    url: str
    ready: bool
    circuit: str
    weights: str
    policy_version: str | None
    active: int
    """The rollouts that have it."""
    max_active: int | None
    speed: float | None
    """The tokens that it samples for one rollout in a second."""
    kv_hits: float | None
    """The fraction of prompt tokens that it has in its prefix cache."""
    draining: bool
    message: str


@dataclass(frozen=True, slots=True)
class PoolOverview:
    """A backend pool with its servers."""

    namespace: str
    name: str
    model: str
    phase: str
    """`Ready`, `NotReady`, `Updating` or `Paused`."""
    policy_version: str | None
    paused: bool
    backends: list[BackendOverview]


@dataclass(frozen=True, slots=True)
class NodeOverview:
    """A node with stage workers."""

    name: str
    heard_at: float
    """When one of its workers was last heard from, in seconds since the epoch."""
    workers: int
    active: int
    """The rollouts that they hold."""


@dataclass(frozen=True, slots=True)
class WorkerTrouble:
    """The last stage of a worker that did not end well."""

    time: float
    """When, in seconds since the epoch."""
    reason: str
    message: str
    rollout: str


@dataclass(frozen=True, slots=True)
class WorkerOverview:
    """A stage worker that was heard from lately, or that had trouble lately."""

    name: str
    node: str
    namespace: str | None
    """The namespace of its job."""
    job: str | None
    """Its job. None stands for a worker of all jobs."""
    stages: list[str]
    active: int
    """The rollouts that it holds."""
    heard_at: float
    """When it was last heard from, in seconds since the epoch."""
    last_error: WorkerTrouble | None


@dataclass(frozen=True, slots=True)
class FleetOverview:
    """An overview of the fleet."""

    time: float
    """When it was read, in seconds since the epoch."""
    phases: dict[str, int]
    """The number of jobs in each phase."""
    queues: dict[str, QueueLoad]
    """The load of each stage."""
    rates: FleetRates
    pools: list[PoolOverview]
    nodes: list[NodeOverview]
    workers: list[WorkerOverview]
    more: int
    """The number of workers that are left out."""


def statistics(name: str, namespace: str) -> Call[JobStatistics]:
    """Return the call that reads the statistics that the control plane keeps of a job."""
    path = f"{JOBS}/{segment(name)}/statistics"
    return Call("GET", path, typed(JobStatistics), query={"namespace": namespace})


def overview() -> Call[FleetOverview]:
    """Return the call that reads the overview of the fleet."""
    return Call("GET", "/v1/overview", typed(FleetOverview))
