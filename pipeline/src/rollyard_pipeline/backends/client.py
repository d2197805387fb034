"""A client that samples from inference backends through whatever HTTP call each of them has."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from rollyard_crds.lease import BackendAssignment
from rollyard_inference import fitness
from rollyard_inference.capabilities import Capabilities, get, label_in, probe
from rollyard_inference.errors import (
    BackendError,
    BackendMismatch,
    BackendUnavailable,
    ContextOverflow,
    ModelNotServed,
    WeightsChanged,
)
from rollyard_inference.metrics import parse
from rollyard_inference.replies import NO_SUCH_CALL, document, sampled
from rollyard_inference.sampling.checks import AnswerReader
from rollyard_inference.sampling.request import Answer, Sampling
from rollyard_inference.transports.interface import MAX_ANSWER_BYTES, Reply, base_url
from rollyard_inference.transports.with_aiohttp import AiohttpTransport

from rollyard_pipeline.trajectories.recorder import Sample

UNKNOWN_MODE: Final = "unknown"

_FACTS_SECONDS: Final = 300.0  # A restart of the backend may go unnoticed for this time, in seconds.
# A request that determines the kind of log-probabilities may wait behind those of other workers.
_MODE_SECONDS: Final = 300.0
_MODE_WAIT: Final = 10.0  # The time for which the end of a turn waits for it, in seconds.
_MODE_FIRST: Final = 1.0  # The time for which the first requests for samples wait for it, in seconds.
_MODE_TRIES: Final = 3
_METRICS_BYTES: Final = 4 << 20
_MOST_LABELS: Final = 4  # Weight versions whose times are kept, of each backend.
_PAUSE_POLL: Final = 1.0  # The time between two checks of whether a backend is paused, in seconds.
_LABEL_SECONDS: Final = 1.0  # The age up to which a weight version counts as that of now, in seconds.
_LABEL_POLL: Final = 2.0  # The time between two checks of a backend's weight version, in seconds.
_PULSE_POLL: Final = 5.0  # The time between two checks of whether a silent backend computes, in seconds.
_LOOK_SECONDS: Final = 5.0  # The limit of each of these checks, in seconds.
_KEEP_SECONDS: Final = 3.0  # The limit of the check after a request that was cut, in seconds.
# The longest silence, in seconds, of a stream that has begun, on a server that samples for others: it may
# have lost the request. It is also the longest of any stream on a server that does not say if it samples.
_LONGEST_SILENCE: Final = 300.0


@dataclass(slots=True)
class _Backend:
    """What is known about one backend."""

    facts: Capabilities | None = None
    until: float = 0.0
    label: str | None = None
    """The weight version that the backend named last."""
    modes: dict[str, asyncio.Task[str]] = field(default_factory=dict)
    """What determines the kind of log-probabilities, by model."""
    paused: bool = False
    paused_at: float = -_PAUSE_POLL
    named: dict[str | None, float] = field(default_factory=dict)
    """When the backend was last asked and named a weight version, by the monotonic clock."""
    asked_at: float = -_LABEL_POLL
    """When it was last asked for it because of a stream."""
    looked_at: float = -_PULSE_POLL
    """When it was last asked whether it computes."""
    computed: float | None = None
    """The number of tokens that it had computed then."""
    alive_at: float = 0.0
    """When it last sent a token or was seen to compute."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    label_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def forget(self) -> None:
        """Forget everything known about the backend, because the server may be another process now."""
        self.until = 0.0
        self.forget_modes()

    def forget_modes(self) -> None:
        """Forget the kinds of log-probabilities, and end what determines them."""
        for task in self.modes.values():
            task.cancel()
        self.modes.clear()


@dataclass(slots=True)
class SampleRequest:
    """One request for tokens, and what has come of it while it runs.

    A request that ends with an error or is cancelled leaves its tokens here; see `BackendClient.kept`.
    """

    backend: BackendAssignment
    reader: AnswerReader | None = None
    """What reads the answer, or None before the request was sent."""
    label: str | None = None
    """The weight version that the backend named before the request."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, by the monotonic clock, and the number of all that had come then."""
    progress_at: float = field(default_factory=time.monotonic)
    """When the last token came, or else when the request began, by the monotonic clock."""
    on_tokens: Callable[[], None] | None = None
    """Called whenever tokens have come. It must not raise."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids that have been sampled so far."""
        return () if self.reader is None else self.reader.token_ids

    def recent(self, seconds: float) -> bool:
        """Return whether its last token came within the last `seconds`."""
        return bool(self.token_ids) and time.monotonic() - self.progress_at < seconds


class BackendClient:
    """Requests samples from backends. It is used as an async context manager.

    A request may take as long as its backend samples. It counts as hung if nothing comes of it and nothing
    shows that the backend computes at all.

    Args:
        stall_timeout: The time in seconds without a sign of life of a backend, after which its requests count
            as hung. Time in which it is paused does not count.
        connect_timeout: The time to wait for a connection, in seconds.
        pause_limit: The time that one request waits for a paused backend, in seconds.
        max_answer_bytes: The largest size of the response to one request for samples, in bytes.
    """

    def __init__(
        self,
        *,
        stall_timeout: float = 20.0,
        connect_timeout: float = 5.0,
        pause_limit: float = 3600.0,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._transport = AiohttpTransport(connect_timeout)
        self._stall = stall_timeout
        self._pause_limit = pause_limit
        self._max_answer_bytes = max_answer_bytes
        self._known: dict[str, _Backend] = {}

    async def __aenter__(self) -> BackendClient:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [task for known in self._known.values() for task in known.modes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.__aexit__(kind, error, trace)

    async def sample(
        self,
        backend: BackendAssignment,
        prompt: Sequence[int],
        sampling: Sampling,
        paused: Callable[[float], None] | None = None,
        traceparent: str | None = None,
        request: SampleRequest | None = None,
    ) -> Sample:
        """Send one request and return its sample.

        Args:
            paused: Called with every further second in which the backend is paused, as it passes.
            traceparent: The span that the request belongs to, as the header of W3C Trace Context names it.
            request: Holds what has come of the request so far.

        Raises:
            BackendUnavailable: There is no connection, it broke, the backend hangs, or it answered 5xx.
                Another try may help.
            BackendMismatch: The answer fails a check, or the backend serves another model.
            BackendRefused: The request itself is refused. ContextOverflow is raised if it is too long.
            WeightsChanged: The answer does not state which weights sampled which tokens.
        """
        known = self._known.setdefault(backend.url, _Backend())
        request = request or SampleRequest(backend)
        facts = await self._facts(known, backend)
        await self._refresh_label(known, backend)
        request.label = known.label
        request.reader = reader = facts.call.reader(prompt, sampling)
        url = base_url(backend.url) + facts.call.path

        def feed(data: bytes | bytearray) -> None:
            count = len(reader.token_ids)
            reader.feed(document(f"POST {url}", data))
            if len(reader.token_ids) > count:
                request.progress_at = known.alive_at = time.monotonic()
                request.arrivals.append((request.progress_at, len(reader.token_ids)))
                if request.on_tokens is not None:
                    request.on_tokens()

        try:
            async with _Watch(self, known, request, paused):
                body = facts.call.body(facts.model(backend.model), prompt, sampling, stream=True)
                reply = await self._transport.stream(
                    url, body, feed, limit=self._max_answer_bytes, traceparent=traceparent
                )
            if reply.status in NO_SUCH_CALL and not _about_model(url, reply):
                raise BackendUnavailable(f"{url} is gone (HTTP {reply.status})")
            if reply.content or reply.status != 200:
                reader.feed(sampled(url, reply))
            elif reader.finish_reason is None:
                raise BackendUnavailable(
                    f"{url}: the answer ended in the middle, after {len(reader.token_ids)} tokens"
                )
            answer = reader.answer()
        except ModelNotServed as error:
            known.forget()
            raise ModelNotServed(f"{error}; it serves {_names(facts)}") from error
        except BackendMismatch as error:
            known.forget()
            request.reader = None
            raise BackendMismatch(f"{backend.url}: {error}") from error
        except BackendUnavailable as error:
            if not error.overloaded:
                known.forget()
            raise
        except ContextOverflow:
            known.until = 0.0  # The known context length may be outdated.
            raise
        if answer.versions is None:
            version = await self._one_version(known, facts, backend, request.label, answer)
            versions = (version,) * len(answer.token_ids)
        else:
            versions = tuple(version or backend.policy_version for version in answer.versions)
            known.label = versions[-1] if versions else known.label
        return Sample(answer.token_ids, answer.logprobs, versions, answer.finish_reason)

    async def kept(self, request: SampleRequest) -> Sample | None:
        """Return what a request that was cut has sampled, or None if there is nothing that can be kept.

        Tokens are kept if it is certain which weights sampled them. Servers name these at the end of an
        answer. Without it, that is certain if the backend names the same version now as before the request,
        and else for the tokens that came until it did so last. The sample ends as `abort`, unless the
        request was cut after the end of its answer.
        """
        reader = request.reader
        if reader is None or not reader.token_ids:
            return None
        known = self._known[request.backend.url]
        count, version = len(reader.token_ids), request.label
        if reader.finish_reason is not None and (named := reader.answer().versions) is not None:
            versions = tuple(name or request.backend.policy_version for name in named)
            return Sample(tuple(reader.token_ids), tuple(reader.logprobs), versions, reader.finish_reason)
        if known.facts is not None and known.facts.weights.path is None:
            version = request.backend.policy_version
        elif reader.label is not None:
            count = reader.labelled if reader.label == version else 0
        else:
            try:
                async with asyncio.timeout(_KEEP_SECONDS):
                    same = await self.weight_label(request.backend) == version
            except (TimeoutError, BackendError):
                same = False
            if not same:
                at = known.named.get(version, -1.0)
                count = max((total for came, total in request.arrivals if came <= at), default=0)
        if not count:
            return None
        versions = (version or request.backend.policy_version,) * count
        whole = count == len(reader.token_ids)
        reason = (reader.finish_reason if whole else None) or "abort"
        return Sample(tuple(reader.token_ids[:count]), tuple(reader.logprobs[:count]), versions, reason)

    async def max_model_len(self, backend: BackendAssignment) -> int | None:
        """Return the context length of the backend's model in tokens, or None if it is not reported."""
        known = self._known.setdefault(backend.url, _Backend())
        try:
            return (await self._facts(known, backend)).limit(backend.model)
        except BackendError:
            return None  # The next turn asks again, and sampling reports the problem.

    async def weight_label(self, backend: BackendAssignment) -> str | None:
        """Return the current label of the backend's weights, or None if the backend does not report it.

        Raises:
            BackendUnavailable: The backend does not answer.
        """
        known = self._known.setdefault(backend.url, _Backend())
        path = (await self._facts(known, backend)).weights.path
        if path is None:
            return None
        began = time.monotonic()
        status, body = await get(self._transport, base_url(backend.url) + path)
        if status >= 500:
            raise BackendUnavailable(f"{backend.url}{path} answered {status}")
        known.label = label_in(body)
        known.named.pop(known.label, None)
        known.named[known.label] = began
        if len(known.named) > _MOST_LABELS:
            del known.named[next(iter(known.named))]
        return known.label

    async def _refresh_label(self, known: _Backend, backend: BackendAssignment) -> None:
        """Ask for the weight version, which is compared afterwards, if the backend has not named it lately.

        A backend that loads weights may not answer. The version that it named last then remains.
        """
        stale = time.monotonic() - _LABEL_SECONDS
        if (
            known.facts is None
            or known.facts.weights.path is None
            or known.named.get(known.label, 0.0) > stale
        ):
            return
        with contextlib.suppress(BackendError, TimeoutError):
            async with asyncio.timeout(_LABEL_SECONDS), known.label_lock:
                if known.named.get(known.label, 0.0) <= stale:
                    await self.weight_label(backend)

    async def logprobs_mode(self, backend: BackendAssignment) -> str:
        """Return the kind of log-probabilities that the backend gives, as vLLM names the modes.

        It is determined once, by requests of one token that are sent before the first sample is asked for.
        The result is `unknown` if they fail, and until they are answered.
        """
        known = self._known.setdefault(backend.url, _Backend())
        task = self._begin_mode(known, backend)
        if task is None:
            return UNKNOWN_MODE
        if not task.done():
            await asyncio.wait([task], timeout=_MODE_WAIT)
        return task.result() if task.done() and not task.cancelled() else UNKNOWN_MODE

    def _begin_mode(self, known: _Backend, backend: BackendAssignment) -> asyncio.Task[str] | None:
        """Return what determines the kind of log-probabilities. It is begun unless it has been."""
        if known.facts is None:
            return None
        task = known.modes.get(backend.model)
        if task is None:
            task = known.modes[backend.model] = asyncio.create_task(self._find_mode(known.facts, backend))
        return task

    async def _find_mode(self, facts: Capabilities, backend: BackendAssignment) -> str:
        model = facts.model(backend.model)
        for pause in range(_MODE_TRIES):
            await asyncio.sleep(pause)
            try:
                return await fitness.logprobs_mode(self._transport, backend.url, facts, model, _MODE_SECONDS)
            except BackendUnavailable:
                continue
            except BackendError:
                break
        return UNKNOWN_MODE

    async def is_paused(self, url: str) -> bool:
        """Return whether a backend reports that it is paused.

        Without an answer, its last state is returned.
        """
        known = self._known.setdefault(url, _Backend())
        if known.facts is None or not known.facts.reports_pause:
            return False
        if time.monotonic() - known.paused_at >= _PAUSE_POLL:
            known.paused_at = time.monotonic()
            try:
                status, body = await get(self._transport, base_url(url) + "/is_paused", _LOOK_SECONDS)
            except BackendError:
                return known.paused  # A backend that loads weights may not answer at all.
            known.paused = status == 200 and isinstance(body, dict) and body.get("is_paused") is True
            known.paused_at = time.monotonic()
        return known.paused

    async def _look(self, known: _Backend, request: SampleRequest) -> None:
        """Note the weight version of a backend that samples, and whether a silent one computes.

        Each backend is asked at most once in a while, whatever the number of its requests.
        """
        now = time.monotonic()
        if now - request.progress_at >= _PULSE_POLL and now - known.looked_at >= _PULSE_POLL:
            known.looked_at = now
            with contextlib.suppress(BackendError):
                if await self._computes(known, base_url(request.backend.url)):
                    known.alive_at = time.monotonic()
        if request.token_ids and now - known.asked_at >= _LABEL_POLL:
            known.asked_at = now
            with contextlib.suppress(BackendError, TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self.weight_label(request.backend)

    async def _computes(self, known: _Backend, url: str) -> bool:
        """Return whether a backend has computed tokens since this was last asked.

        A backend that does not report how many it has computed counts as computing while it answers.

        Raises:
            BackendUnavailable: It does not answer.
        """
        reply = await self._transport.request(
            "GET", f"{url}/metrics", seconds=_LOOK_SECONDS, limit=_METRICS_BYTES
        )
        computed = parse(reply.content).computed if reply.status == 200 else None
        if computed is not None:
            before, known.computed = known.computed, computed
            return computed != before
        sglang = known.facts is not None and known.facts.weights.shape == "sglang"
        path = "/health_generate" if sglang else "/health"
        reply = await self._transport.request("GET", url + path, seconds=_LOOK_SECONDS, limit=_METRICS_BYTES)
        return reply.status < 500

    async def _facts(self, known: _Backend, backend: BackendAssignment) -> Capabilities:
        if known.facts is None or time.monotonic() >= known.until:
            async with known.lock:
                if known.facts is None or time.monotonic() >= known.until:
                    facts = await probe(self._transport, backend.url)
                    if known.facts is None or _differ(facts, known.facts):
                        known.forget_modes()
                    for model, earlier in list(known.modes.items()):
                        if earlier.done() and earlier.result() == UNKNOWN_MODE:
                            del known.modes[model]
                    known.facts, known.label = facts, facts.weights.label
                    known.until = time.monotonic() + _FACTS_SECONDS
                    task = self._begin_mode(known, backend) if facts.serves(backend.model) else None
                    if task is not None and not task.done():
                        # Its requests go first: behind many for samples they would wait for long.
                        await asyncio.wait([task], timeout=_MODE_FIRST)
        if not known.facts.serves(backend.model):
            known.forget()
            raise ModelNotServed(
                f"{backend.url} does not serve the model '{backend.model}'; it serves {_names(known.facts)}"
            )
        return known.facts

    async def _one_version(
        self,
        known: _Backend,
        facts: Capabilities,
        backend: BackendAssignment,
        before: str | None,
        answer: Answer,
    ) -> str:
        """Return the one version of all tokens of an answer that does not name it for each token."""
        if facts.weights.path is None:
            return backend.policy_version
        after = answer.label
        if after is None:
            after = await self.weight_label(backend)
        known.label = after
        if before != after:
            raise WeightsChanged(
                f"{backend.url}: the weights' label was {before} before the request and {after} after it",
                discarded=len(answer.token_ids),
            )
        return backend.policy_version if after is None else after


class _Watch:
    """Ends a request of which nothing comes, on a backend that shows no sign of life.

    Only requests that take longer than a second have a cost, because the backend is asked only then.
    """

    def __init__(
        self,
        client: BackendClient,
        known: _Backend,
        request: SampleRequest,
        paused: Callable[[float], None] | None,
    ) -> None:
        self._client = client
        self._known = known
        self._request = request
        self._on_pause = paused
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._pause = 0.0

    async def __aenter__(self) -> None:
        self._request.progress_at = time.monotonic()
        await self._limit.__aenter__()
        self._timer = asyncio.get_running_loop().call_later(_PAUSE_POLL, self._check)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as late:
            silent = time.monotonic() - self._request.progress_at
            more = f" beside {self._pause:.0f} s of pause" if self._pause else ""
            raise BackendUnavailable(
                f"{self._request.backend.url}: no token for {silent:.0f} s{more}, after "
                f"{len(self._request.token_ids)} of them, and no sign that the server computes",
                hung=True,
            ) from late

    def _check(self) -> None:
        """End the request if its backend has been silent for too long, and look at the backend otherwise."""
        loop = asyncio.get_running_loop()
        alive = max(self._request.progress_at, self._known.alive_at)
        if self._may_be_lost():
            alive = min(alive, self._request.progress_at + _LONGEST_SILENCE)
        if time.monotonic() - alive >= self._client._stall:
            self._limit.reschedule(loop.time())
            return
        self._timer = loop.call_later(_PAUSE_POLL, self._check)
        if self._task is None:
            # Its calls may take long on a server that is busy, so the check does not wait for them.
            self._task = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        then = time.monotonic() - _PAUSE_POLL
        request = self._request
        while True:
            is_paused = self._pause < self._client._pause_limit and await self._client.is_paused(
                request.backend.url
            )
            now = time.monotonic()
            if is_paused:
                self._pause += now - then
                if self._on_pause is not None:
                    self._on_pause(now - then)
                request.progress_at = self._known.alive_at = now
            else:
                await self._client._look(self._known, request)
            then = now
            await asyncio.sleep(_PAUSE_POLL)

    def _may_be_lost(self) -> bool:
        """Return whether a silence of the request says something that its backend's life does not."""
        facts = self._known.facts
        if facts is None or not facts.call.streams:
            return False
        return bool(self._request.token_ids) or self._known.computed is None


def _names(facts: Capabilities) -> str:
    return ", ".join(sorted(facts.models or ())[:8]) or "no model that it names"


def _about_model(url: str, reply: Reply) -> bool:
    """Return whether a 404 concerns the model's name and not a missing call."""
    try:
        sampled(url, reply)
    except ModelNotServed:
        return True
    except BackendError:
        return False
    return False


def _differ(new: Capabilities, old: Capabilities) -> bool:
    return (new.call.path, new.models) != (old.call.path, old.models)
