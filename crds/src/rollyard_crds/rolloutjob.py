"""RolloutJob: which tasks to roll out, how, and how it stands."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollyard_crds.base import API_VERSION, Condition, Model, Name, ObjectMeta, ShortText
from rollyard_crds.task import Task

EntryPointName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]*$", max_length=63)]
Seconds = Annotated[int, Field(ge=1, le=604_800)]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$", max_length=32)]
"""A Kubernetes resource quantity, such as `500m`, `2` or `2Gi`."""

StageName = Literal["init", "run", "eval"]
STAGES: tuple[StageName, ...] = ("init", "run", "eval")

MAX_INLINE_TASKS = 4096


class TaskSource(Model):
    """Where tasks come from: exactly one of a file, an inline list, or a stream."""

    url: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """`file:///path/tasks.jsonl` or any URL that fsspec opens; one JSON object a line, `.gz` too."""
    inline: Annotated[list[Task], Field(max_length=MAX_INLINE_TASKS)] | None = None
    stream: bool = False
    """Tasks are pushed over REST until the job is closed."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskSource:
        if sum((self.url is not None, self.inline is not None, self.stream)) != 1:
            raise ValueError("give exactly one of 'url', 'inline' and 'stream: true'")
        if self.inline is not None and not self.inline:
            raise ValueError("'inline' must hold at least one task")
        return self


class AgentSpec(Model):
    """The agent that talks to the model: an entry point of the group `rollyard.agents`."""

    type: EntryPointName = "tools"
    tools: Annotated[list[EntryPointName], Field(max_length=32)] = Field(
        default_factory=lambda: ["bash", "ipython", "edit", "submit"]
    )
    tool_parser: EntryPointName = "hermes"
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 20
    max_context_tokens: Annotated[int, Field(ge=16, le=10_000_000)] = 8192
    """Prompt, sampled and tool tokens together, in tokens."""
    tool_timeout_seconds: Seconds = 60
    max_tool_output_bytes: Annotated[int, Field(ge=256, le=1 << 20)] = 16_384


class SamplingSpec(Model):
    """How the policy samples; every request's seed is a hash of `seed`, task, sample and turn."""

    temperature: Annotated[float, Field(ge=0.0, le=5.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] = -1
    """-1: no limit."""
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Sampled tokens a turn."""
    seed: Annotated[int, Field(ge=0, le=(1 << 53) - 1)] = 0


class BackendRef(Model):
    """The BackendPool, in the job's namespace, that samples."""

    name: Name


class SandboxResources(Model):
    """Limits of one sandbox."""

    cpu: Quantity = "1"
    memory: Quantity = "1Gi"
    disk: Quantity = "1Gi"
    processes: Annotated[int, Field(ge=16, le=65_536)] = 512


class SandboxSpec(Model):
    """The sandbox of every rollout; tasks may add to it."""

    image: Annotated[str, Field(max_length=1024)] | None = None
    """A root folder under bubblewrap; nothing means the host's read-only system."""
    network: Literal["none"] = "none"
    resources: SandboxResources = Field(default_factory=SandboxResources)
    env: Annotated[dict[str, str], Field(max_length=256)] = Field(default_factory=dict)
    warm: Annotated[int, Field(ge=0, le=1024)] = 4
    """Sandboxes kept started and unclaimed by each Init worker."""


class StageSpec(Model):
    """One stage: its workers, how many rollouts each holds at once, its limit and retries."""

    replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 16
    timeout_seconds: Seconds = 300
    """Of work, never of waiting in the queue."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3


def _init_stage() -> StageSpec:
    return StageSpec(concurrency=16, timeout_seconds=120, max_attempts=3)


def _run_stage() -> StageSpec:
    return StageSpec(concurrency=64, timeout_seconds=600, max_attempts=2)


def _eval_stage() -> StageSpec:
    return StageSpec(concurrency=16, timeout_seconds=300, max_attempts=3)


class StagesSpec(Model):
    """The three stages, each with its own workers and limits."""

    init: StageSpec = Field(default_factory=_init_stage)
    run: StageSpec = Field(default_factory=_run_stage)
    eval: StageSpec = Field(default_factory=_eval_stage)


class FailurePolicy(Model):
    max_failed_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """The job succeeds while at most this share of its rollouts failed for infrastructure reasons."""


class RolloutJobSpec(Model):
    tasks: TaskSource
    handler: EntryPointName
    """An entry point of the group `rollyard.handlers`."""
    samples_per_task: Annotated[int, Field(ge=1, le=1024)] = 1
    min_group_size: Annotated[int, Field(ge=1, le=1024)] = 2
    agent: AgentSpec = Field(default_factory=AgentSpec)
    sampling: SamplingSpec = Field(default_factory=SamplingSpec)
    backend_ref: BackendRef | None = None
    """May be left out where the agent needs no model (`oracle`)."""
    sandbox: SandboxSpec = Field(default_factory=SandboxSpec)
    stages: StagesSpec = Field(default_factory=StagesSpec)
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Rollouts of a higher priority are leased first; equal ones share fairly between jobs."""
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    suspend: bool = False
    active_deadline_seconds: Seconds | None = None
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None

    @model_validator(mode="after")
    def _model_where_needed(self) -> RolloutJobSpec:
        if self.backend_ref is None and self.agent.type != "oracle":
            raise ValueError(f"'backendRef' is required by the agent '{self.agent.type}'")
        return self


Phase = Literal["Pending", "Init", "Run", "Eval", "Succeeded", "Failed", "Cancelled"]


class StageCounts(Model):
    """Rollouts of one stage: waiting in its queue, and leased by a worker."""

    queued: Annotated[int, Field(ge=0)] = 0
    active: Annotated[int, Field(ge=0)] = 0


class RolloutCounts(Model):
    """Counts of a job's rollouts; `total` is the sum of all the others."""

    total: Annotated[int, Field(ge=0)] = 0
    init: StageCounts = Field(default_factory=StageCounts)
    run: StageCounts = Field(default_factory=StageCounts)
    eval: StageCounts = Field(default_factory=StageCounts)
    succeeded: Annotated[int, Field(ge=0)] = 0
    """Ended with a reward, whatever the reward."""
    failed: Annotated[int, Field(ge=0)] = 0
    """Ended for infrastructure reasons; their reward is null."""
    cancelled: Annotated[int, Field(ge=0)] = 0


class RolloutJobStatus(Model):
    phase: Phase = "Pending"
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(default_factory=list)
    observed_generation: Annotated[int, Field(ge=0)] = 0
    counts: RolloutCounts = Field(default_factory=RolloutCounts)
    start_time: datetime | None = None
    completion_time: datetime | None = None
    reward_mean: float | None = None
    """Mean reward of the rollouts that have one."""
    message: ShortText = ""


class RolloutJob(Model):
    api_version: Literal["rollyard.dev/v1alpha1"] = API_VERSION
    kind: Literal["RolloutJob"] = "RolloutJob"
    metadata: ObjectMeta
    spec: RolloutJobSpec
    status: RolloutJobStatus = Field(default_factory=RolloutJobStatus)
