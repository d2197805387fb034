"""The base class of agents, and the operations that they can perform.

    class Greeter(Agent):
        async def run(self, ctx: AgentContext) -> None:
            ctx.say("Greet me in one word.")
            await ctx.turn()

Every token that `ctx.turn()` samples is recorded. An agent cannot lose or forge one.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from rollyard_crds.rolloutjob import ASSUMED_CONTEXT, AgentSpec, SamplingSpec
from rollyard_crds.task import Message, Task
from rollyard_crds.trajectory import FinishReason
from rollyard_inference.errors import ContextOverflow
from rollyard_process.telemetry import conventions as names
from rollyard_process.telemetry.scope import current
from rollyard_process.telemetry.spans import Value
from rollyard_sandbox.errors import ConnectionLost
from rollyard_sandbox.errors import SandboxError as ExecError

from rollyard_pipeline.backends.session import BackendSession
from rollyard_pipeline.errors import PermanentFailure
from rollyard_pipeline.gateway.session import GatewaySession
from rollyard_pipeline.harnesses.base import Harness
from rollyard_pipeline.sabotage import reward_reason, was_removed
from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn, TokenParser, ToolCallParser
from rollyard_pipeline.tools.base import Tool, ToolContext, ToolResult, check_arguments, refusal
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.trajectories.parts import turn_parts
from rollyard_pipeline.trajectories.recorder import Prompt, Sample
from rollyard_pipeline.trajectories.sanitize import clean_text

TOOL_ERROR: Final = "ToolError"
"""The error of a call whose observation is an error, such as one with malformed arguments."""


def _add_span(tool: Tool | None, seconds: float, failure: str) -> None:
    """Add the span of a tool call.

    Nothing that the policy has written is part of the span: neither arguments nor output, nor the name of a
    tool that does not exist.
    """
    scope = current()
    if scope is None or scope.sink is None:
        return
    name = tool.name if tool is not None else names.UNKNOWN_TOOL
    attributes: dict[str, Value] = {
        names.OPERATION: names.EXECUTE_TOOL,
        names.CONVERSATION: scope.rollout,
        names.TOOL: name,
    }
    if failure:
        attributes[names.ERROR_TYPE] = failure
    scope.add(f"{names.EXECUTE_TOOL} {name}", seconds, attributes, error=failure)


log = logging.getLogger(__name__)

MAX_CALLS_PER_TURN: Final = 64


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One sampled turn."""

    text: str
    """The text of the turn outside its tool calls."""
    calls: tuple[ParsedCall, ...]
    finish_reason: FinishReason


@dataclass(slots=True)
class HarnessAccess:
    """What an agent has that says `uses_gateway`."""

    harness: Harness
    gateway: GatewaySession
    workdir: str
    """The sandbox's work folder."""
    messages: list[Message]
    """The messages from which the harness starts."""

    def begin_step(self, episode: Episode, text: str) -> None:
        """Let the harness play a further step of the task, from a prompt of its own."""
        self.messages = [Message(role="user", content=text)]
        episode.finished, episode.answer = False, None
        self.gateway.conversations.next_step(text)
        self.gateway.reopen()


def stated_context(own: int | None, reported: int | None, configured: int | None) -> int | None:
    """Return the most tokens of an episode, or None if nothing states it.

    Args:
        own: The job's `agent.maxContextTokens`.
        reported: The context that the server reports.
        configured: The context in the model's config.json, for a job and a server that state none.
    """
    limits = [tokens for tokens in (own, reported) if tokens is not None]
    return min(limits) if limits else configured


class AgentContext:
    """The operations of an agent: sample a turn, run a call, append a message, end the episode.

    Args:
        model_context: The context in the model's config.json, in tokens, or None.
        harness: The harness and the gateway of an agent that `uses_gateway`.
    """

    def __init__(
        self,
        *,
        task: Task,
        spec: AgentSpec,
        sampling: SamplingSpec,
        episode: Episode,
        tools: Mapping[str, Tool],
        tool_context: ToolContext,
        parser: ToolCallParser | TokenParser | None,
        session: BackendSession | None,
        model_context: int | None = None,
        harness: HarnessAccess | None = None,
    ) -> None:
        self.task = task
        self.spec = spec
        self.episode = episode
        self.tool_context = tool_context
        self.harness = harness
        self._sampling = sampling
        self._tools = tools
        self._parser = parser
        self._session = session
        self._model_context = model_context
        self._open: tuple[Prompt, float] | None = None
        """The prompt of the turn that is being sampled, and the model's seconds before it."""

    @property
    def finished(self) -> bool:
        """Return whether the episode has ended: submitted, truncated, or ended by `finish`."""
        return self.episode.finished

    async def turn(self) -> AgentTurn | None:
        """Sample the assistant's next turn and return it.

        If the turn limit or the context is used up, the trajectory is truncated and the result is None. A
        turn that reaches its token limit is returned and truncates the episode.

        Raises:
            PermanentFailure: The context has no room for the first turn, before the policy has done anything.
            BackendError, TemplateError: The infrastructure failed. Agents should not catch these exceptions.
        """
        session, recorder = self._session, self.episode.recorder
        if session is None or recorder is None:
            raise RuntimeError("the agent samples but says uses_model = False")
        if self.episode.sampled_turns >= self.spec.max_turns:
            self.episode.truncate("MaxTurns")
            return None
        prompt = recorder.prompt()
        own, reported = self.spec.max_context_tokens, await session.context_limit()
        context = stated_context(own, reported, self._model_context) or ASSUMED_CONTEXT
        room = context - len(prompt.ids)
        if room <= 0:
            whose = "agent.maxContextTokens" if context == own else "the server's context (max_model_len)"
            if own is None and reported is None:
                whose = "agent.maxContextTokens is not set and the server reports no context, so the limit"
            self._out_of_context(len(prompt.ids), f"{whose} is {context}")
            return None
        before = session.model_seconds
        most = self._sampling.max_tokens
        max_tokens = room if most is None else min(most, room)
        self._open = prompt, before
        try:
            sample = await session.turn(prompt.ids, max_tokens, len(self.episode.turns))
        except ContextOverflow as error:
            # The server's context is smaller than it reported, or it did not report it.
            known = error.limit is not None
            limit = f"the server's context is {error.limit}" if known else f"the server refused it ({error})"
            self._out_of_context(len(prompt.ids), limit)
            return None
        self._open = None
        text = recorder.record(prompt, sample)
        parsed = await self._parsed(text, prompt, sample)
        self.episode.add_assistant(text, parsed, sample.finish_reason, session.model_seconds - before)
        if sample.finish_reason == "length":
            full = most is not None and len(sample.token_ids) >= most
            self.episode.truncate("MaxTokens" if full else "MaxContext")
        return AgentTurn(parsed.text, parsed.calls, sample.finish_reason)

    async def cut_turn(self) -> None:
        """Record what a turn has sampled that was cancelled in the middle, which ends it as `length`."""
        open_turn, self._open = self._open, None
        if open_turn is None or self._session is None or self.episode.recorder is None:
            return
        prompt, before = open_turn
        sample = await self._session.cut()
        if sample is not None:
            text = self.episode.recorder.record(prompt, sample)
            seconds = self._session.model_seconds - before
            self.episode.add_assistant(text, ParsedTurn(text.strip()), sample.finish_reason, seconds)

    def _out_of_context(self, tokens: int, limit: str) -> None:
        """Truncate the episode, because its next prompt leaves no room for a sampled token.

        Raises:
            PermanentFailure: It is the first prompt, so the policy is not to blame. Another try cannot help.
        """
        if not self.episode.sampled_turns:
            raise PermanentFailure(
                f"task '{self.task.id}': the first prompt has {tokens} tokens (with tools and chat template),"
                f" and {limit}: raise the limit, or shorten the prompt",
                "PromptTooLong",
            )
        self.episode.truncate("MaxContext")

    async def _parsed(self, text: str, prompt: Prompt, sample: Sample) -> ParsedTurn:
        """Return the calls of a turn, and its text without them. Calls in its thought do not count."""
        recorder, parser = self.episode.recorder, self._parser
        if parser is None or recorder is None:
            return ParsedTurn(text.strip())
        thought, ids = recorder.turns[-1].thought, sample.token_ids
        parts = await turn_parts(parser, text, thought, recorder.channels, ids, prompt.ids)
        return parts.parsed

    async def call(self, call: ParsedCall) -> ToolResult:
        """Run one tool call, and append its result as a message.

        A malformed call, an unknown tool and wrong arguments are observations (`error: …`). The same applies
        to a sandbox that the policy has broken, because only infrastructure failures are retried.

        Raises:
            rollyard_sandbox.errors.SandboxError: The sandbox failed. Agents should not catch this exception.
        """
        tool = self._tools.get(call.name)
        began, failure = time.monotonic(), ""
        try:
            if call.error is not None:
                result = refusal(call.error)
            elif tool is None:
                result = refusal(f"unknown tool '{call.name}'; tools: {', '.join(self._tools) or 'none'}")
            elif (problem := check_arguments(tool.parameters, call.arguments)) is not None:
                result = refusal(problem)
            else:
                result = await self._ran(tool, call)
            failure = TOOL_ERROR if result.error is not None else ""
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            seconds = time.monotonic() - began
            _add_span(tool, seconds, failure)
        self.episode.add_observation(call, result.text, result.error, seconds)
        if result.answer is not None:
            self.episode.answer = result.answer
            self.episode.finished = True
        if result.truncates:
            self.episode.truncate(result.truncates)
        return result

    async def _ran(self, tool: Tool, call: ParsedCall) -> ToolResult:
        context = self.tool_context
        try:
            return await tool.call(call.arguments, context)
        except ConnectionLost:
            observed = await context.lost()
            if observed is None:
                raise
            return observed
        except ExecError as error:
            if not await self.has_caused(error):
                raise
            return refusal(str(error))

    async def has_caused(self, error: ExecError) -> bool:
        """Return whether the policy is at fault for an error of the exec server, which it can see then."""
        if error.reason == "ServerFault":
            log.error("a bug of the exec server: %s", clean_text(str(error), 1000))
        return bool(reward_reason(error)) or await was_removed(self.tool_context.sandbox, error)

    async def call_all(self, calls: tuple[ParsedCall, ...]) -> None:
        """Run a turn's calls in order, until one ends the episode."""
        for call in calls[:MAX_CALLS_PER_TURN]:
            await self.call(call)
            if self.finished:
                return
        if len(calls) > MAX_CALLS_PER_TURN:
            error = f"only the first {MAX_CALLS_PER_TURN} calls of a turn are run"
            await self.call(ParsedCall("", error=error))

    async def replay(self, call: ParsedCall) -> ToolResult:
        """Run a call that was not sampled from a model.

        It is recorded as a turn `replayed`, which does not count against `max_turns`.
        """
        self.episode.add_assistant("", ParsedTurn("", (call,)), "replayed")
        return await self.call(call)

    def say(self, text: str) -> None:
        """Append a user's message."""
        self.episode.add_user(text)

    def finish(self) -> None:
        """End the episode."""
        self.episode.finished = True

    def truncate(self, reason: str) -> None:
        """End the episode before the policy did."""
        self.episode.truncate(reason)


class Agent(ABC):
    """An agent: a class named in the entry point group `rollyard.agents`.

    Each rollout has its own instance.
    """

    uses_model: ClassVar[bool] = True
    uses_gateway: ClassVar[bool] = False
    """Whether a program in the sandbox asks the model through the gateway, and the agent does not."""
    uses_tools: ClassVar[bool] = True
    """Whether the agent uses tools. If not, the job's tools are neither offered to the model nor started."""

    @abstractmethod
    async def run(self, ctx: AgentContext) -> None:
        """Play the episode. Returning ends it, and the stage's time limit cancels it."""
