"""One rollout's way to the model: retries, moving to another backend, going on after an abort.

Whatever happens, the next request holds the same token ids: a backend keeps no state of
ours but its prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from rollyard_crds.lease import BackendAssignment, RouteResponse
from rollyard_crds.rolloutjob import SamplingSpec

from rollyard_pipeline.backends.client import BackendClient
from rollyard_pipeline.backends.wire import Sampling
from rollyard_pipeline.errors import BackendError, BackendMismatch, BackendUnavailable
from rollyard_pipeline.recorder import Sample
from rollyard_pipeline.seeds import request_seed

Route = Callable[[str, str], Awaitable[RouteResponse]]
"""Asks the control plane for another backend: (url that failed, error) to its answer."""

_TRIES_BEFORE_ROUTE: Final = 2
_FIRST_WAIT: Final = 0.25  # seconds, doubled up to _LONGEST_WAIT
_LONGEST_WAIT: Final = 5.0
_MAX_PARTS: Final = 64  # requests a turn may take when aborts cut it


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
        self._last_error = ""
        self._waiting = False
        self._prompt: Sequence[int] = ()
        self.backend = backend
        self.model_seconds = 0.0

    @property
    def failing(self) -> str | None:
        """The last error while no backend answers; None while all is well."""
        return self._last_error if self._failing_since is not None else None

    async def silence(self) -> str | None:
        """Why the time of an interrupted turn is the backend's and not the policy's; None if it is not so.

        A turn that merely samples long is the policy's own. So where a request was cut off without an
        answer, the backend is asked for one token: one that does not give it in time hangs.
        """
        if self._failing_since is not None or not self._waiting:
            return self.failing
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

        A request that a weight update aborts goes on from the tokens it has.

        Raises:
            BackendUnavailable: no backend answered within the budget.
            BackendMismatch, BackendRefused: see BackendClient.sample.
        """
        started = time.monotonic()
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[str] = []
        try:
            for part in range(_MAX_PARTS):
                sampling = Sampling(
                    temperature=self._sampling.temperature,
                    top_p=self._sampling.top_p,
                    top_k=self._sampling.top_k,
                    max_tokens=max_tokens - len(ids),
                    seed=request_seed(self._sampling.seed, self._task_id, self._sample_index, turn, part),
                )
                sample = await self._answered((*prompt, *ids), sampling)
                ids += sample.token_ids
                logprobs += sample.logprobs
                versions += sample.policy_versions
                if sample.finish_reason != "abort":
                    return Sample(tuple(ids), tuple(logprobs), tuple(versions), sample.finish_reason)
                if len(ids) == max_tokens:
                    return Sample(tuple(ids), tuple(logprobs), tuple(versions), "length")
                if not sample.token_ids:
                    await asyncio.sleep(_FIRST_WAIT)  # the backend is still being updated
        finally:
            self.model_seconds += time.monotonic() - started
        raise BackendMismatch(f"{self.backend.url} aborted a turn {_MAX_PARTS} times")

    async def _answered(self, prompt: Sequence[int], sampling: Sampling) -> Sample:
        tries, wait = 0, _FIRST_WAIT
        while True:
            # Stays true where the turn is cut off in the middle: see silence().
            self._waiting, self._prompt = True, prompt
            try:
                sample = await self._client.sample(self.backend, prompt, sampling)
            except BackendUnavailable as error:
                self._waiting = False
                now = time.monotonic()
                if self._failing_since is None:
                    self._failing_since = now
                self._last_error = str(error)
                left = self._failing_since + self._budget - now
                if left <= 0:
                    raise BackendUnavailable(
                        f"no backend answered for {self._budget:g} s; last: {error}"
                    ) from error
                tries += 1
                if tries % _TRIES_BEFORE_ROUTE == 0:
                    wait = await self._move(str(error))
                await asyncio.sleep(min(wait, left))
                wait = min(max(2 * wait, _FIRST_WAIT), _LONGEST_WAIT)
            else:
                self._failing_since = None
                self._waiting = False
                return sample

    async def _move(self, error: str) -> float:
        """Ask for another backend; gives how long to wait before the next try, in seconds."""
        answer = await self._route(self.backend.url, error[:1024])
        if answer.backend is None:
            return min(answer.retry_after, _LONGEST_WAIT)
        moved = answer.backend.url != self.backend.url
        self.backend = answer.backend
        return 0.0 if moved else 2 * _FIRST_WAIT
