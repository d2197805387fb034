"""One rollout's way to the model: retries, moving to another backend, going on after an abort.

Whatever happens, the next request holds the same token ids: a backend keeps no state of
ours but its prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from rollyard_crds.backoff import Backoff
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

from rollyard_pipeline.backends.client import UNKNOWN_MODE, BackendClient
from rollyard_pipeline.trajectories.recorder import Sample
from rollyard_pipeline.trajectories.request_seeds import request_seed

Route = Callable[[str, str, bool], Awaitable[RouteResponse]]
"""Asks the control plane for another backend: (url, error, whether the backend failed) to its answer."""

MIXED_MODES: Final = "mixed"
"""`SamplingRecord.logprobs_mode` of a rollout whose backends give different log-probabilities."""

_TRIES_BEFORE_ROUTE: Final = 2
_MAX_MISMATCHES: Final = 3  # impossible answers in a row, from whatever backend
_FIRST_WAIT: Final = 0.25  # seconds
_LONGEST_WAIT: Final = 5.0
_WAITS: Final = Backoff(_FIRST_WAIT, _LONGEST_WAIT)
_LONGEST_RETRY_AFTER: Final = 30.0  # seconds that a backend's Retry-After can ask for
_OVERLOAD_SECONDS: Final = 300.0  # of nothing but "too busy" before the rollout gives up
_UPDATE_SECONDS: Final = 900.0  # that a backend may run with weights that are not verified yet
_MAX_PARTS: Final = 64  # requests a turn may take when aborts cut it
_MAX_SHRINKS: Final = 3  # times that a turn is asked again with fewer tokens, for a backend's context


class BackendSession:
    """Samples turns for one rollout.

    Args:
        client: the process's backend client.
        backend: what the router chose at the lease.
        route: how to ask for another one.
        sampling: the job's sampling.
        task_id, sample_index: what seeds are derived from.
        budget: seconds without any answer after which the rollout gives up.
        probe_seconds: within which a backend that does not hang samples one token.
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
    ) -> None:
        self._client = client
        self._route = route
        self._sampling = sampling
        self._task_id = task_id
        self._sample_index = sample_index
        self._budget = budget
        self._probe_seconds = probe_seconds
        self._failing_since: float | None = None
        self._busy_since: float | None = None
        self._last_error = ""
        self._waiting = False
        self._prompt: Sequence[int] = ()
        self._modes: dict[str, str] = {}
        self.backend = backend
        self.vocabulary: int | None = None
        """Ids of the model are below this; None: not checked."""
        self.model_seconds = 0.0
        """The seconds that backends have worked on turns, without `waited_seconds`."""
        self.waited_seconds = 0.0
        """The seconds in which the backend was paused, updated or too busy."""
        self.on_wait: Callable[[float], None] | None = None
        """Called with every stretch of such seconds as it passes, because it is not the policy's time."""
        self.stats = RunStats()

    @property
    def failing(self) -> str | None:
        """The last error while no backend answers; None while all is well."""
        well = self._failing_since is None and self._busy_since is None
        return None if well else self._last_error

    @property
    def logprobs_mode(self) -> str:
        """What the log-probabilities of this rollout's tokens are, as vLLM names the modes.

        `temperature_logprobs` are those after temperature and before top-p and top-k (SGLang's), the same
        as `processed_logprobs` where the job sets neither; `mixed` where backends differ; `unknown`
        where a backend could not be asked.
        """
        modes = {self._mode(mode) for mode in self._modes.values()}
        return modes.pop() if len(modes) == 1 else MIXED_MODES if modes else UNKNOWN_MODE

    async def silence(self) -> str | None:
        """Why the time of an interrupted turn is the backend's and not the policy's; None if it is not so.

        A turn that merely samples long is the policy's own. So where a request was cut off without an
        answer, the backend is asked for one token: one that does not give it in time hangs.
        """
        if self.failing is not None or not self._waiting:
            return self.failing
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
        """The model's own context length in tokens, where the backend says it."""
        return await self._client.max_model_len(self.backend)

    async def turn(self, prompt: Sequence[int], max_tokens: int, turn: int) -> Sample:
        """Sample one turn of at most `max_tokens` tokens after `prompt`.

        A request that a weight update aborts is continued from the tokens it has. Tokens sampled with
        weights that are not verified are thrown away, with all that came after them.

        Raises:
            BackendUnavailable: no backend answered within the budget.
            ContextOverflow: not even one token fits after `prompt`.
            BackendMismatch, BackendRefused, WeightsChanged: see BackendClient.sample.
        """
        started, waited = time.monotonic(), self.waited_seconds
        try:
            return await self._turn(prompt, max_tokens, turn)
        finally:
            self.model_seconds += time.monotonic() - started - (self.waited_seconds - waited)

    async def _turn(self, prompt: Sequence[int], max_tokens: int, turn: int) -> Sample:
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[str] = []
        part, shrinks, room, unverified = 0, 0, max_tokens, 0.0

        def done(reason: FinishReason) -> Sample:
            self.stats.sampled_tokens += len(ids)
            return Sample(tuple(ids), tuple(logprobs), tuple(versions), reason)

        for _ in range(_MAX_PARTS):
            # A request that gave nothing to keep is asked again with the same seed.
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
            kept = _verified(sample)
            ids += sample.token_ids[:kept]
            logprobs += sample.logprobs[:kept]
            versions += sample.policy_versions[:kept]
            part += kept > 0
            if kept < len(sample.token_ids):
                self.stats.discarded_tokens += len(sample.token_ids) - kept
                unverified = await self._until_verified(unverified)
            elif sample.finish_reason != "abort":
                await self._learn_mode(prompt)
                return done(sample.finish_reason)
            elif len(ids) == room:
                return done("length")
            elif not sample.token_ids:
                await self._wait(_FIRST_WAIT)  # the backend is still being updated
        raise BackendUnavailable(
            f"{self.backend.url}: a turn was not done after {_MAX_PARTS} requests, which updates of its "
            "weights cut short"
        )

    async def _answered(self, prompt: Sequence[int], sampling: Sampling) -> Sample:
        tries, failures, mismatches = 0, 0, 0
        while True:
            # Stays true where the turn is cut off in the middle: see silence().
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
                left = self._left(error)
                if tries % _TRIES_BEFORE_ROUTE == 0:
                    wait = await self._move(str(error), blame=not error.overloaded)
                    failures = failures if wait else 0
                else:
                    wait = max(_WAITS.pause(failures), min(error.retry_after or 0.0, _LONGEST_RETRY_AFTER))
                if error.overloaded:
                    await self._wait(min(wait, left))
                else:
                    await asyncio.sleep(min(wait, left))
            else:
                self._failing_since = self._busy_since = None
                self._waiting = False
                return sample

    async def _checked(self, prompt: Sequence[int], sampling: Sampling) -> Sample:
        sample = await self._client.sample(self.backend, prompt, sampling, self._passed)
        if self.vocabulary is not None and sample.token_ids and max(sample.token_ids) >= self.vocabulary:
            raise BackendMismatch(
                f"{self.backend.url} sampled token {max(sample.token_ids)}, the vocabulary has "
                f"{self.vocabulary} tokens"
            )
        return sample

    def _left(self, error: BackendUnavailable) -> float:
        """Seconds until the rollout gives up.

        Raises:
            BackendUnavailable: none are left.
        """
        now = time.monotonic()
        self._last_error = str(error)
        if error.overloaded:
            since = self._busy_since = now if self._busy_since is None else self._busy_since
            budget = max(self._budget, _OVERLOAD_SECONDS)
        else:
            since = self._failing_since = now if self._failing_since is None else self._failing_since
            budget = self._budget
        left = since + budget - now
        if left <= 0:
            raise BackendUnavailable(f"no backend answered for {budget:g} s; last: {error}") from error
        return left

    async def _move(self, error: str, *, blame: bool) -> float:
        """Ask for another backend; gives how long to wait before the next try, in seconds."""
        answer = await self._route(self.backend.url, error[:1024], blame)
        if answer.backend is None:
            return min(answer.retry_after, _LONGEST_WAIT)
        moved = answer.backend.url != self.backend.url
        self.backend = answer.backend
        return 0.0 if moved else 2 * _FIRST_WAIT

    async def _until_verified(self, so_far: float) -> float:
        """Wait until the backend's weights are verified; gives the seconds waited in this turn.

        Raises:
            BackendUnavailable: they were not, for too long.
        """
        looks = 0
        while so_far < _UPDATE_SECONDS:
            looks += 1
            wait = _WAITS.pause(looks)
            await self._wait(wait)
            so_far += wait
            try:
                label = await self._client.weight_label(self.backend)
            except BackendError:
                return so_far  # the next request says what is wrong
            if label is None or not label.startswith(UNVERIFIED):
                return so_far
        raise BackendUnavailable(
            f"{self.backend.url} has weights that were not verified within {_UPDATE_SECONDS:g} s"
        )

    async def _wait(self, seconds: float) -> None:
        """Sleep for the backend's sake."""
        self._passed(seconds)  # before, so that a limit moves before it strikes
        await asyncio.sleep(seconds)

    def _passed(self, seconds: float) -> None:
        self.waited_seconds += seconds
        if self.on_wait is not None:
            self.on_wait(seconds)

    async def _learn_mode(self, prompt: Sequence[int]) -> None:
        if self._modes.get(self.backend.url, UNKNOWN_MODE) == UNKNOWN_MODE:
            self._modes[self.backend.url] = await self._client.logprobs_mode(self.backend, prompt)

    def _mode(self, mode: str) -> str:
        if mode == "temperature_logprobs" and self._sampling.top_p == 1.0 and self._sampling.top_k <= 0:
            return "processed_logprobs"
        return mode


def _verified(sample: Sample) -> int:
    """How many tokens come before the first that was sampled with weights not verified yet."""
    if not any(version.startswith(UNVERIFIED) for version in set(sample.policy_versions)):
        return len(sample.policy_versions)
    for place, version in enumerate(sample.policy_versions):
        if version.startswith(UNVERIFIED):
            return place
    return len(sample.policy_versions)
