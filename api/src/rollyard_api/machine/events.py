"""What can happen to a rollout. `rollout.decide` says what follows from each event.

The reports of workers carry the fencing token of their lease, because only the holder of the last lease is
believed. The other events are found by the control plane itself, about rollouts whose rows it has locked.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct
from rollyard_crds.lease import GatewayStats, StageTimes
from rollyard_crds.rolloutjob import StageName

NO_BACKEND: Final = "NoBackend"
"""The reason of a rollout whose pool had no ready backend for too long."""
BACKEND_UNAVAILABLE: Final = "BackendUnavailable"
"""The reason of a Run whose backend did not answer."""
REWARD_NOT_GIVEN: Final = "RewardNotGiven"
"""The reason of a rollout whose reward the trainer did not hand in in time."""
NO_TIMES: Final = StageTimes()


class InitSandbox(Struct, frozen=True):
    """The sandbox that an Init has made."""

    id: str
    node: str
    """The node whose workers reach the sandbox."""
    handle: bytes
    """The whole SandboxHandle as JSON, which leases carry."""


class RunCounts(Struct, frozen=True):
    """What is counted in the trajectory of a Run."""

    turns: int = 0
    tool_calls: int = 0
    cut: str = ""
    """Why the trajectory was truncated, or ""."""
    open_thought: bool = False
    """Whether the last turn was cut inside a thought that had not ended."""
    logprobs: str = ""
    """The `signs.doubtful_kind` of the log-probabilities, or ""."""
    written_calls: int = 0
    """The calls that the policy wrote, of which `malformed_calls` cannot be read."""
    malformed_calls: int = 0
    template_breaks: int = 0
    sampled_tokens: int = 0
    """The sampled tokens that the trajectory keeps."""
    spent_tokens: int = 0
    """The tokens that the backend sampled, kept or discarded."""
    gateway: GatewayStats | None = None
    """What the gateway counted, for an agent of type `harness`."""


class Leased(Struct, frozen=True):
    """The rollout is leased to a worker of the stage that it waits for."""

    worker: str
    node: str
    expires: float
    """When the lease expires unless it is renewed, in seconds since the epoch."""
    backend: str | None = None
    """The URL of the assigned backend; None leaves the rollout's backend as it is."""
    policy_index: int | None = None
    """The index of that backend's weights, if a backend is assigned."""


class InitDone(Struct, frozen=True):
    """The holder reports that Init is complete."""

    token: int
    sandbox: InitSandbox | None = None
    carry: bytes | None = None
    """What Init leaves for Run, packed, or None if it is empty."""
    times: StageTimes = NO_TIMES


class RunDone(Struct, frozen=True):
    """The holder reports that Run is complete."""

    token: int
    record: bytes
    """The trajectory without its token lists, packed."""
    segments: bytes | None = None
    """The token lists, packed."""
    tokens_in_eval: bool = False
    """Whether the handler's evaluation needs the token lists."""
    carry: bytes | None = None
    """What Run leaves for Eval, packed, or None if that of Init stays."""
    counts: RunCounts = RunCounts()
    trainer_scores: bool = False
    """Whether the trainer gives the rewards of the job, which the control plane has looked up."""
    times: StageTimes = NO_TIMES


class Scored(Struct, frozen=True):
    """The holder reports the reward that Eval gives."""

    token: int
    reward: float
    components: bytes | None = None
    """The reward's components as JSON, or None if there are none."""
    reason: str | None = None
    output: str | None = None
    """The end of what the evaluation printed."""
    times: StageTimes = NO_TIMES


class Failed(Struct, frozen=True):
    """The holder reports that a stage was not completed because of the infrastructure."""

    token: int
    stage: StageName
    reason: str
    """The reason in CamelCase."""
    message: str = ""
    return_to: StageName | None = None
    """The stage to start again from; None stands for the same stage."""
    retryable: bool = True
    """Whether another attempt may succeed."""
    counts: bool = True
    """Whether it counts as an attempt. It is false for hand-overs and preemptions."""
    pool_is_down: bool = False
    """Whether the job's pool has no ready backend, which the control plane has looked up."""
    times: StageTimes = NO_TIMES

    @property
    def is_outage(self) -> bool:
        """Whether a Run failed because its pool had no ready backend.

        A worker that knows this reports the reason NoBackend. The others report BackendUnavailable, and the
        control plane checks the pool.
        """
        no_backend = self.reason == NO_BACKEND or (self.pool_is_down and self.reason == BACKEND_UNAVAILABLE)
        return no_backend and self.stage == "run"


class LeaseLost(Struct, frozen=True):
    """The lease has expired, or a driver saw its worker die."""

    reason: Literal["LeaseExpired", "WorkerDied"]
    message: str


class NodeLost(Struct, frozen=True):
    """The sandboxes of a node are gone, and with them that of a rollout that waits."""

    message: str
    reason: str = "NodeGone"


class NewWeights(Struct, frozen=True):
    """The pool got weights for which the rollout is too old, or its backend got others during Run."""

    reason: str
    message: str
    cancel: bool = False
    """Whether the rollout is cancelled instead of queued at Init again."""


class BackendAwaited(Struct, frozen=True):
    """The rollout has waited in a queue for a backend for too long."""

    message: str
    reason: str = NO_BACKEND


class Rewarded(Struct, frozen=True):
    """The trainer hands in the reward that the rollout waits for."""

    fence: int | None
    """The token of the Run that the reward is for; None stands for the only one that was ever offered."""
    reward: float
    components: bytes | None = None
    """The reward's components as JSON, or None if there are none."""
    reason: str | None = None


class RewardAwaited(Struct, frozen=True):
    """The rollout has waited for the trainer's reward for too long."""

    message: str
    reason: str = REWARD_NOT_GIVEN


class Cancelled(Struct, frozen=True):
    """The rollout is no longer needed: it, its group or its job was cancelled, or a target is met."""

    reason: str


class Moved(Struct, frozen=True):
    """The holder asked for another backend, and was assigned this one."""

    token: int
    backend: str


class Blamed(Struct, frozen=True):
    """The holder reported that a request to this backend failed, which counts once for each lease."""

    token: int
    backend: str


Report = InitDone | RunDone | Scored | Failed
"""The events that a worker reports at the end of a stage."""
Event = (
    Leased
    | Report
    | LeaseLost
    | NodeLost
    | NewWeights
    | BackendAwaited
    | Rewarded
    | RewardAwaited
    | Cancelled
    | Moved
    | Blamed
)
