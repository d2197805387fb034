"""One rollout's access to the model: retries, moving to another backend, continuing after an abort.

In every case the next request contains the same token ids, because a backend keeps no state of the rollout
except its prefix cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from rollyard_crds.lease import BackendAssignment, RouteResponse, RunStats
from rollyard_crds.names import UNVERIFIED
from rollyard_crds.rolloutjob import SamplingSpec
from rollyard_crds.trajectory import FinishReason
from rollyard_inference.errors import (
    BackendError,
    BackendMismatch,
    BackendUnavailable,
    ContextOverflow,
    WeightsChanged,
)
from rollyard_inference.sampling.request import Sampling
from rollyard_process.backoff import Backoff
from rollyard_process.telemetry import conventions as names
from rollyard_process.telemetry.scope import RolloutScope, current
from rollyard_process.telemetry.spans import Value

from rollyard_pipeline.backends.client import UNKNOWN_MODE, BackendClient, SampleRequest
from rollyard_pipeline.errors import PipelineError
from rollyard_pipeline.trajectories.recorder import Sample

Route = Callable[[str, str, bool], Awaitable[RouteResponse]]
"""A function of (url, error, whether the backend failed) that asks the control plane for another backend."""
Cause = Literal["weights", "backend"]
"""Why a turn waits: the backend's weights are updated, or no backend has room."""

MIXED_MODES: Final = "mixed"
"""The `SamplingRecord.logprobs_mode` of a rollout whose backends give different log-probabilities."""

_TRIES_BEFORE_ROUTE: Final = 2
_MAX_MISMATCHES: Final = 3  # Impossible answers in a row, from any backend, that end the rollout.
_FIRST_WAIT: Final = 0.25  # seconds
_LONGEST_WAIT: Final = 5.0
_WAITS: Final = Backoff(_FIRST_WAIT, _LONGEST_WAIT)
_LONGEST_RETRY_AFTER: Final = 30.0  # The longest wait that a Retry-After can request, in seconds.
_OVERLOAD_SECONDS: Final = 300.0  # Seconds of only "too busy" answers before the rollout gives up.
OUTAGE_SECONDS: Final = 300.0
"""How long a rollout keeps its place in Run while its pool has no ready backend, in seconds."""
_UPDATE_SECONDS: Final = 900.0  # Seconds for which a backend may run with unverified weights.
_MAX_PARTS: Final = 64  # The number of requests that a turn may take if aborts cut it.
_MAX_SHRINKS: Final = 3  # How often a turn may be repeated with fewer tokens to fit a backend's context.
MAX_WAITS: Final = 32
"""The largest number of waits of one turn that have spans of their own."""
_GAP_SECONDS: Final = 1.5  # Stretches that follow each other so closely are one wait.
_WAIT_SPANS: Final[dict[Cause, str]] = {"weights": names.PAUSE_SPAN, "backend": names.BACKEND_WAIT_SPAN}


class Outage:
    """Adds up the seconds between two answers of a backend in which the pool has no ready backend.

    That is neither the rollout's fault nor a failure. The control plane says that there is an outage when it
    is asked for another backend.
    """

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def lasts(self) -> bool:
        """Whether the control plane had no ready backend when it was last asked."""
        return self._since is not None

    def seconds(self, now: float) -> float:
        """Return the seconds of outages until the monotonic time `now` since the last answer."""
        return self._before + (0.0 if self._since is None else now - self._since)

    def note(self, answer: RouteResponse, now: float) -> None:
        """Take note of what the control plane answered.

        An answer without backend and reason changes nothing, because the control plane could not be asked.
        """
        if answer.backend is None and answer.reason in ("", "NoBackendReady"):
            if answer.reason and self._since is None:
                self._since = now
            return
        self._before, self._since = self.seconds(now), None

    def end(self) -> None:
        """Forget all outages, because a backend has answered."""
        self._before, self._since = 0.0, None


@dataclass(slots=True)
class _Wait:
    cause: Cause
    begin: float
    end: float


@dataclass(slots=True)
class TurnSpan:
    """The span of one sampled turn, and of the times in which it waited for weights or for a backend.

    The turn is one of the rollout that the current task works on. Without one, it does nothing.

    Args:
        turn: The number of the turn, from 0.
    """

    turn: int
    scope: RolloutScope | None = field(default_factory=current)
    began: float = field(default_factory=time.monotonic)
    id: str = field(init=False, default="")
    traceparent: str | None = field(init=False, default=None)
    """The header with which requests of this turn name it as their parent, or None outside of a rollout."""
    _waits: list[_Wait] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.scope is not None:
            self.id = self.scope.child()
            self.traceparent = self.scope.traceparent(self.id)

    def wait(self, cause: Cause, begin: float, end: float) -> None:
        """Note a stretch of waiting, by the monotonic clock. Stretches that follow closely are joined."""
        if self.scope is None or self.scope.sink is None:
            return
        last = self._waits[-1] if self._waits else None
        if last is not None and last.cause == cause and begin - last.end < _GAP_SECONDS:
            last.end = max(last.end, end)
        elif len(self._waits) < MAX_WAITS:
            self._waits.append(_Wait(cause, max(begin, self.began), end))

    def end(
        self,
        *,
        model: str,
        url: str,
        prompt: int,
        max_tokens: int,
        requests: int,
        sample: Sample | None,
        error: str = "",
    ) -> None:
        """Add the spans of the turn, which ends now.

        Args:
            model: The name of the model.
            url: The base URL of the backend that answered last.
            prompt: The number of tokens of the prompt.
            max_tokens: The largest number of tokens that the turn could have.
            requests: The number of requests that backends answered.
            sample: What was sampled, or None.
            error: The type of the error with which the turn ended, or "".
        """
        scope = self.scope
        if scope is None or scope.sink is None:
            return
        now = time.monotonic()
        for wait in self._waits:
            end = min(wait.end, now)
            name = _WAIT_SPANS[wait.cause]
            scope.add(name, end - wait.begin, {names.BACKEND: url}, parent=self.id, ago=now - end)
        attributes: dict[str, Value] = {
            names.OPERATION: names.CHAT,
            names.PROVIDER: names.PROVIDER_NAME,
            names.CONVERSATION: scope.rollout,
            names.MODEL: model,
            names.BACKEND: url,
            names.TURN: self.turn,
            names.MAX_TOKENS: max_tokens,
            names.INPUT_TOKENS: prompt,
            names.REQUESTS: requests,
        }
        if sample is not None:
            attributes[names.OUTPUT_TOKENS] = len(sample.token_ids)
            attributes[names.FINISH_REASONS] = (sample.finish_reason,)
            if sample.policy_versions:
                attributes[names.POLICY_VERSION] = sample.policy_versions[-1]
        if error:
            attributes[names.ERROR_TYPE] = error
        title = f"{names.CHAT} {model}"
        scope.add(title, now - self.began, attributes, id=self.id, client=True, error=error)


class BackendSession:
    """Samples turns for one rollout.

    Args:
        client: The process's backend client.
        backend: The backend that the router chose when the lease was granted.
        route: Asks for another backend.
        sampling: The job's sampling.
        task_id, sample_index: The values from which seeds are derived.
        budget: The time in seconds without any answer after which the rollout gives up. The time for which
            the pool has no ready backend is not part of it.
        probe_seconds: The time in seconds in which a backend that does not hang samples one token.
        outage_seconds: The time in seconds without a ready backend after which the rollout goes back to its
            queue.
    """

    def __init__(
        self,
        client: BackendClient,
        backend: BackendAssignment,
        route: Route,
        sampling: SamplingSpec,
        *,
        task_id: str,
        sample_index: int,
        budget: float = 60.0,
        probe_seconds: float = 10.0,
        outage_seconds: float = OUTAGE_SECONDS,
    ) -> None:
        self._client = client
        self._route = route
        self._sampling = sampling
        self._task_id = task_id
        self._sample_index = sample_index
        self._budget = budget
        self._probe_seconds = probe_seconds
        self._outage_seconds = outage_seconds
        self._outage = Outage()
        self._failing_since: float | None = None
        self._busy_since: float | None = None
        self._last_error = ""
        self._waiting = False
        self._prompt: Sequence[int] = ()
        self._tokens: _TurnTokens | None = None
        self._request: SampleRequest | None = None
        self._modes: dict[str, str] = {}
        self._span: TurnSpan | None = None
        self.backend = backend
        self.vocabulary: int | None = None
        """The number of token ids of the model, which all ids are below. None disables the check."""
        self.model_seconds = 0.0
        """The time that backends have worked on turns, without `waited_seconds`, in seconds."""
        self.waited_seconds = 0.0
        """The time in which the backend was paused, updated or too busy, or none was ready, in seconds."""
        self.on_wait: Callable[[float], None] | None = None
        """Called with every stretch of such seconds as it passes, as it is not counted as the policy's."""
        self.waited_until = 0.0
        """When the last such stretch ends or has ended, by the monotonic clock."""
        self.on_tokens: Callable[[], None] | None = None
        """Called whenever tokens of the turn have come, which `sampled_since` returns. It must not raise."""
        self.stats = RunStats()

    @property
    def failing(self) -> str | None:
        """Return the last error while no backend answers, or None if there is no problem."""
        well = self._failing_since is None and self._busy_since is None
        return None if well else self._last_error

    @property
    def logprobs_mode(self) -> str:
        """Return the kind of log-probabilities of this rollout's tokens, as vLLM names the modes.

        `temperature_logprobs` are those after temperature and before top-p and top-k (SGLang's). They equal
        `processed_logprobs` if the job sets neither. `mixed` means that backends differ, and `unknown` that a
        backend could not be asked.
        """
        return joined_mode(self.modes)

    @property
    def modes(self) -> set[str]:
        """Return the kinds of log-probabilities of the backends whose whole answers are in the record."""
        return {self._mode(mode) for mode in self._modes.values()}

    async def silence(self) -> str | None:
        """Return why an interrupted turn is the backend's fault, or None if the time was the policy's own.

        A turn that merely takes long to sample is the policy's own. If a request was cut off whose last token
        is not recent, the backend is therefore asked for one token. A backend that does not give it in time
        hangs.
        """
        if self.failing is not None or not self._waiting:
            return self.failing
        if self._request is not None and self._request.recent(self._probe_seconds):
            return None
        if await self._client.is_paused(self.backend.url):
            return f"{self.backend.url} is paused"
        probe = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=1, seed=0)
        try:
            async with asyncio.timeout(self._probe_seconds):
                await self._client.sample(self.backend, self._prompt[:1], probe)
        except TimeoutError:
            return f"{self.backend.url}: not one token within {self._probe_seconds:g} s"
        except BackendError as error:
            return str(error)
        return None

    async def context_limit(self) -> int | None:
        """Return the model's own context length in tokens, or None if the backend does not report it."""
        return await self._client.max_model_len(self.backend)

    async def turn(self, prompt: Sequence[int], max_tokens: int, turn: int) -> Sample:
        """Sample one turn of at most `max_tokens` tokens after `prompt`.

        A request that a weight update aborts is continued from the tokens it has. Tokens sampled with
        unverified weights are discarded, with all that came after them.

        Raises:
            BackendUnavailable: No backend answered within the budget.
            PipelineError: The pool had no ready backend for too long.
            ContextOverflow: Not even one token fits after `prompt`.
            BackendMismatch, BackendRefused, WeightsChanged: See BackendClient.sample.
        """
        started, waited = time.monotonic(), self.waited_seconds
        self._span, before = TurnSpan(turn), self.stats.requests
        sample, failure = None, "Interrupted"
        self._tokens = _TurnTokens()
        try:
            sample = await self._turn(prompt, max_tokens, turn, self._tokens)
            failure, self._tokens = "", None
            return sample
        except Exception as error:
            failure, self._tokens = type(error).__name__, None
            raise
        finally:
            self.model_seconds += time.monotonic() - started - (self.waited_seconds - waited)
            self._span.end(
                model=self.backend.model,
                url=self.backend.url,
                prompt=len(prompt),
                max_tokens=max_tokens,
                requests=self.stats.requests - before,
                sample=sample,
                error=failure,
            )

    def sampled_now(self) -> tuple[tuple[int, ...], float] | None:
        """Return the ids of the turn that is being sampled, and its seconds so far, or None if no turn is."""
        if self._tokens is None:
            return None
        running = self._request.token_ids if self._waiting and self._request is not None else ()
        return (*self._tokens.ids, *running), time.monotonic() - self._tokens.began

    def sampled_since(self, first: int) -> list[int]:
        """Return the ids of the turn that is being sampled, without the first `first` ones."""
        if self._tokens is None:
            return []
        ids = self._tokens.ids[first:]
        if self._waiting and self._request is not None:
            ids += self._request.token_ids[max(0, first - len(self._tokens.ids)) :]
        return ids

    async def cut(self) -> Sample | None:
        """Return what the turn that was cancelled in the middle has sampled, or None if that is nothing.

        It ends as `length`, as a turn without room for a further token does.
        """
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            return None
        if self._waiting:
            self.stats.requests += 1
            kept = await self._kept()
            if kept is not None:
                tokens.add(kept, _verified(kept))
        if not tokens.ids:
            return None
        self.stats.sampled_tokens += len(tokens.ids)
        return tokens.sample("length")

    async def _turn(self, prompt: Sequence[int], max_tokens: int, turn: int, tokens: _TurnTokens) -> Sample:
        ids = tokens.ids
        part, shrinks, room, unverified = 0, 0, max_tokens, 0.0

        def done(reason: FinishReason) -> Sample:
            self.stats.sampled_tokens += len(ids)
            return tokens.sample(reason)

        for _ in range(_MAX_PARTS):
            # A request without any token to keep is repeated with the same seed.
            seed = request_seed(self._sampling.seed, self._task_id, self._sample_index, turn, part)
            sampling = Sampling(
                temperature=self._sampling.temperature,
                top_p=self._sampling.top_p,
                top_k=self._sampling.top_k,
                max_tokens=room - len(ids),
                seed=seed,
            )
            try:
                sample = await self._answered((*prompt, *ids) if ids else prompt, sampling)
            except WeightsChanged as error:
                self.stats.requests += 1
                self.stats.discarded_tokens += error.discarded
                continue
            except ContextOverflow as error:
                fits = (error.limit or 0) - len(prompt)
                shrinks += 1
                if shrinks <= _MAX_SHRINKS and (smaller := min(fits, room - 1)) > len(ids):
                    room = smaller
                    continue
                if ids:
                    return done("length")
                raise
            self.stats.requests += 1
            verified = _verified(sample)
            tokens.add(sample, verified)
            part += verified > 0
            if verified < len(sample.token_ids):
                self.stats.discarded_tokens += len(sample.token_ids) - verified
                unverified = await self._until_verified(unverified)
            elif sample.finish_reason != "abort":
                await self._learn_mode()
                return done(sample.finish_reason)
            elif len(ids) == room:
                return done("length")
            elif not sample.token_ids:
                await self._wait(_FIRST_WAIT, "weights")  # The backend is still being updated.
        raise BackendUnavailable(
            f"{self.backend.url}: a turn was not done after {_MAX_PARTS} requests, which updates of its "
            "weights or failures cut short"
        )

    async def _answered(self, prompt: Sequence[int], sampling: Sampling) -> Sample:
        tries, failures, mismatches = 0, 0, 0
        while True:
            # The flag remains true if the turn is cut off in the middle: see silence().
            self._waiting, self._prompt = True, prompt
            try:
                sample = await self._checked(prompt, sampling)
            except BackendMismatch as error:
                self._waiting = False
                mismatches += 1
                if mismatches == _MAX_MISMATCHES:
                    raise
                await asyncio.sleep(await self._move(str(error), blame=True))
            except BackendUnavailable as error:
                self._waiting = False
                tries, failures = tries + 1, failures + 1
                kept = await self._kept()
                if kept is not None:
                    self._failing_since = self._busy_since = None
                left = self._left(error)
                if error.hung or tries % _TRIES_BEFORE_ROUTE == 0 or self._outage.lasts:
                    wait = await self._move(str(error), blame=not error.overloaded)
                    failures = failures if wait else 0
                else:
                    wait = max(_WAITS.pause(failures), min(error.retry_after or 0.0, _LONGEST_RETRY_AFTER))
                if error.overloaded or self._outage.lasts:
                    await self._wait(min(wait, left), "backend")
                else:
                    await asyncio.sleep(min(wait, left))
                if kept is not None:
                    return kept
            else:
                self._failing_since = self._busy_since = None
                self._outage.end()
                self._waiting = False
                return sample

    async def _checked(self, prompt: Sequence[int], sampling: Sampling) -> Sample:
        parent = None if self._span is None else self._span.traceparent
        self._request = SampleRequest(self.backend, on_tokens=self.on_tokens)
        sample = await self._client.sample(
            self.backend, prompt, sampling, self._paused, parent, self._request
        )
        if self._outside_vocabulary(sample):
            raise BackendMismatch(
                f"{self.backend.url} sampled token {max(sample.token_ids)}, the vocabulary has "
                f"{self.vocabulary} tokens"
            )
        return sample

    async def _kept(self) -> Sample | None:
        """Return what the last request has sampled before it was cut, as far as that can be used."""
        request = self._request
        sample = await self._client.kept(request) if request is not None else None
        if sample is not None and self._outside_vocabulary(sample):
            sample = None
        if request is not None:
            self.stats.discarded_tokens += len(request.token_ids) - (len(sample.token_ids) if sample else 0)
        return sample

    def _outside_vocabulary(self, sample: Sample) -> bool:
        return self.vocabulary is not None and max(sample.token_ids, default=-1) >= self.vocabulary

    def _left(self, error: BackendUnavailable) -> float:
        """Return the number of seconds until the rollout gives up.

        Raises:
            BackendUnavailable: No time is left.
            PipelineError: The pool had no ready backend for too long.
        """
        now = time.monotonic()
        outage = self._outage.seconds(now)
        self._last_error = str(error)
        if error.overloaded:
            since = self._busy_since = now if self._busy_since is None else self._busy_since
            budget = max(self._budget, _OVERLOAD_SECONDS)
        else:
            since = self._failing_since = now if self._failing_since is None else self._failing_since
            budget = self._budget
        left = since + budget + outage - now
        if self._outage.lasts and (left <= 0 or outage >= self._outage_seconds):
            raise PipelineError(
                f"the pool had no ready backend for {outage:.0f} s; last: {error}", "NoBackend", counts=False
            ) from error
        if left <= 0:
            raise BackendUnavailable(f"no backend answered for {budget:g} s; last: {error}") from error
        return left

    async def _move(self, error: str, *, blame: bool) -> float:
        """Ask for another backend, and return the wait before the next try in seconds."""
        answer = await self._route(self.backend.url, error[:1024], blame)
        self._outage.note(answer, time.monotonic())
        if answer.backend is None:
            return min(answer.retry_after, _LONGEST_WAIT)
        moved = answer.backend.url != self.backend.url
        self.backend = answer.backend
        return 0.0 if moved else 2 * _FIRST_WAIT

    async def _until_verified(self, so_far: float) -> float:
        """Wait until the backend's weights are verified, and return the seconds waited in this turn.

        Raises:
            BackendUnavailable: The weights remained unverified for too long.
        """
        looks = 0
        while so_far < _UPDATE_SECONDS:
            looks += 1
            wait = _WAITS.pause(looks)
            await self._wait(wait, "weights")
            so_far += wait
            try:
                label = await self._client.weight_label(self.backend)
            except BackendError:
                return so_far  # The next request reports the problem.
            if label is None or not label.startswith(UNVERIFIED):
                return so_far
        raise BackendUnavailable(
            f"{self.backend.url} has weights that were not verified within {_UPDATE_SECONDS:g} s"
        )

    async def _wait(self, seconds: float, cause: Cause) -> None:
        """Sleep because of the backend, and count the time as waited."""
        now = time.monotonic()
        if self._span is not None:
            self._span.wait(cause, now, now + seconds)
        self._passed(now, seconds)  # The time is reported first, which moves a limit before it expires.
        await asyncio.sleep(seconds)

    def _paused(self, seconds: float) -> None:
        """Note that the backend has been paused for that many further seconds."""
        now = time.monotonic()
        if self._span is not None:
            self._span.wait("weights", now - seconds, now)
        self._passed(now - seconds, seconds)

    def _passed(self, begin: float, seconds: float) -> None:
        self.waited_seconds += seconds
        self.waited_until = begin + seconds
        if self.on_wait is not None:
            self.on_wait(seconds)

    async def _learn_mode(self) -> None:
        if self._modes.get(self.backend.url, UNKNOWN_MODE) == UNKNOWN_MODE:
            self._modes[self.backend.url] = await self._client.logprobs_mode(self.backend)

    def _mode(self, mode: str) -> str:
        if mode == "temperature_logprobs" and self._sampling.top_p == 1.0 and self._sampling.top_k <= 0:
            return "processed_logprobs"
        return mode


@dataclass(slots=True)
class _TurnTokens:
    """What the requests of one turn have sampled together, in three lists of the same length."""

    began: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)

    def add(self, sample: Sample, count: int) -> None:
        """Append the first `count` tokens of a sample."""
        self.ids += sample.token_ids[:count]
        self.logprobs += sample.logprobs[:count]
        self.versions += sample.policy_versions[:count]

    def sample(self, reason: FinishReason) -> Sample:
        """Return the turn as one sample."""
        return Sample(tuple(self.ids), tuple(self.logprobs), tuple(self.versions), reason)


def _verified(sample: Sample) -> int:
    """Return how many tokens precede the first that was sampled with unverified weights."""
    if not any(version.startswith(UNVERIFIED) for version in set(sample.policy_versions)):
        return len(sample.policy_versions)
    for index, version in enumerate(sample.policy_versions):
        if version.startswith(UNVERIFIED):
            return index
    return len(sample.policy_versions)


def joined_mode(modes: set[str]) -> str:
    """Return the one kind of log-probabilities of several backends; see `BackendSession.logprobs_mode`."""
    if len(modes) > 1:
        return MIXED_MODES
    return next(iter(modes), UNKNOWN_MODE)


def request_seed(base: int, task_id: str, sample_index: int, turn: int, part: int = 0) -> int:
    """Return a seed in [0, 2**31) for one request of one turn, which makes a run repeatable.

    `part` numbers the requests of one turn, because another request continues a turn that a weight update has
    cut. The seed has 31 bits, because backends read seeds as signed 32-bit numbers.
    """
    text = task_id.encode()
    packed = struct.pack(">QIIII", base, len(text), sample_index, turn, part) + text
    return int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "big") >> 1
