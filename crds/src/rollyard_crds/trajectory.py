"""The trajectory record: what one rollout hands to a trainer.

Wire and storage form, in snake_case, because trainers read it as columns. Token ids
are canonical: `prompt_ids + response_ids` of a segment are, id for id, what the backend
read and sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from operator import not_
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, FailFast, Field, model_validator

from rollyard_crds.base import Deferred
from rollyard_crds.errors import CrdsError
from rollyard_crds.names import StageName
from rollyard_crds.task import Message

TrajectoryStatus = Literal["succeeded", "failed", "cancelled"]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "replayed"]
ConversationKind = Literal["main", "subagent", "title", "compaction", "policy", "other"]
"""What a conversation of a rollout is: the agent's own one, that of a sub-agent, a title, a summary that
replaces a history, calls that the policy made by itself from inside of the sandbox, or anything else."""
RewardReason = Annotated[str, Field(max_length=128, pattern=r"^([A-Z][A-Za-z0-9]*)?$")]
"""A CamelCase word; empty where the evaluation simply decided."""
MAX_REWARD_OUTPUT: Final = 4096
"""The largest number of characters of what an evaluation printed. Earlier characters are left out."""
MAX_ATTEMPTS: Final = 16
"""The largest number of attempts that a trajectory lists. Further ones are only counted."""
MAX_ATTEMPT_MESSAGE: Final = 512
"""The largest number of characters of an attempt's message."""
LOWEST_LOGPROB: Final = -1000.0
"""The lowest log-probability of a sampled token, in nats. No sampler draws a token of a lower one, because
e^-746 is 0 in float64. Servers write numbers such as -9999 for minus infinity."""
MAX_TEMPLATE_BREAKS: Final = (1 << 31) - 1
"""The largest number that a column of 32 bits can have."""
MAX_REWARD: Final = 1e6
"""Rewards and their components are finite and at most this far from zero."""


def _is_none(value: Any) -> bool:
    return value is None


class Record(Deferred):
    """Strict snake_case record."""

    model_config = ConfigDict(extra="forbid")


class Segment(Record):
    """One stretch of tokens that a trainer may train on as a sequence.

    `response_ids`, `loss_mask`, `logprobs` and `policy_versions` are parallel (length n):
    the mask is 1 exactly for sampled tokens; logprobs are in nats as the backend returned them, and 0.0 where
    the mask is 0; a policy version is the label under which the token was sampled, and "" where the mask is
    0.

    Raises:
        pydantic.ValidationError: lengths differ, or a masked-out token has a log-probability.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    policy_versions: list[str]

    @model_validator(mode="after")
    def _parallel(self) -> Segment:
        n = len(self.response_ids)
        for name in ("loss_mask", "logprobs", "policy_versions"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries, response_ids has {n}")
        for index, (mask, logprob) in enumerate(zip(self.loss_mask, self.logprobs, strict=True)):
            if mask not in (0, 1):
                raise ValueError(f"loss_mask[{index}] is {mask}, must be 0 or 1")
            if mask == 0 and logprob != 0.0:
                raise ValueError(f"logprobs[{index}] is {logprob} where loss_mask is 0, must be 0.0")
        return self


MALFORMED_CALL: Final = "malformed tool call: "
"""The beginning of the error of a call that the parser could not read."""


class TurnToolCall(Record):
    """One tool call of a turn, as parsed, and how it went."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None
    """Why it could not run (malformed, unknown tool, timeout); the model sees it as an observation."""
    seconds: float = 0.0


class Thought(Record):
    """The part of a turn's message that is a thought, in characters (code points) of the message's `content`.

    The thought is `content[start:end]`, and the answer is `content[answer:]`. What is between them, such as
    `</think>`, belongs to neither. A thought that is not closed ends with the content, and leaves no answer.
    """

    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=0)]
    answer: Annotated[int, Field(ge=0)]
    opened: Annotated[str, Field(max_length=32)] = ""
    """The mark with which the prompt opened the thought, such as `<think>`. It is empty if the policy opened
    it."""

    @property
    def closed(self) -> bool:
        """Whether something follows the thought, such as its closing mark."""
        return self.end < self.answer


class Turn(Record):
    """One assistant turn: where its tokens are, how it ended, and what it called."""

    segment: int
    start: int
    """First sampled token, as an index into the segment's response_ids."""
    end: int
    """One past the last sampled token."""
    finish_reason: FinishReason
    tool_calls: Annotated[list[TurnToolCall], FailFast()] = Field(default_factory=list)
    model_seconds: float = 0.0
    tool_seconds: float = 0.0
    thought: Annotated[Thought | None, Field(exclude_if=_is_none)] = None
    """The part of the message that is a thought. It is None, and left out of JSON, if all is the answer."""
    asked: Annotated[dict[str, Any] | None, Field(exclude_if=_is_none)] = None
    """The parameters of sampling that a harness asked for, under the names of its protocol. The job's
    `sampling` holds instead. It is None, and left out of JSON, for other agents."""


MAX_BRANCHES: Final = 256
"""The largest number of conversations of a rollout beside its own one."""
MAX_CONVERSATIONS: Final = (1 << 31) - 1
"""The largest number of a conversation, which a column of 32 bits can have."""
ConversationNumber = Annotated[int, Field(ge=0, le=MAX_CONVERSATIONS)]
MAX_HARNESS_TEXT: Final = 1 << 16
"""The largest number of characters of what a harness printed, and of its log."""


class Branch(Record):
    """A conversation of a rollout beside its own one.

    A harness has several: those of its sub-agents, titles and summaries, and one for each time that it has
    rewritten a history. The tokens are in segments of the trajectory, which its turns name.
    """

    number: ConversationNumber
    """Its number among the conversations of the rollout, from 0, in the order in which they began."""
    kind: ConversationKind
    trained: bool
    """Whether its sampled tokens are in the loss mask. If not, the mask of its segments is 0 throughout."""
    parent: ConversationNumber | None = None
    """The number of the conversation that it left, or whose call began it; None if there is none."""
    shared: Annotated[int, Field(ge=0)] = 0
    """How many messages of the parent's conversation precede `messages`."""
    messages: Annotated[list[Message], FailFast()] = Field(default_factory=list)
    """The messages from the point on at which it left its parent."""
    turns: Annotated[list[Turn], FailFast()] = Field(default_factory=list)
    """The turns that were sampled in it."""

    @property
    def said(self) -> dict[int, int]:
        """Which of `messages` each turn said, as {number of the message: number of the turn}, from 0."""
        return turns_said([message.role for message in self.messages], len(self.turns))


class HarnessRecord(Record):
    """How the harness of a rollout ended. The policy may have written any of its texts."""

    name: Annotated[str, Field(max_length=128)]
    """The preset, or `command`."""
    exit_code: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None
    """Its exit status; None if it was killed at the time limit, or was not started."""
    seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long it ran."""
    output: Annotated[str, Field(max_length=MAX_HARNESS_TEXT)] = ""
    """The beginning and the end of what it printed."""
    log: Annotated[str, Field(max_length=MAX_HARNESS_TEXT)] = ""
    """The end of its log file."""


def turns_said(roles: Sequence[str], turns: int) -> dict[int, int]:
    """Return which message each turn said, as {number of the message: number of the turn}, both from 0.

    A task may begin with an assistant's messages. The turns said those at the end.

    Args:
        roles: The roles of the messages.
        turns: The number of turns.
    """
    indices = [index for index, role in enumerate(roles) if role == "assistant"]
    count = min(turns, len(indices))
    return dict(zip(indices[len(indices) - count :], range(turns - count, turns), strict=True))


def final_text_of(answer: str | None, content: str, thought: Thought | None) -> str:
    """Return the submitted answer, or if there is none, the part of the policy's last message that answers.

    Args:
        answer: What `submit` received. It is an answer whatever it spells.
        content: The content of the policy's last message.
        thought: The part of it that is a thought. One that is not closed leaves no answer.
    """
    if answer is not None:
        return answer
    return content if thought is None else content[thought.answer :]


_SUBMIT: Final = "submit"
"""The tool that hands in an answer."""


class StageTiming(Record):
    """How long a rollout waited for one stage and was in it, in seconds, over all attempts."""

    queued_seconds: float = 0.0
    active_seconds: float = 0.0
    attempts: int = 0


class Timings(Record):
    """The time that a rollout spent in each stage, and what its Run time was spent on."""

    init: StageTiming = Field(default_factory=StageTiming)
    run: StageTiming = Field(default_factory=StageTiming)
    eval: StageTiming = Field(default_factory=StageTiming)
    model_seconds: float = 0.0
    tool_seconds: float = 0.0
    own_seconds: float = 0.0
    """The rest of the Run stage, which is spent in Rollyard's own code, and in that of a harness."""


class Attempt(Record):
    """A try of a stage that did not end well, or a wait for one that a lost node or new weights ended.

    Control characters in its texts are escaped as in a Python string.
    """

    stage: StageName
    attempt: Annotated[int, Field(ge=0)]
    """The number of the stage's try, from 1, with those that did not count; 0 if none had begun."""
    reason: str
    """The reason in CamelCase."""
    message: Annotated[str, Field(max_length=MAX_ATTEMPT_MESSAGE)] = ""
    worker: str = ""
    """The worker that had the rollout; it is empty if the rollout waited in a queue."""
    node: str = ""
    started: float
    """When it began, in seconds since the epoch."""
    seconds: float
    """How long it took, in seconds."""
    counted: bool
    """Whether it counted against the stage's `maxAttempts`."""


class SamplingRecord(Record):
    """The parameters with which tokens were sampled."""

    temperature: float
    top_p: float
    top_k: int = -1
    max_tokens: int | None = None
    """The most tokens of a turn; None: what was left of the context."""
    seed: int
    logprobs_mode: str = "processed_logprobs"


_OFTEN_EMPTY: Final = ("attempts", "reward_reason", "reward_output")


class TokensMissing(CrdsError):
    """Token lists of a trajectory were used where there is only its Transcript.

    It is not an AttributeError: `getattr` with a default would make the trajectory look as if it had no
    tokens.
    """

    reason = "TokensMissing"
    retryable = False


class RunRecord(Record):
    """What Run records of a rollout, except for the token lists.

    Only the first wrong item of a list is described. The description of millions would take gigabytes.
    """

    id: str
    job: str
    namespace: str = "default"
    task_id: str
    group_id: str
    sample_index: Annotated[int, Field(ge=0)]
    attempt: Annotated[int, Field(ge=0)] = 0
    """The number of failures before this result (hand-overs and preemptions do not count)."""
    messages: Annotated[list[Message], FailFast()] = Field(default_factory=list)
    turns: Annotated[list[Turn], FailFast()] = Field(default_factory=list)
    sampling: SamplingRecord | None = None
    backend: str = ""
    tool_parser: Annotated[str, Field(max_length=128)] = ""
    """What read the tool calls of the turns: an entry point of `rollyard.tool_parsers`, or
    `renderers/VERSION:RENDERER`. It is empty if the model was offered no tools."""
    truncated: bool = False
    truncated_reason: str = ""
    """MaxTurns, MaxContext, MaxTokens, RunTimeout, SandboxOutOfMemory or SandboxCrashed."""
    template_breaks: Annotated[int, Field(ge=0, le=MAX_TEMPLATE_BREAKS)] = 0
    """Segments begun because the chat template would have rewritten history."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    # The fields below are left out of JSON where they have their default, as for all other agents.
    conversation: Annotated[int, Field(ge=0, le=MAX_CONVERSATIONS, exclude_if=not_)] = 0
    """The number of the rollout's own conversation, which `messages` and `turns` hold, among all of its
    conversations. Where a harness has rewritten its history, it is the last version."""
    continues: Annotated[ConversationNumber | None, Field(exclude_if=_is_none)] = None
    """The number of the branch whose history the own conversation has rewritten, if there is one."""
    branches: Annotated[list[Branch], Field(max_length=MAX_BRANCHES, exclude_if=not_), FailFast()] = Field(
        default_factory=list
    )
    """The other conversations, in the order of their numbers."""
    harness: Annotated[HarnessRecord | None, Field(exclude_if=_is_none)] = None
    """How the harness ended, for an agent of type `harness`."""

    @property
    def every_turn(self) -> Iterator[Turn]:
        """The turns of the own conversation, and then those of the branches."""
        yield from self.turns
        for branch in self.branches:
            yield from branch.turns

    @property
    def said(self) -> dict[int, int]:
        """Which message each turn said, as {number of the message: number of the turn}, both from 0."""
        return turns_said([message.role for message in self.messages], len(self.turns))

    @property
    def given(self) -> list[Message]:
        """The messages before the first turn. Some may be an assistant's, which the task holds."""
        return self.messages[: min(self.said, default=len(self.messages))]

    @property
    def answer(self) -> str | None:
        """What the tool `submit` received, or None if it received nothing."""
        for turn in reversed(self.turns):
            for call in reversed(turn.tool_calls):
                answer = call.arguments.get("answer")
                if call.name == _SUBMIT and call.error is None and isinstance(answer, str):
                    return answer
        return None

    @property
    def final_text(self) -> str:
        """The submitted answer, else the policy's last message without its thought, else "".

        It is what graders judge, except in jobs whose `agent.thoughts` is `answer`, where they judge all of
        the message: `messages[-1].content`.
        """
        said = self.said
        if not said:
            return self.answer or ""
        last = max(said)
        return final_text_of(self.answer, self.messages[last].content, self.turns[said[last]].thought)

    def transcript_with(self, sizes: list[SegmentSizes]) -> Transcript:
        """Return what was recorded with the numbers of tokens of the segments."""
        return Transcript(**self._recorded(), segment_sizes=sizes)

    def _recorded(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in RunRecord.model_fields}


class SegmentSizes(Record):
    """The numbers of tokens of one segment."""

    prompt_tokens: Annotated[int, Field(ge=0)]
    response_tokens: Annotated[int, Field(ge=0)]
    sampled_tokens: Annotated[int, Field(ge=0)]
    """The tokens of the response that the policy sampled."""


class Transcript(RunRecord):
    """A trajectory without its token lists: what Eval gets of handlers that do not need them.

    Raises:
        TokensMissing: `segments` is read.
    """

    segment_sizes: list[SegmentSizes] = Field(default_factory=list)
    """The lengths of the segments, in their order."""

    def __getattr__(self, name: str) -> Any:
        if name == "segments":
            raise TokensMissing(
                "the trajectory has no token lists here: a handler whose eval reads ctx.trajectory.segments "
                "must say needs_tokens = True on its class"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled, in all segments."""
        return sum(size.sampled_tokens for size in self.segment_sizes)

    def with_segments(self, segments: list[Segment]) -> Trajectory:
        """Return the trajectory with its token lists.

        Raises:
            TokensMissing: These are not as many segments as the trajectory has.
        """
        if len(segments) != len(self.segment_sizes):
            raise TokensMissing(
                f"the trajectory has {len(self.segment_sizes)} segments, and the token lists of "
                f"{len(segments)} came: its Run was played for a handler that does not say needs_tokens"
            )
        return Trajectory(**self._recorded(), segments=segments)


class Trajectory(RunRecord):
    """One rollout that has ended. `reward` is null unless an evaluation gave it."""

    attempts: Annotated[list[Attempt], Field(max_length=MAX_ATTEMPTS)] = Field(default_factory=list)
    """What did not end well before this result, oldest first. It is empty for most rollouts."""
    attempts_dropped: Annotated[int, Field(ge=0)] = 0
    """The number of further attempts, which did not fit into `attempts`."""
    status: TrajectoryStatus | Literal["unscored"] = "succeeded"
    """`unscored` stands in an UnscoredTrajectory only."""
    reason: str = ""
    """The reason in CamelCase, where the status is not `succeeded`."""
    message: str = ""
    reward: float | None = None
    reward_components: dict[str, float] = Field(default_factory=dict)
    reward_reason: RewardReason = ""
    """Why the reward is what it is, where the evaluation could not simply decide: `SandboxSabotaged`,
    `TestTimeout`, … (CamelCase)."""
    reward_output: Annotated[str, Field(max_length=MAX_REWARD_OUTPUT)] = ""
    """The end of what the evaluation printed, or what it compared, for people. The policy's program may have
    written it."""
    segments: list[Segment] = Field(default_factory=list)
    timings: Timings = Field(default_factory=Timings)

    def line(self) -> bytes:
        """Return the record as a line of a file, without the newline.

        As in the answers of the REST calls, the fields that most records leave empty are left out if they
        are empty.
        """
        empty = {name for name in _OFTEN_EMPTY if not getattr(self, name)}
        if "attempts" in empty:
            empty.add("attempts_dropped")
        return self.model_dump_json(exclude=empty).encode()

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled, in all segments."""
        return sum(sum(segment.loss_mask) for segment in self.segments)

    @property
    def transcript(self) -> Transcript:
        """The trajectory without its token lists."""
        sizes = [
            SegmentSizes(
                prompt_tokens=len(segment.prompt_ids),
                response_tokens=len(segment.response_ids),
                sampled_tokens=sum(segment.loss_mask),
            )
            for segment in self.segments
        ]
        return self.transcript_with(sizes)


class UnscoredTrajectory(Trajectory):
    """A rollout that has left Run and waits for the reward that the trainer gives."""

    fence: Annotated[int, Field(ge=0)]
    """The number of its Run. A reward that names it never goes to another Run of the same rollout."""


class Rescored(Record):
    """A trajectory's reward before it was evaluated again, and who did so, when, and with which handler."""

    handler: str
    """The handler that evaluated it again."""
    by: str
    """The user and the host."""
    at: datetime
    """When it began."""
    reward: float | None
    """The reward before."""
    reward_components: dict[str, float] = Field(default_factory=dict)
    """The components before."""
    reward_reason: RewardReason = ""
    """The reason before; see `Trajectory.reward_reason`."""


class RescoredTrajectory(Trajectory):
    """A trajectory that may have been evaluated again, as files hold it."""

    rescored: Rescored | None = None
    """What it was before; it is None for a trajectory that was not evaluated again."""
