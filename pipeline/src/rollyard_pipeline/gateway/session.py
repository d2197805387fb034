"""One rollout as its harness calls it: repeats, limits, sampling, and what is counted."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson
from rollyard_crds.lease import BackendAssignment, GatewayStats, RunStats
from rollyard_crds.rolloutjob import AgentSpec, SamplingSpec

from rollyard_pipeline.backends.session import BackendSession
from rollyard_pipeline.chat.format import ChatFormat
from rollyard_pipeline.errors import PipelineError, WorkerError
from rollyard_pipeline.gateway.backends import BackendSessions
from rollyard_pipeline.gateway.calls import ModelCall
from rollyard_pipeline.gateway.conversations import Conversations
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.pending import SampledReply
from rollyard_pipeline.gateway.sampling import TurnSampler
from rollyard_pipeline.tool_parsers.base import TokenParser, ToolCallParser
from rollyard_pipeline.trajectories.episode import Episode

MAX_CALLS_IN_FLIGHT: Final = 32
"""How many replies of a rollout are sampled at once."""
_BUSY_SECONDS: Final = 1.0  # When a call that found too many others may be repeated.
_MOST_CHATS: Final = 16  # The sets of offered tools whose chat format and parser are kept.
_REST: Final = 9.0
"""How long later calls of a rollout wait after one for which nothing is sampled, in multiples of the time for
which it has kept the worker busy. No limit of turns ends such calls."""
_SHORT_WORK: Final = 0.02
"""The time after which no call waits, in seconds."""


@dataclass(frozen=True, slots=True)
class Chat:
    """How a set of tools is offered, and how its calls are read."""

    format: ChatFormat
    name: str = ""
    """The name of the parser, or an empty string without tools."""
    parser: ToolCallParser | TokenParser | None = None


class GatewaySession:
    """Answers the calls of one rollout's harness. It implements `interface.RolloutGateway`.

    Args:
        spec: The job's agent, whose limits hold.
        sampling: The job's sampling, which replaces what the harness asks for.
        episode: The record of the rollout, which shows its own conversation.
        key: The key that its calls show.
        model: The name of the model.
        context: The most tokens of a prompt and its reply together.
        chats: Returns how a set of offered tools is offered and read.
        sessions: Returns further access to the model. One is used for one turn at a time.
        now: The clock, in seconds since the epoch.
    """

    def __init__(
        self,
        *,
        spec: AgentSpec,
        sampling: SamplingSpec,
        episode: Episode,
        key: str,
        model: str,
        context: int,
        chats: Callable[[Sequence[Mapping[str, Any]]], Awaitable[Chat]],
        sessions: Callable[[], BackendSession],
        now: Callable[[], float] = time.time,
    ) -> None:
        self.key = key
        self.model = model
        self.context = context
        self.conversations = Conversations(episode, spec.trained)
        self.refused: CallError | None = None
        """The last refusal of a call."""
        self._max_turns = spec.max_turns
        self._episode = episode
        self._make_chat = chats
        self._backends = BackendSessions(sessions)
        self._now = now
        self._sampler = TurnSampler(self.conversations, episode, self._backends, sampling, context, now)
        self._chats: OrderedDict[bytes, Chat] = OrderedDict()
        self._replies: dict[bytes, SampledReply] = {}
        self._counted = GatewayStats()
        self._rested = 0.0
        """When the next prompt may be made, by the monotonic clock."""
        self._resting = asyncio.Lock()
        self._ended = asyncio.Event()
        """Whether no call is answered any more."""

    # -- calls --------------------------------------------------------------------------------------------

    async def answer(self, call: ModelCall, protocol: str) -> SampledReply:
        """Match a call with what was sampled, and begin to sample its reply, unless it repeats a call.

        Raises:
            CallError: The call is refused. Nothing was sampled for it.
        """
        began, calls = time.monotonic(), self._counted.calls
        calls[protocol] = calls.get(protocol, 0) + 1
        try:
            return await self._answered(call, protocol, began)
        except CallError as error:
            self._counted.refused += 1
            self.refused = error
            self._sampler.spans.add_short(protocol, began, error.problem, error.problem)
            raise

    async def count_tokens(self, call: ModelCall) -> int:
        """Return the number of tokens of the prompt that a call would make, without any effect.

        Raises:
            CallError: The call is refused.
        """
        self._check_open()
        chat = await self._chat(call)
        await self._rest()
        self._check_open()
        began = time.monotonic()
        try:
            return self.conversations.count(call, chat.format)
        finally:
            self._worked(began)

    async def close(self, error: CallError) -> None:
        """End all calls with an error, and refuse further ones. What was sampled of their turns is kept.

        If the session is closed already, it stays closed with the first error.

        Args:
            error: `ended` if the harness has ended, or `limit` if the rollout's time is up.
        """
        self._ended.set()
        first = await self._sampler.close(error)
        if self._sampler.truncated and first.problem != "limit":
            self._episode.truncate(self._sampler.truncated)

    def reopen(self) -> None:
        """Answer calls again, because another harness begins in the same rollout."""
        self._sampler.closed = None
        self._replies.clear()  # A call like an earlier one is no repeat of it, as its harness has ended.
        self._ended.clear()

    async def _answered(self, call: ModelCall, protocol: str, began: float) -> SampledReply:
        self._check_open()
        key = _key(call, protocol)
        if (earlier := self._repeated(key, protocol, began)) is not None:
            return earlier
        self._check_limits()
        chat = await self._chat(call)
        await self._rest()
        # The chat format of new tools takes a moment, in which the same call may have come again.
        self._check_open()
        if (earlier := self._repeated(key, protocol, began)) is not None:
            return earlier
        self._check_limits()
        working = time.monotonic()
        try:
            placed = self.conversations.place(call, chat.format, self._now())
            self._counted.tokenized += placed.tokenized
            if len(placed.prompt.ids) >= self.context:
                self.conversations.abandon(placed)
                raise self._sampler.too_long(placed, self.context)
        except CallError:
            self._worked(working)
            raise
        self._counted.segments += placed.opened
        self._counted.unmatched += placed.unmatched
        parser = chat.name, chat.parser
        reply = self._replies[key] = self._sampler.begin(
            call, placed, chat.format, parser, self.model, protocol, began, lambda: self._forget(key)
        )
        return reply

    async def _rest(self) -> None:
        """Wait until the worker has had time for other rollouts after the work for this one."""
        if time.monotonic() >= self._rested:
            return
        async with self._resting:  # One call after the other, as each may take long again.
            seconds = self._rested - time.monotonic()
            if seconds > 0 and not self._ended.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._ended.wait()

    def _worked(self, began: float) -> None:
        """Have later calls wait for the work of a call that began then."""
        now = time.monotonic()
        if now - began > _SHORT_WORK:
            self._rested = now + _REST * (now - began)

    def _forget(self, key: bytes) -> None:
        """Forget a call that has failed, so that a repeat of it tries again."""
        self._counted.refused += 1
        self._replies.pop(key, None)

    def _check_open(self) -> None:
        if self._sampler.closed is not None:
            raise self._sampler.closed.with_traceback(None)

    def _check_limits(self) -> None:
        if self._sampler.turns >= self._max_turns:
            self._sampler.truncated = "MaxTurns"
            raise CallError(
                "limit",
                f"the rollout has used up its {self._max_turns} turns (agent.maxTurns): no further call is "
                "answered",
            )
        if len(self._sampler.running) >= MAX_CALLS_IN_FLIGHT:
            raise CallError(
                "busy",
                f"{MAX_CALLS_IN_FLIGHT} calls of this rollout are being answered, which is the most: repeat "
                "the call later",
                retry_after=_BUSY_SECONDS,
            )

    def _repeated(self, key: bytes, protocol: str, began: float) -> SampledReply | None:
        earlier = self._replies.get(key)
        if earlier is not None:
            self._counted.repeats += 1
            self._sampler.spans.add_short(protocol, began, "repeat")
        return earlier

    async def _chat(self, call: ModelCall) -> Chat:
        key = _digest(call.tools)
        chat = self._chats.get(key)
        if chat is None:
            try:
                chat = await self._make_chat(call.tools)
            except WorkerError as error:
                if (
                    not self._sampler.turns
                ):  # Later ones may be calls of the policy, which must not end the rollout.
                    self._sampler.failure = error
                again = isinstance(error, PipelineError) and error.retryable
                raise CallError("unavailable" if again else "invalid", str(error)) from error
            while len(self._chats) >= _MOST_CHATS:
                self._chats.popitem(last=False)
            self._chats[key] = chat
        self._chats.move_to_end(key)
        return chat

    # -- what the stage reads -------------------------------------------------------------------------------

    @property
    def turns(self) -> int:
        """The turns that were sampled, those that were cut included, or are being sampled."""
        return self._sampler.turns

    @property
    def failure(self) -> Exception | None:
        """The failure of the infrastructure with which a call has ended, if none was answered since."""
        return self._sampler.failure

    @property
    def backend(self) -> BackendAssignment:
        """The backend that is used."""
        return self._backends.backend

    @property
    def logprobs_mode(self) -> str:
        """The kind of log-probabilities; see `BackendSession.logprobs_mode`."""
        return self._backends.logprobs_mode

    @property
    def model_seconds(self) -> float:
        """The time in which at least one turn was sampled, without `waited_seconds`, in seconds."""
        return self._backends.model_seconds

    @property
    def waited_seconds(self) -> float:
        """The time in which a backend was paused, updated or too busy, or none was ready, in seconds."""
        return self._backends.waited_seconds

    @property
    def on_wait(self) -> Callable[[float], None] | None:
        """Called with every stretch of `waited_seconds` as it passes."""
        return self._backends.on_wait

    @on_wait.setter
    def on_wait(self, called: Callable[[float], None] | None) -> None:
        self._backends.on_wait = called

    @property
    def stats(self) -> RunStats:
        """What was counted of calls, and of requests to backends."""
        self._counted.conversations = dict(Counter(self.conversations.kinds()))
        return self._backends.stats.model_copy(update={"gateway": self._counted})

    async def silence(self) -> str | None:
        """Return why the calls that are being answered, or that the limit has cut, are the backend's fault.

        The result is None if they are not. See `BackendSession.silence`.
        """
        if self._sampler.closed is not None:
            return self._sampler.silence
        silent = await asyncio.gather(*(sampling.backend.silence() for sampling in self._sampler.running))
        return next((reason for reason in silent if reason is not None), None)

    def sampled_now(self) -> tuple[tuple[int, ...], float] | None:
        """Return the ids of the main conversation's turn that is being sampled, and its seconds so far."""
        for sampling in self._sampler.running:
            if sampling.placed.conversation.kind == "main":
                return sampling.backend.sampled_now()
        return None


def _key(call: ModelCall, protocol: str) -> bytes:
    """Return a digest of what makes two calls the same: all but `stream`, `details` and the model's name.

    Raises:
        CallError: The call is nested too deeply.
    """
    return _digest((call.messages, call.tools, call.asked, call.max_tokens, call.marks, protocol))


def _digest(value: object) -> bytes:
    try:
        data = orjson.dumps(value)
    except TypeError:  # A text is not valid Unicode, or something is nested deeply.
        try:
            data = repr(value).encode("utf-8", "surrogatepass")
        except RecursionError:
            raise CallError("invalid", "the call is nested too deeply") from None
    return hashlib.blake2b(data, digest_size=16).digest()
