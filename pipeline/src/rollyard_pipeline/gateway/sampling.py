"""The sampling of the turns of one rollout's harness, and their record."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Final

from rollyard_crds.rolloutjob import SamplingSpec
from rollyard_inference.errors import ContextOverflow
from rollyard_process.telemetry import conventions as names
from rollyard_process.telemetry.scope import RolloutScope, current, entered

from rollyard_pipeline.backends.session import BackendSession
from rollyard_pipeline.chat.format import ChatFormat
from rollyard_pipeline.gateway.backends import BackendSessions
from rollyard_pipeline.gateway.branches import HarnessConversation
from rollyard_pipeline.gateway.calls import ModelCall, ModelReply
from rollyard_pipeline.gateway.conversations import Conversations, Placed
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.pending import SampledReply
from rollyard_pipeline.gateway.replies import opening_of, reply_of
from rollyard_pipeline.gateway.streaming import GrowingReply
from rollyard_pipeline.tool_parsers.base import ParsedTurn, TokenParser, ToolCallParser
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.trajectories.parts import turn_parts
from rollyard_pipeline.trajectories.recorder import Sample
from rollyard_pipeline.trajectories.sanitize import clean_text

log = logging.getLogger(__name__)

_UNAVAILABLE_SECONDS: Final = 2.0  # When a call that failed may be repeated.
_MOST_SHORT_SPANS: Final = 256  # Calls of a rollout that sampled nothing and have spans of their own.
_CONVERSATION_BITS: Final = 20  # No conversation has more turns than this many bits count.


class CallSpans:
    """The spans of the calls of one rollout, which is that of the current task. They have no texts of it."""

    def __init__(self) -> None:
        self.scope: RolloutScope | None = current()
        self._short = 0

    def add_short(self, protocol: str, began: float, outcome: str, error: str = "") -> None:
        """Add the span of a call that samples nothing. Only the first ones of a rollout have spans."""
        if self.scope is not None and self._short < _MOST_SHORT_SPANS:
            self._short += 1
            self.add(self.scope.child(), protocol, began, outcome, error)

    def add(
        self, span: str, protocol: str, began: float, outcome: str, error: str = "", kind: str = ""
    ) -> None:
        """Add the span of a call that ends now.

        Args:
            span: The id of the span.
            protocol: The name of the protocol.
            began: When the call began, by the monotonic clock.
            outcome: What came of it; see `conventions.OUTCOME`.
            error: The type of its error, or "".
            kind: The kind of its conversation, or "" if it has none.
        """
        if self.scope is None:
            return
        attributes = {
            names.CONVERSATION: self.scope.rollout,
            names.PROTOCOL: protocol,
            names.OUTCOME: outcome,
            **({names.CONVERSATION_KIND: kind} if kind else {}),
            **({names.ERROR_TYPE: error} if error else {}),
        }
        self.scope.add(names.GATEWAY_SPAN, time.monotonic() - began, attributes, id=span, error=error)


@dataclass(slots=True, eq=False)
class SampledTurn:
    """A turn that is being sampled for a call."""

    call: ModelCall
    protocol: str
    format: ChatFormat
    parser: ToolCallParser | TokenParser | None
    parser_name: str
    placed: Placed
    backend: BackendSession
    reply: SampledReply
    failed: Callable[[], None]
    """Called if there is no reply."""
    number: int
    """The number of the turn from which its seed is derived."""
    began: float
    seconds_before: float
    """The seconds that the backend session has worked before."""
    task: asyncio.Task[None] | None = None
    interruptible: bool = True
    """Whether the turn is still being sampled."""


class TurnSampler:
    """Samples and records the turns of one rollout, several at once.

    Each one is sampled in a task of its own, so a client that hangs up does not end it.

    Args:
        conversations: The conversations of the rollout.
        episode: The record of its own conversation.
        backends: The access to the model.
        sampling: The job's sampling, which replaces what the harness asks for.
        context: The most tokens of a prompt and its reply together.
        now: The clock, in seconds since the epoch.
    """

    def __init__(
        self,
        conversations: Conversations,
        episode: Episode,
        backends: BackendSessions,
        sampling: SamplingSpec,
        context: int,
        now: Callable[[], float],
    ) -> None:
        self._conversations = conversations
        self._episode = episode
        self._backends = backends
        self._sampling = sampling
        self._context = context
        self._now = now
        self._variables = copy_context()
        self._said = False
        """Whether the policy has sampled a turn, so that calls may be its own."""
        self._own_parsers: list[ToolCallParser | TokenParser | None] = []
        """The parsers of the tools that were offered before that."""
        self._seeds: dict[int, HarnessConversation] = {}
        """The main conversation that has used the number of a turn for its seed."""
        self.spans = CallSpans()
        self.running: list[SampledTurn] = []
        self.turns = 0
        """The turns that were sampled, those that were cut included, or are being sampled."""
        self.failure: Exception | None = None
        """The failure of the infrastructure with which a call has ended, if none was answered since.

        The policy's own calls do not count, or it would have another try whenever a backend fails one.
        """
        self.truncated = ""
        """Why the episode is truncated if nothing more comes, or an empty string if it is not."""
        self.closed: CallError | None = None
        """What ends all turns, once it is known."""
        self.silence: str | None = None
        """Why a turn that was cut is the backend's fault."""

    def begin(
        self,
        call: ModelCall,
        placed: Placed,
        chat: ChatFormat,
        parser: tuple[str, ToolCallParser | TokenParser | None],
        model: str,
        protocol: str,
        began: float,
        failed: Callable[[], None],
    ) -> SampledReply:
        """Begin to sample a turn, and return its reply.

        Args:
            call: The call.
            placed: Its place, whose prompt leaves room for a reply.
            chat: How the tools are offered.
            parser: The name of what reads their calls, and the parser.
            model: The name of the model for the reply.
            protocol: The name of the protocol.
            began: When the call came, by the monotonic clock.
            failed: Called if there is no reply.
        """
        backend, prompt = self._backends.take(), placed.prompt
        reply = SampledReply(
            opening_of(self._now(), model, len(prompt.ids)),
            lambda: GrowingReply(chat, parser[1], prompt.rendering.text),
            backend.sampled_since,
        )
        turn = SampledTurn(
            call, protocol, chat, parser[1], parser[0], placed, backend, reply, failed,
            number=self._seed_number(placed), began=began, seconds_before=backend.model_seconds,
        )  # fmt: skip
        if not self._said:
            self._own_parsers.append(parser[1])
        self.turns += 1
        self.running.append(turn)
        backend.on_tokens = reply.progress
        task = asyncio.get_running_loop().create_task(self._sample(turn), context=self._variables.copy())
        turn.task = task
        # A task that is cancelled before it has begun does not even run its first line.
        task.add_done_callback(lambda _: self._end(turn, _unavailable()))
        return reply

    async def close(self, error: CallError) -> CallError:
        """End all turns with an error, and return that of the first close. What they sampled is kept."""
        closed = self.closed
        if closed is None:
            self.closed = closed = error
            for turn in self.running:
                if turn.interruptible and turn.task is not None:
                    turn.task.cancel()
        tasks = [turn.task for turn in self.running if turn.task is not None]
        if tasks:  # A caller that is cancelled meanwhile must not cancel what keeps the tokens.
            await asyncio.wait(tasks)
        return closed

    def too_long(self, placed: Placed, limit: int | None) -> CallError:
        """Return the error of a prompt that leaves no room, which may be how the rollout ends."""
        tokens = len(placed.prompt.ids)
        limit = tokens if limit is None else limit
        if placed.conversation.kind == "main" and not self.truncated:
            self.truncated = "MaxContext"
        return CallError(
            "context",
            f"the prompt has {tokens} tokens, and the context {limit}, which leaves no room for a reply",
            tokens=(tokens, limit),
        )

    async def _sample(self, turn: SampledTurn) -> None:
        """Sample a turn, record it, and complete its reply."""
        scope, result, failure = self.spans.scope, None, ""
        span = scope.child() if scope is not None else ""
        try:
            with entered(scope.below(span) if scope is not None else None):
                result = await self._sampled(turn)
        except CallError as error:
            result, failure = error, error.problem
        except Exception as error:
            failure = type(error).__name__
            # With tools of its own, the policy could have a turn fail that is sampled, and gain a new try.
            own = turn.placed.text is None or any(turn.parser is parser for parser in self._own_parsers)
            if own and turn.placed.conversation.kind != "policy":
                self.failure = error
            log.warning("a call to the gateway failed: %s: %s", failure, clean_text(str(error), 1000))
        finally:
            if scope is not None:
                outcome = "sampled" if isinstance(result, ModelReply) else failure or "cut"
                kind = turn.placed.conversation.kind
                self.spans.add(span, turn.protocol, turn.began, outcome, failure, kind)
        self._end(turn, result or _unavailable())

    async def _sampled(self, turn: SampledTurn) -> ModelReply | CallError:
        """Sample a turn and record it, and return what the harness gets.

        Raises:
            CallError: The prompt leaves no room for a reply.
            BackendError, PipelineError: The infrastructure failed.
        """
        placed, backend = turn.placed, turn.backend
        try:
            sample = await backend.turn(placed.prompt.ids, self._room(turn), turn.number)
        except asyncio.CancelledError:
            if self.closed is None:
                raise
            await self._cut(turn)
            return self.closed
        except ContextOverflow as error:
            # The server's context is smaller than it reported, or it did not report it.
            raise self.too_long(placed, error.limit) from error
        finally:
            turn.interruptible = False
        text = self._conversations.record(placed, sample)
        self._said = True
        thought = placed.conversation.recorder.turns[-1].thought
        channels = turn.format.channels
        parts = await turn_parts(turn.parser, text, thought, channels, sample.token_ids, placed.prompt.ids)
        self._add(turn, sample, text, parts.parsed)
        reply = reply_of(turn.reply.opening, sample, text, thought, parts, turn.format.tokenizer)
        self._conversations.sent(placed, reply, self._now())
        if placed.conversation.kind == "main":
            self._note_end(turn, sample)
        if placed.conversation.kind != "policy":
            self.failure = None
        return reply

    async def _cut(self, turn: SampledTurn) -> None:
        """Record what a turn has sampled that the end of the rollout has cut."""
        if self.closed is not None and self.closed.problem == "limit":
            self.silence = await turn.backend.silence() or self.silence
        sample = await turn.backend.cut()
        if sample is not None:
            text = self._conversations.record(turn.placed, sample)
            self._said = True
            self._add(turn, sample, text, ParsedTurn(text.strip()))

    def _add(self, turn: SampledTurn, sample: Sample, text: str, parsed: ParsedTurn) -> None:
        seconds = turn.backend.model_seconds - turn.seconds_before
        asked = dict(turn.call.asked) or None
        self._conversations.add(turn.placed, text, parsed, sample.finish_reason, seconds, asked)
        if turn.parser_name and turn.placed.conversation.kind == "main":
            self._episode.tool_parser = turn.parser_name

    def _note_end(self, turn: SampledTurn, sample: Sample) -> None:
        """Note whether the rollout is truncated if this is its last turn."""
        if self.truncated == "MaxTurns":
            return
        self.truncated = ""
        if sample.finish_reason == "length":
            limits = self._sampling.max_tokens, turn.call.max_tokens
            full = any(limit is not None and len(sample.token_ids) >= limit for limit in limits)
            self.truncated = "MaxTokens" if full else "MaxContext"

    def _end(self, turn: SampledTurn, result: ModelReply | CallError) -> None:
        """Take note of a call that has ended, once. One that failed is forgotten, so a repeat tries again."""
        if turn not in self.running:
            return
        self.running.remove(turn)
        self._backends.give_back(turn.backend)
        if isinstance(result, ModelReply):
            turn.reply.complete(result)
            return
        turn.failed()
        self._conversations.abandon(turn.placed)
        if turn.placed.text is None:
            self.turns -= 1
            if self._seeds.get(turn.number) is turn.placed.conversation:
                del self._seeds[turn.number]
        turn.reply.fail(self.closed or result)

    def _seed_number(self, placed: Placed) -> int:
        """Return the number of a turn from which its seed is derived, as no other turn of the rollout has it.

        Turns of the main conversation have the numbers that those of another agent would have.
        """
        owner = placed.conversation
        other = self._seeds.get(placed.turn)
        if owner.kind == "main" and (other is None or other.kind != "main"):
            self._seeds[placed.turn] = owner
            return placed.turn
        return ((owner.number + 1) << _CONVERSATION_BITS) + owner.begun

    def _room(self, turn: SampledTurn) -> int:
        """Return the most tokens that a turn may have."""
        room = self._context - len(turn.placed.prompt.ids)
        limits = (self._sampling.max_tokens, turn.call.max_tokens, room)
        return max(1, min(limit for limit in limits if limit is not None))


def _unavailable() -> CallError:
    words = "the reply could not be sampled, which is not the fault of the call: repeat it"
    return CallError("unavailable", words, retry_after=_UNAVAILABLE_SECONDS)
