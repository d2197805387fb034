"""What stage workers and the control plane send each other: lease, heartbeat, complete, fail.

Every lease raises the rollout's fencing token; only the holder of the current token may
complete or fail it. All calls are batched, at most MAX_BATCH rollouts each.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import FailFast, Field, PlainValidator, WithJsonSchema

from rollyard_crds.rolloutjob import StageName
from rollyard_crds.task import Task
from rollyard_crds.token_arrays import PackedSegment
from rollyard_crds.trajectory import (
    MAX_REWARD,
    MAX_REWARD_OUTPUT,
    ConversationKind,
    Record,
    RewardReason,
    RunRecord,
    Transcript,
)

MAX_BATCH: Final = 64
MOST_PLACES: Final = 4096
"""The largest number of rollouts that a worker holds at once in a stage."""
MAX_LIVE_TURNS: Final = 64
"""The largest number of messages of one rollout in one heartbeat."""
MAX_LIVE_TEXT: Final = 4096
"""The number of characters of a message that people see who watch a running rollout."""
MAX_LIVE_CALLS: Final = 16
MAX_SECONDS: Final = 1e9
"""The longest time that a worker may report, in seconds. Sums of such times are finite."""
MAX_COUNT: Final = 1 << 40
"""The largest number of tokens or requests of one stage."""


class SandboxHandle(Record):
    """Where a rollout's sandbox is; Run and Eval leases go only to workers of that `node`."""

    provider: str
    id: str
    node: str
    address: str
    """As ExecClient.connect takes it: `unix:/path` or `tcp://host:port`."""
    token: str | None = None


class BackendAssignment(Record):
    """The backend that the router chose for this rollout."""

    pool: str
    url: str
    model: str
    tokenizer: str
    policy_version: str = ""


class LeaseRequest(Record):
    """A worker asks for up to `capacity` rollouts of `stages`. It waits `wait` seconds for the first."""

    worker: Annotated[str, Field(min_length=1, max_length=253)]
    node: Annotated[str, Field(min_length=1, max_length=253)]
    capacity: dict[StageName, Annotated[int, Field(ge=0, le=MOST_PLACES)]]
    """Free places per stage; at most MAX_BATCH rollouts come back in all."""
    job: str | None = None
    """Only rollouts of this job."""
    namespace: str | None = None
    wait: Annotated[float, Field(ge=0, le=60)] = 0.0


class Lease(Record):
    """One rollout in the hands of one worker."""

    rollout: str
    token: Annotated[int, Field(ge=1)]
    """Fencing token."""
    stage: StageName
    job: str
    namespace: str
    job_uid: str
    """It changes when a job is created again under the same name, and is the key for caching the spec."""
    group_id: str
    sample_index: int
    attempt: int
    """Failures so far in this stage."""
    queued_seconds: float
    lease_seconds: float
    """Heartbeat well within this time, or the rollout goes back to its queue."""
    task: Task
    sandbox: SandboxHandle | None = None
    backend: BackendAssignment | None = None
    carry: dict[str, Any] = Field(default_factory=dict)
    """The state that the previous stage left for this one (a handler's state; JSON, at most 1 MiB)."""
    trajectory: Transcript | None = None
    """Eval only: what Run recorded, without the token lists."""
    segments: list[PackedSegment] = Field(default_factory=list)
    """Eval only: the token lists, if the report of Run said `tokens_in_eval`."""


class LeaseResponse(Record):
    """The leases that a worker gets; the list is empty where nothing waits."""

    leases: list[Lease]
    draining: bool = False
    """Whether the job has ended: this worker may stop once its leases are done."""
    places: Annotated[int, Field(ge=0)] | None = None
    """The rollouts that the pool of a named job takes in Run at once, from all jobs, if it is known. For a
    job without a pool it is the most that a worker has places for."""


class LeaseRef(Record):
    """One lease: a rollout and the fencing token under which it is held."""

    rollout: str
    token: int


class LiveCall(Record):
    """A tool call of a message, shortened for people who watch."""

    name: Annotated[str, Field(max_length=128)]
    arguments: Annotated[str, Field(max_length=MAX_LIVE_TEXT)] = ""


class LiveTurn(Record):
    """One message of a rollout that is in Run, shortened for people who watch it."""

    no: Annotated[int, Field(ge=0, le=1 << 31)]
    """The place of the message in the conversation."""
    role: Annotated[str, Field(max_length=16)]
    text: Annotated[str, Field(max_length=MAX_LIVE_TEXT)] = ""
    characters: Annotated[int, Field(ge=0)] = 0
    """The number of characters of the whole text."""
    tool_calls: Annotated[list[LiveCall], Field(max_length=MAX_LIVE_CALLS)] = Field(default_factory=list)
    tokens: Annotated[int, Field(ge=0)] = 0
    """The tokens that were sampled for it."""
    seconds: float = 0.0
    """The seconds that the model took for it."""
    running: bool = False
    """Whether it is being sampled. The text is then the end of what has come so far."""


class LiveTurns(Record):
    """The messages of one rollout that its worker has not sent before."""

    rollout: str
    token: int
    """The fencing token of the lease."""
    turns: Annotated[list[LiveTurn], Field(max_length=MAX_LIVE_TURNS)]


class HeartbeatRequest(Record):
    """Renews leases, and lists the sandboxes that this node holds, so that orphans are found."""

    worker: Annotated[str, Field(min_length=1, max_length=253)]
    node: Annotated[str, Field(min_length=1, max_length=253)]
    leases: Annotated[list[LeaseRef], Field(max_length=4096)]
    sandboxes: Annotated[list[str], Field(max_length=65_536)] = Field(default_factory=list)
    """Ids of claimed sandboxes present on the node."""
    ending: Annotated[list[str], Field(max_length=65_536)] = Field(default_factory=list)
    """Those of `sandboxes` that end now, with this worker. Rollouts that wait for one start again."""
    live: Annotated[list[LiveTurns], Field(max_length=64)] = Field(default_factory=list)
    """New messages of the rollouts that the last answer called watched."""


class HeartbeatResponse(Record):
    """What a worker has to give up."""

    lost: list[LeaseRef]
    """Leases that have expired or are fenced off: the worker must stop and clean up."""
    cancelled: list[LeaseRef]
    """Cancelled rollouts: the worker must stop at once and release the sandbox."""
    orphans: list[str]
    """Those of `sandboxes` that belong to no unfinished rollout; the worker must remove them."""
    watched: list[str] = Field(default_factory=list)
    """The rollouts among the leases that somebody watches now."""


Seconds = Annotated[float, Field(ge=-MAX_SECONDS, le=MAX_SECONDS)]
"""A measured time in seconds. Differences of clocks may be rounded to a little less than 0."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class StageTimes(Record):
    """What the worker measured in this stage, in seconds."""

    active_seconds: Seconds = 0.0
    model_seconds: Seconds = 0.0
    tool_seconds: Seconds = 0.0
    own_seconds: Seconds = 0.0


GATEWAY_PROTOCOLS: Final = (
    "openai-chat",
    "openai-responses",
    "anthropic-messages",
    "google-generate-content",
)
"""The protocols of the gateway, as metrics name them."""


class GatewayStats(Record):
    """What the gateway counted in one rollout."""

    calls: Annotated[dict[Annotated[str, Field(max_length=64)], Count], Field(max_length=64)] = Field(
        default_factory=dict
    )
    """Calls that asked for a reply, by protocol, with those that were refused."""
    refused: Count = 0
    """Calls that got an error."""
    repeats: Count = 0
    """Calls that repeated an earlier one, and got its reply."""
    conversations: dict[ConversationKind, Count] = Field(default_factory=dict)
    """Conversations by kind."""
    segments: Count = 0
    """Segments that were opened after the first one of a conversation."""
    unmatched: Count = 0
    """Histories that were not those that the gateway had seen, so that a new segment was opened."""
    tokenized: Count = 0
    """Tokens of prompts that were tokenized. Those that a segment held already are not tokenized again."""


class RunStats(Record):
    """Run only: what the worker counted, for metrics and for distributing rollouts by speed."""

    sampled_tokens: Count = 0
    """Tokens that backends sampled and the trajectory keeps."""
    discarded_tokens: Count = 0
    """Sampled, but thrown away: under weights that were not verified yet, or under unknown ones."""
    requests: Count = 0
    """Requests to backends that were answered."""
    gateway: Annotated[GatewayStats | None, Field(exclude_if=lambda value: value is None)] = None
    """What the gateway counted, for an agent of type `harness`."""


def _reward(value: Any) -> float:
    # A comparison with NaN is false, and values that are not finite are therefore refused here, too.
    if type(value) not in (int, float) or not -MAX_REWARD <= value <= MAX_REWARD:
        raise ValueError(f"must be a finite number from {-MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}")
    return float(value)


Reward = Annotated[
    float,
    PlainValidator(_reward),
    WithJsonSchema({"type": "number", "minimum": -MAX_REWARD, "maximum": MAX_REWARD}),
]
"""A reward or a component of one."""


class StageResult(Record):
    """The result of a stage that was completed.

    Init gives `sandbox` and `carry`; Run `trajectory` and `segments` (and `carry`); Eval the reward.
    """

    rollout: str
    token: int
    stage: StageName
    sandbox: SandboxHandle | None = None
    carry: dict[str, Any] = Field(default_factory=dict)
    trajectory: RunRecord | None = None
    segments: Annotated[list[PackedSegment], FailFast()] = Field(default_factory=list)
    """The token lists of the trajectory."""
    tokens_in_eval: bool = False
    """Run only: whether the handler's evaluation needs the token lists, so that Eval's lease carries them."""
    reward: Reward | None = None
    reward_components: dict[str, Reward] = Field(default_factory=dict)
    reward_reason: RewardReason = ""
    """Empty where the evaluation simply decided; see `Trajectory.reward_reason`."""
    reward_output: Annotated[str, Field(max_length=MAX_REWARD_OUTPUT)] = ""
    """The end of what the evaluation printed; see `Trajectory.reward_output`."""
    stats: RunStats = Field(default_factory=RunStats)
    times: StageTimes = Field(default_factory=StageTimes)

    @property
    def transcript(self) -> Transcript | None:
        """What Run recorded, as a lease of Eval has it."""
        if self.trajectory is None:
            return None
        return self.trajectory.transcript_with([segment.sizes for segment in self.segments])


class CompleteRequest(Record):
    """Stages that were completed."""

    worker: Annotated[str, Field(min_length=1, max_length=253)]
    results: Annotated[list[StageResult], Field(min_length=1, max_length=MAX_BATCH)]


class StageFailure(Record):
    """A stage that was not completed, for infrastructure reasons."""

    rollout: str
    token: int
    stage: StageName
    reason: Annotated[str, Field(max_length=128)]
    message: Annotated[str, Field(max_length=4096)] = ""
    retryable: bool = True
    """It is false where another attempt cannot succeed (a malformed task, an unknown image)."""
    return_to: StageName | None = None
    """`init` where the sandbox was lost or is dirty; default: the same stage."""
    counts: bool = True
    """It is false for hand-overs (drain, preemption), which do not raise `attempt`."""
    times: StageTimes = Field(default_factory=StageTimes)


class FailRequest(Record):
    """Stages that were not completed."""

    worker: Annotated[str, Field(min_length=1, max_length=253)]
    failures: Annotated[list[StageFailure], Field(min_length=1, max_length=MAX_BATCH)]


Outcome = Literal["accepted", "repeated", "stale", "cancelled", "unknown"]


class OutcomeItem(Record):
    """The outcome of one result: `repeated` came before and changes nothing; `stale` is fenced off."""

    rollout: str
    outcome: Outcome


class OutcomeResponse(Record):
    """The outcome of each result or failure that was sent."""

    outcomes: list[OutcomeItem]


class RouteRequest(Record):
    """A rollout's backend failed: ask for another (or the same, if it is the only one)."""

    rollout: str
    token: int
    failed_url: str
    error: Annotated[str, Field(max_length=1024)] = ""
    blame: bool = True
    """It is false where the backend did not fail (it is being updated, or drained) and its circuit stays.
    Only the backend that the rollout is assigned to is blamed, and once for each lease."""


class RewardRequest(Record):
    """A worker in Eval asks the control plane to send an episode to the job's reward service."""

    rollout: str
    token: int
    episode: dict[str, Any]
    """The JSON object that the service gets, as docs/rewards.md describes it."""


class RewardResponse(Record):
    """The answer of a reward service, or the reason why there is none."""

    reward: float | None = None
    components: dict[str, float] = Field(default_factory=dict)
    error: Annotated[str, Field(max_length=1024)] = ""
    """The reason why there is no score; it is empty if there is one. It quotes nothing from the service."""
    retryable: bool = True
    """Whether another request may succeed, where there is an error."""


NoBackend = Literal["", "BackendsFull", "PoolPaused", "WeightsUpdating", "NoBackendReady"]


class RouteResponse(Record):
    """The backend on which a rollout continues."""

    backend: BackendAssignment | None
    """It is None where no backend is available now; ask again after `retry_after` seconds."""
    retry_after: float = 1.0
    reason: NoBackend = ""
    """The reason why there is none. Only `NoBackendReady` is a failure; the others pass when there is room,
    somebody resumes the pool, or the update ends."""
