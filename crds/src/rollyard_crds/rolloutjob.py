"""RolloutJob: which tasks to roll out, how, and how far that has got."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from rollyard_crds.base import (
    API_VERSION,
    IMMUTABLE,
    LIST_MAP_BY_TYPE,
    Condition,
    Model,
    Name,
    ObjectMeta,
    PlacementName,
    cel,
)
from rollyard_crds.base import EntryPointName as EntryPointName
from rollyard_crds.fields import reward as reward_rules
from rollyard_crds.fields.allowed_hosts import MAX_HOSTS, AllowedHost, HostRule
from rollyard_crds.fields.dynamic_sampling import JOB_RULES, DynamicSampling, DynamicSamplingStatus
from rollyard_crds.fields.eval_carry import EvalCarry
from rollyard_crds.fields.harbor import HarborOptions
from rollyard_crds.fields.plugins import OfferingPlugin, UsedPlugin
from rollyard_crds.fields.pod_template import PodTemplate
from rollyard_crds.fields.reward import RewardSpec
from rollyard_crds.fields.sandbox import HOSTS_NEED_ALLOWLIST, HOSTS_NEED_ALLOWLIST_RULE
from rollyard_crds.fields.sandbox import SandboxResources as SandboxResources
from rollyard_crds.fields.sandbox import SandboxSpec as SandboxSpec
from rollyard_crds.fields.skipped_rows import SkippedRows as SkippedRows
from rollyard_crds.names import STAGES as STAGES
from rollyard_crds.names import StageName as StageName
from rollyard_crds.task import Task

Seconds = Annotated[int, Field(ge=1, le=604_800)]

MAX_INLINE_TASKS: Final = 4096
MAX_PLUGINS: Final = 36
"""The largest number of plugins that a job can use: for its handler, agent, parser, function and 32 tools."""


class ConfigMapSource(Model):
    """A key of a ConfigMap in the job's namespace, whose value has one JSON object a line."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the ConfigMap."""
    key: Annotated[str, Field(min_length=1, max_length=253)] = "tasks.jsonl"
    """Its key."""


_ONE_SOURCE: Final = "give exactly one of 'url', 'inline', 'configMapRef' and 'stream: true'"


_NO_CHOICE_IN_A_STREAM: Final = (
    "a stream takes tasks as they are pushed: it has no format, limit, shuffle or epochs"
)
_INLINE_IS_OURS: Final = "inline tasks are in the format 'rollyard'"
_SPECS_NEED_A_FILE: Final = "'specs' goes with 'url'"
_BAD_ROWS_NEED_A_FILE: Final = "'onBadRow' goes with 'url' or 'configMapRef'"
_HARBOR_ALONE: Final = "'harbor' goes with 'format: harbor'"
_NETWORK_TO_ALLOW: Final = (
    "'tasks.harbor.network: allow' needs 'sandbox.network: allowlist' or 'stages.eval.network: allowlist'"
)


class Shuffle(Model):
    """The order of the tasks, which depends on their ids, the seed and the epoch."""

    seed: Annotated[int, Field(ge=0, le=(1 << 53) - 1)] = 0
    """Another seed gives another order."""


class TaskSource(Model):
    """The source of the tasks: exactly one of a file, an inline list, a ConfigMap, or a stream."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                "(has(self.url) ? 1 : 0) + (has(self.inline) ? 1 : 0) + (has(self.configMapRef) ? 1 : 0)"
                " + (self.stream ? 1 : 0) == 1",
                _ONE_SOURCE,
            ),
            ("!has(self.inline) || size(self.inline) > 0", "'inline' must hold at least one task"),
            (
                "!self.stream || !(has(self.format) || has(self.limit) || has(self.shuffle)"
                " || has(self.epochs) || has(self.deduplicate) || has(self.specs))",
                _NO_CHOICE_IN_A_STREAM,
            ),
            ("!has(self.inline) || !has(self.format) || self.format == 'rollyard'", _INLINE_IS_OURS),
            ("!has(self.specs) || has(self.url)", _SPECS_NEED_A_FILE),
            ("!has(self.onBadRow) || has(self.url) || has(self.configMapRef)", _BAD_ROWS_NEED_A_FILE),
            ("!has(self.harbor) || (has(self.format) && self.format == 'harbor')", _HARBOR_ALONE),
        )
    )

    url: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A file with one JSON object a line, which may be compressed (`.gz`, `.bz2`, `.xz`), or a Parquet file:
    `blob:sha256:HEX`, an upload of this namespace (`rollyard submit` makes one of a local file), or a
    `file://`, `http(s)://` or bucket URL that the control plane's installer allows."""
    inline: Annotated[list[Task], Field(max_length=MAX_INLINE_TASKS)] | None = None
    """The tasks themselves."""
    config_map_ref: ConfigMapSource | None = None
    """Kubernetes only: the tasks stand in a ConfigMap, read once when the job is first seen."""
    stream: bool = False
    """Tasks are pushed over REST until the job is closed."""
    format: EntryPointName | None = None
    """How rows become tasks: an entry point of `rollyard.task_formats`; default: `rollyard`, a task a row."""
    specs: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A JSON file that the format needs beside its rows: for `swebench`, how the tests of rows from before
    SWE-bench 5 are run. `rollyard submit` uploads it; the server takes `blob:sha256:HEX` only."""
    on_bad_row: Literal["refuse", "skip"] | None = None
    """`refuse`: a row that is not a task makes the whole list invalid. `skip`: it is left out, and
    `status.skippedRows` says so; a list without any task is refused. Default: `refuse`."""
    harbor: HarborOptions | None = None
    """Settings for all task folders of the format `harbor`."""
    deduplicate: bool | None = None
    """Whether tasks that repeat an earlier one, except for id and metadata, are left out; default: no."""
    shuffle: Shuffle | None = None
    """The order of the tasks. Default: that of the file."""
    limit: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """The most tasks that are taken, after `deduplicate` and `shuffle`; default: all."""
    epochs: Annotated[int, Field(ge=1, le=1000)] | None = None
    """How often each task is rolled out, under another id each time (`ID:epoch2`); default: once."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskSource:
        sources = (self.url, self.inline, self.config_map_ref)
        if sum(source is not None for source in sources) + self.stream != 1:
            raise ValueError(_ONE_SOURCE)
        if self.inline is not None and not self.inline:
            raise ValueError("'inline' must hold at least one task")
        options = (self.format, self.deduplicate, self.shuffle, self.limit, self.epochs, self.specs)
        if self.stream and any(option is not None for option in options):
            raise ValueError(_NO_CHOICE_IN_A_STREAM)
        if self.inline is not None and self.format not in (None, "rollyard"):
            raise ValueError(_INLINE_IS_OURS)
        if self.specs is not None and self.url is None:
            raise ValueError(_SPECS_NEED_A_FILE)
        if self.on_bad_row is not None and self.url is None and self.config_map_ref is None:
            raise ValueError(_BAD_ROWS_NEED_A_FILE)
        if self.harbor is not None and self.format != "harbor":
            raise ValueError(_HARBOR_ALONE)
        return self


ASSUMED_CONTEXT: Final = 8192
"""The context, in tokens, of a model for which neither the job nor the server nor a config.json states it."""
_LEAST_OUTPUT: Final = 4096  # The bounds of a derived `maxToolOutputBytes`, in bytes.
_MOST_OUTPUT: Final = 65_536
_UNKNOWN_CONTEXT_OUTPUT: Final = 16_384


HARNESS: Final = "harness"
"""The agent that runs a program in the sandbox, whose calls to the model go through the gateway."""
MAX_AGENT_FILE: Final = 1 << 18
"""The most characters of one of `agent.files`."""
COMMAND: Final = "command"
"""The harness that is nothing but `agent.command`."""
_HARNESS_FIELDS: Final = "'harness' goes with 'type: harness', and 'type: harness' with 'harness'"
_HARNESS_OPTIONS: Final = "'command', 'terminal', 'files' and 'trainedConversations' go with 'type: harness'"
_COMMAND_NEEDED: Final = "'harness: command' needs 'command'"
_OWN_FILES: Final = ("messages.json", "prompt.txt")
"""The files in a harness's folder that hold the task."""
_FILES_OF_THE_TASK: Final = "'files' cannot hold 'messages.json' and 'prompt.txt', which are the task's"
TrainedConversation = Literal["main", "subagent", "title", "compaction", "other"]


class AgentSpec(Model):
    """The agent that talks to the model: an entry point of the group `rollyard.agents`."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("has(self.harness) == (has(self.type) && self.type == 'harness')", _HARNESS_FIELDS),
            (
                "has(self.harness) || !(has(self.command) || has(self.terminal) || has(self.files)"
                " || has(self.trainedConversations))",
                _HARNESS_OPTIONS,
            ),
            ("!has(self.harness) || self.harness != 'command' || has(self.command)", _COMMAND_NEEDED),
            (
                "!has(self.files) || !('messages.json' in self.files || 'prompt.txt' in self.files)",
                _FILES_OF_THE_TASK,
            ),
        )
    )

    type: EntryPointName = "tools"
    """`tools`, `single_turn`, `oracle`, `harness`, or an agent of an installed package."""
    harness: EntryPointName | None = None
    """With `type: harness`, the program that plays the rollout: `command`, or a preset of the group
    `rollyard.harnesses`, such as `mini-swe-agent`. Its calls to the model go through the gateway."""
    command: Annotated[str, Field(min_length=1, max_length=16_384)] | None = None
    """What `/bin/sh` runs in the work folder to start the harness. A preset adds its arguments to it, and has
    a command of its own."""
    terminal: bool | None = None
    """Whether the harness has a pseudo-terminal, else its input is empty and its output a pipe. Default: what
    the preset says; for `command`, no."""
    files: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=128)],
                Annotated[str, Field(max_length=MAX_AGENT_FILE)],
            ],
            Field(max_length=64),
        ]
        | None
    ) = None
    """Texts that the harness finds as files of these names in the folder `$ROLLYARD_HARNESS`. In a manifest
    that the command line reads, `file:PATH` stands for the text of a file beside it. They stand
    beside those of the task, `messages.json` and `prompt.txt`."""
    trained_conversations: Annotated[list[TrainedConversation], Field(max_length=8)] | None = None
    """The kinds of a harness's conversations whose tokens are in the loss mask. Calls that the policy makes
    by itself never are. Default: `main`, `subagent` and `compaction`."""
    tools: Annotated[list[EntryPointName], Field(max_length=32)] = Field(
        default_factory=lambda: ["bash", "ipython", "edit", "submit"]
    )
    """Entry points of the group `rollyard.tools` that the model may call."""
    tool_parser: EntryPointName = "auto"
    """How calls are read from the model's text: an entry point of `rollyard.tool_parsers`. `auto`
    chooses by the model's chat template. A named one also explains the tools to the model, in the system
    message, where the template does not show them."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template beside messages and tools, such as `enable_thinking: false`."""
    thoughts: Literal["separate", "answer"] | None = None
    """`separate`: the thought of the last message is not part of the answer. `answer`: the whole message is
    the answer. Default: `separate`."""
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 20
    """The most sampled assistant turns; a rollout that needs more is evaluated as truncated. Calls that an
    agent replays do not count."""
    max_context_tokens: Annotated[int, Field(ge=16, le=10_000_000)] | None = None
    """The most tokens of the prompt, the samples and the tools together. A task whose prompt leaves no room
    fails. Default: the context of the server; where it reports none, `max_position_embeddings` of the
    config.json beside the tokenizer, else 8,192."""
    tool_timeout_seconds: Seconds = 60
    """The limit of one tool call; the call is interrupted and the session continues."""
    max_tool_output_bytes: Annotated[int, Field(ge=256, le=1 << 20)] | None = None
    """The limit of one tool call's output; longer output keeps its head and tail. Default: about a quarter of
    the context, which is a byte for each of its tokens, from 4,096 to 65,536; 16,384 for an unknown
    context."""

    @model_validator(mode="after")
    def _harness_complete(self) -> AgentSpec:
        if (self.harness is not None) != (self.type == HARNESS):
            raise ValueError(_HARNESS_FIELDS)
        options = (self.command, self.terminal, self.files, self.trained_conversations)
        if self.harness is None and any(option is not None for option in options):
            raise ValueError(_HARNESS_OPTIONS)
        if self.harness == COMMAND and self.command is None:
            raise ValueError(_COMMAND_NEEDED)
        if any(name in (self.files or ()) for name in _OWN_FILES):
            raise ValueError(_FILES_OF_THE_TASK)
        return self

    @property
    def trained(self) -> frozenset[str]:
        """The kinds of conversations whose sampled tokens are in the loss mask."""
        if self.trained_conversations is None:
            return frozenset(("main", "subagent", "compaction"))
        return frozenset(self.trained_conversations)

    def tool_output_bytes(self, context: int | None) -> int:
        """Return the limit of one tool call's output in a context of so many tokens, or an unknown one."""
        if self.max_tool_output_bytes is not None:
            return self.max_tool_output_bytes
        if context is None:
            return _UNKNOWN_CONTEXT_OUTPUT
        # A token has about four bytes, so this is a quarter of the context.
        return min(max(context, _LEAST_OUTPUT), _MOST_OUTPUT)


class SamplingSpec(Model):
    """How the policy samples; every request's seed is a hash of `seed`, task, sample and turn."""

    temperature: Annotated[float, Field(ge=0.0, le=5.0)] = 1.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """1: no limit."""
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] = -1
    """-1: no limit."""
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """The most sampled tokens of a turn; default: what is left of the context."""
    seed: Annotated[int, Field(ge=0, le=(1 << 53) - 1)] = 0
    """Base of every request's seed."""


class BackendRef(Model):
    """The BackendPool, in the job's namespace, that samples."""

    name: Name
    """Name of the BackendPool."""


_BOUNDS: Final = "'maxReplicas' must be at least 'replicas'"
_BOUNDS_RULE: Final = ("!has(self.maxReplicas) || self.maxReplicas >= self.replicas", _BOUNDS)
_CARRY_NEEDS_FRESH: Final = "'carry' needs 'sandbox: fresh': a shared sandbox holds all that Run left"
_NETWORK_NEEDS_FRESH: Final = (
    "'network: allowlist' needs 'sandbox: fresh': in a shared sandbox, what Run left decides what is fetched"
)


class StageSpec(Model):
    """One stage: its workers, how many rollouts each holds at once, its time limit and retries."""

    model_config = ConfigDict(json_schema_extra=cel(_BOUNDS_RULE))

    replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Worker processes; with `maxReplicas`, the smallest number of them."""
    max_replicas: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """As many workers as the queue keeps busy, at most this many; default: always `replicas`."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Rollouts that each worker holds at once."""
    timeout_seconds: Seconds = 300
    """The limit of the work, without the time in the queue."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Tries of one rollout in this stage before it ends as Failed."""
    template: PodTemplate = Field(default_factory=PodTemplate)
    """Kubernetes only: image, resources and placement of the workers' pods."""

    @model_validator(mode="after")
    def _ordered_bounds(self) -> StageSpec:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(_BOUNDS)
        return self


class InitStageSpec(StageSpec):
    """Init: makes the sandbox ready."""

    concurrency: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rollouts that each worker holds at once."""
    timeout_seconds: Seconds = 120
    """The limit of the work, without the time in the queue."""


class RunStageSpec(StageSpec):
    """Run: the agent and the model."""

    concurrency: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Rollouts that each worker holds at once. Default: as many as the pool has places for (the
    `maxActiveRollouts` of its backends), at most 1,024; 64 without a `backendRef`."""
    timeout_seconds: Seconds = 1800
    """The limit of the work, without the time in the queue; past it a rollout is evaluated as truncated."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 2
    """Tries of one rollout in this stage before it ends as Failed."""


EvalSandbox = Literal["shared", "fresh"]

_MOST_OF_A_POOL: Final = 1024  # Where a pool bounds Run, its places are the bound up to this number.
DEFAULT_PLACES: Final[Mapping[StageName, int]] = {"init": 16, "run": 64, "eval": 16}
"""The rollouts that a worker holds at once in each stage where neither a job nor a pool says more."""


class EvalStageSpec(StageSpec):
    """Eval: the reward."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            _BOUNDS_RULE,
            ("!has(self.carry) || !has(self.sandbox) || self.sandbox == 'fresh'", _CARRY_NEEDS_FRESH),
            HOSTS_NEED_ALLOWLIST_RULE,
            (
                "has(self.allowedHosts) == has(oldSelf.allowedHosts)",
                "'allowedHosts' is immutable: delete the job and create it again",
            ),
            (
                "!has(self.allowedHosts) || !has(self.sandbox) || self.sandbox == 'fresh'",
                _NETWORK_NEEDS_FRESH,
            ),
        )
    )

    concurrency: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rollouts that each worker holds at once."""
    sandbox: EvalSandbox | None = None
    """`shared`: the sandbox that Run used, with all that it left. `fresh`: a new one that only Init has
    prepared, with what `carry` names. Default: `fresh` where `carry` or a network is given, else what the
    handler says."""
    carry: EvalCarry | None = None
    """The files that are carried into a fresh sandbox. Default: none, only what the policy submitted."""
    network: Literal["none", "allowlist"] | None = None
    """`allowlist`: hidden tests reach `allowedHosts` as `sandbox.network` says, in a fresh sandbox that gets
    nothing executable and no settings of Run. Default: `none`."""
    allowed_hosts: (
        Annotated[list[AllowedHost], Field(min_length=1, max_length=MAX_HOSTS, json_schema_extra=IMMUTABLE)]
        | None
    ) = None
    """As `sandbox.allowedHosts`. The installer must allow each of them for Eval."""

    @model_validator(mode="after")
    def _into_a_fresh_one(self) -> EvalStageSpec:
        if self.carry is not None and self.sandbox == "shared":
            raise ValueError(_CARRY_NEEDS_FRESH)
        if (self.allowed_hosts is not None) != (self.network == "allowlist"):
            raise ValueError(HOSTS_NEED_ALLOWLIST)
        if self.allowed_hosts is not None and self.sandbox == "shared":
            raise ValueError(_NETWORK_NEEDS_FRESH)
        for host in self.allowed_hosts or ():
            try:
                HostRule.parse(host)
            except ValueError as error:
                raise ValueError(f"'allowedHosts': {error}") from error
        return self


def _given_fields(value: Any) -> Any:
    # What a general StageSpec leaves open takes this stage's own defaults.
    if type(value) is StageSpec:
        return value.model_dump(exclude_unset=True)
    return value


class StagesSpec(Model):
    """The three stages, each with its own workers and limits."""

    init: Annotated[InitStageSpec, BeforeValidator(_given_fields)] = Field(default_factory=InitStageSpec)
    """Makes the sandbox ready."""
    run: Annotated[RunStageSpec, BeforeValidator(_given_fields)] = Field(default_factory=RunStageSpec)
    """The agent and the model."""
    eval: Annotated[EvalStageSpec, BeforeValidator(_given_fields)] = Field(default_factory=EvalStageSpec)
    """The reward."""


class FailurePolicy(Model):
    """How many rollouts may fail before the job does."""

    max_failed_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """The job succeeds while at most this share of its rollouts failed for infrastructure reasons."""


_NONE_BEFORE_EVAL: Final = frozenset({"code", "math", "stem", "unscored"})
"""Our handlers for which no sandbox is started before Eval."""
_TOOLS_WITHOUT: Final = frozenset({"submit"})
"""Our tools that need no sandbox."""


class RolloutJobSpec(Model):
    """Which tasks to roll out, and how."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                "has(self.backendRef) || self.agent.type == 'oracle'",
                "'backendRef' is required by every agent but 'oracle'",
            ),
            (
                "has(self.backendRef) == has(oldSelf.backendRef)",
                "'backendRef' is immutable: delete the job and create it again",
            ),
            (
                "has(self.placement) == has(oldSelf.placement)",
                "'placement' is immutable: delete the job and create it again",
            ),
            (
                "!has(self.tasks.harbor) || !has(self.tasks.harbor.network) || "
                "self.tasks.harbor.network != 'allow' || "
                "(has(self.sandbox) && has(self.sandbox.allowedHosts)) || "
                "(has(self.stages) && has(self.stages.eval) && has(self.stages.eval.allowedHosts))",
                _NETWORK_TO_ALLOW,
            ),
            *JOB_RULES,
            *reward_rules.JOB_RULES,
        )
    )

    tasks: Annotated[TaskSource, Field(json_schema_extra=IMMUTABLE)]
    """Where the tasks come from."""
    handler: Annotated[EntryPointName, Field(json_schema_extra=IMMUTABLE)]
    """An entry point of the group `rollyard.handlers`."""
    reward: Annotated[RewardSpec, Field(json_schema_extra=IMMUTABLE)] | None = None
    """How the reward is made; default: it is what the handler returns."""
    samples_per_task: Annotated[int, Field(ge=1, le=1024, json_schema_extra=IMMUTABLE)] = 1
    """Rollouts of each task; together they are its group."""
    min_group_size: Annotated[int, Field(ge=1, le=1024, json_schema_extra=IMMUTABLE)] = 2
    """A group with failed members is delivered if at least this many others remain."""
    dynamic_sampling: Annotated[DynamicSampling, Field(json_schema_extra=IMMUTABLE)] | None = None
    """The job runs until enough groups have a signal; default: every task is rolled out."""
    agent: AgentSpec = Field(default_factory=AgentSpec, json_schema_extra=IMMUTABLE)
    """Who talks to the model."""
    sampling: SamplingSpec = Field(default_factory=SamplingSpec, json_schema_extra=IMMUTABLE)
    """How the policy samples."""
    backend_ref: Annotated[BackendRef, Field(json_schema_extra=IMMUTABLE)] | None = None
    """May be left out where the agent needs no model (`oracle`)."""
    sandbox: SandboxSpec = Field(default_factory=SandboxSpec, json_schema_extra=IMMUTABLE)
    """Where the tools act."""
    stages: StagesSpec = Field(default_factory=StagesSpec)
    """Workers, limits and retries of each stage."""
    max_policy_lag: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Weight updates that may come between a rollout's first sampled token and its last; default: any."""
    stale_rollouts: Literal["Restart", "Cancel"] = "Restart"
    """The fate of a rollout that exceeds `maxPolicyLag`: it starts again, or ends as Cancelled."""
    placement: Annotated[PlacementName, Field(json_schema_extra=IMMUTABLE)] | None = None
    """The driver that runs the job, where the control plane has several; default: the one it came with."""
    backoff_limit: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Restarts of one stage worker in a row, without a completed stage in between, after which the job fails;
    default: restarted for ever."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Rollouts of a higher priority are leased first; equal ones share fairly between jobs."""
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    """When a job with failed rollouts still succeeds."""
    suspend: bool = False
    """While it is true, workers are drained and nothing starts."""
    active_deadline_seconds: Seconds | None = None
    """The time limit, counted from admission; unfinished rollouts are then cancelled and the job fails."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """The job and its trajectories are deleted this long after it ended; default: kept."""

    @model_validator(mode="after")
    def _consistent(self) -> RolloutJobSpec:
        if self.backend_ref is None and self.agent.type != "oracle":
            raise ValueError(f"'backendRef' is required by the agent '{self.agent.type}'")
        if self.dynamic_sampling is not None:
            self.dynamic_sampling.check(self.samples_per_task)
        reward_rules.check(self.handler, self.reward, stream=self.tasks.stream)
        options = self.tasks.harbor
        networks = {self.sandbox.network, self.stages.eval.network}
        if options is not None and options.network == "allow" and "allowlist" not in networks:
            raise ValueError(_NETWORK_TO_ALLOW)
        return self

    @property
    def needs_early_sandboxes(self) -> bool:
        """Whether Init and Run may need sandboxes. Of extensions of other packages it is assumed."""
        if self.agent.type == HARNESS:
            return True
        tools = () if self.agent.type == "single_turn" else self.agent.tools
        return self.handler not in _NONE_BEFORE_EVAL or any(tool not in _TOOLS_WITHOUT for tool in tools)

    @property
    def trainer_reward_seconds(self) -> int | None:
        """How long a rollout waits for the trainer's reward, or None if Eval gives the rewards."""
        return reward_rules.trainer_seconds(self.handler, self.reward)

    def extensions(self) -> list[tuple[str, str, str]]:
        """Return the extensions that the spec names: the field, the kind, as `handlers`, and the name."""
        function = None if self.reward is None else self.reward.function
        fields = [
            ("spec.tasks.format", "task_formats", self.tasks.format),
            ("spec.handler", "handlers", self.handler),
            ("spec.agent.type", "agents", self.agent.type),
            ("spec.agent.harness", "harnesses", self.agent.harness),
            ("spec.agent.toolParser", "tool_parsers", self.agent.tool_parser),
            ("spec.reward.function.name", "reward_functions", None if function is None else function.name),
            *((f"spec.agent.tools[{i}]", "tools", tool) for i, tool in enumerate(self.agent.tools)),
        ]
        return [(field, kind, name) for field, kind, name in fields if name is not None]

    @property
    def worked_stages(self) -> tuple[StageName, ...]:
        """The stages that need workers. Eval needs none where the trainer gives the rewards."""
        return STAGES if self.trainer_reward_seconds is None else STAGES[:-1]

    def places(self, stage: StageName) -> int:
        """Return how many rollouts each worker holds at once in a stage."""
        spec: StageSpec = getattr(self.stages, stage)
        if spec.concurrency is not None:
            return spec.concurrency
        return DEFAULT_PLACES[stage] if self.backend_ref is None else _MOST_OF_A_POOL


class WorkerJobSpec(RolloutJobSpec):
    """The spec of a job as its workers read it, with the installer's additions."""

    pinned_hosts: list[str] = Field(default_factory=list)
    """The installer's entries with an address that is not public, such as `pypi.org=10.1.2.3`."""
    plugins: list[OfferingPlugin] = Field(default_factory=list)
    """The plugins that the job uses. Their texts are fetched by their SHA-256."""


Phase = Literal["Pending", "Init", "Run", "Eval", "Succeeded", "Failed", "Cancelled"]


class StageCounts(Model):
    """Rollouts of one stage: waiting in its queue, and leased by a worker."""

    queued: Annotated[int, Field(ge=0)] = 0
    """Waiting."""
    active: Annotated[int, Field(ge=0)] = 0
    """Leased by a worker."""


class Advice(Model):
    """What the ended rollouts of a job show about its settings, and what to do about it."""

    reason: Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Za-z0-9]*$")]
    """What it is about, in one CamelCase word that programs may branch on."""
    message: Annotated[str, Field(max_length=512)]
    """One sentence for people. No policy has written any part of it."""


class RolloutCounts(Model):
    """Counts of a job's rollouts; `total` is the sum of all the others."""

    total: Annotated[int, Field(ge=0)] = 0
    """All rollouts so far."""
    init: StageCounts = Field(default_factory=StageCounts)
    """In Init."""
    run: StageCounts = Field(default_factory=StageCounts)
    """In Run."""
    eval: StageCounts = Field(default_factory=StageCounts)
    """In Eval."""
    succeeded: Annotated[int, Field(ge=0)] = 0
    """Ended with a reward, whatever the reward."""
    failed: Annotated[int, Field(ge=0)] = 0
    """Ended for infrastructure reasons; their reward is null."""
    cancelled: Annotated[int, Field(ge=0)] = 0
    """Ended because somebody asked, the deadline passed, or the target of dynamic sampling was met."""


class RolloutJobStatus(Model):
    """The status of a job, without single rollouts."""

    phase: Phase = "Pending"
    """For people; programs read the conditions."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(
        default_factory=list, json_schema_extra=LIST_MAP_BY_TYPE
    )
    """`Admitted`, `Suspended`, `Running`, `Degraded`; at the end `Finished` and the outcome: `Succeeded` with
    `Complete`, as a Job of Kubernetes has it, or `Failed`."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The generation of the spec that this status was made from."""
    counts: RolloutCounts = Field(default_factory=RolloutCounts)
    """Rollouts by stage and outcome."""
    start_time: datetime | None = None
    """When the job was first admitted."""
    completion_time: datetime | None = None
    """When the last rollout ended."""
    reward_mean: float | None = None
    """Mean reward of the rollouts that have one."""
    reward_text: Annotated[str, Field(max_length=32)] = ""
    """The same for people, rounded as `kubectl get` shows it. Programs read `rewardMean`."""
    dynamic_sampling: DynamicSamplingStatus | None = None
    """How far dynamic sampling has got, in a job that uses it."""
    skipped_rows: SkippedRows | None = None
    """The rows of the task list that were left out, if there are any."""
    plugins: Annotated[list[UsedPlugin], Field(max_length=MAX_PLUGINS)] = Field(default_factory=list)
    """The installer's plugins from which it has its handler, tools and the like, if there are any."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """What is wrong with it, what it waits for, or why it ended this way."""
    advice: Annotated[list[Advice], Field(max_length=16)] = Field(default_factory=list)
    """What its rollouts show about its settings, at most one sentence for each reason."""


class RolloutJob(Model):
    """A list or a stream of tasks, rolled out by an agent in sandboxes and evaluated."""

    api_version: Literal["rollyard.dev/v1alpha1"] = API_VERSION
    """Group and version of this schema."""
    kind: Literal["RolloutJob"] = "RolloutJob"
    """The kind of this object."""
    metadata: ObjectMeta
    """Name, namespace, labels, annotations."""
    spec: RolloutJobSpec
    """What is wanted."""
    status: RolloutJobStatus = Field(default_factory=RolloutJobStatus)
    """The status, which the driver and the control plane write."""
