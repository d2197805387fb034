"""The engine as coroutines, which turn parsed bodies into finished sequences."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollyard_engine.errors import EngineError, EngineStopped, InvalidRequest
from rollyard_engine.generation.model import load_model
from rollyard_engine.generation.scheduler import PauseMode, Scheduler
from rollyard_engine.generation.sequence import Sequence
from rollyard_engine.generation.thread import EngineThread
from rollyard_engine.script import Script
from rollyard_engine.serving.protocol import SamplingFields
from rollyard_engine.tokens import EngineTokenizer

T = TypeVar("T")

METRIC_LABELS: Final = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """The identity of the server: the names that it answers to, and its limits.

    The first name is the canonical one.
    """

    names: tuple[str, ...]
    root: Path
    max_model_len: int
    vocab_size: int
    threads: int
    created: int


class EngineService:
    """A service that validates requests, submits them to the engine thread and awaits the results."""

    def __init__(
        self,
        served: ServerIdentity,
        tokenizer: EngineTokenizer,
        engine: EngineThread,
        script: Script | None = None,
    ) -> None:
        self.served = served
        self.tokenizer = tokenizer
        self.engine = engine
        self._script = script

    def check_model(self, name: str | None) -> None:
        """Check that a request names a model that is served, or none.

        Raises:
            EngineError: This server does not serve the model.
        """
        if name and name not in self.served.names:
            raise EngineError(
                f"The model `{name}` does not exist. Valid aliases: {', '.join(self.served.names)}.",
                reason="ModelNotServed",
                param="model",
            )

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        fields: SamplingFields,
        *,
        default_max_tokens: int | None,
        stream: bool,
    ) -> QueuedRequest:
        """Check and queue a request.

        If ``default_max_tokens`` is ``None``, the default is the number of tokens that the context has room
        for.

        Raises:
            InvalidRequest: A field or the prompt cannot be served.
            EngineError: The server has as many requests as it accepts.
            EngineStopped: The engine is shutting down or has failed.
        """
        room = self._room(prompt)
        if stream and fields.prompt_logprobs is not None:
            raise InvalidRequest(
                "`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs"
            )
        params = fields.to_params(
            default_max_tokens=default_max_tokens or room, prompt_tokens=len(prompt), room=room
        )
        news = asyncio.Event()
        sequence = Sequence(
            request_id,
            np.asarray(prompt, dtype=np.int32),
            params,
            max_model_len=self.served.max_model_len,
            every=fields.stream_interval if stream else 0,
            on_progress=news.set,
            forced=() if self._script is None else self._script.answer(prompt),
        )
        self.engine.submit(sequence)
        return QueuedRequest(sequence, news, self.engine)

    def _room(self, prompt: list[int]) -> int:
        """Return the number of tokens that the context has left after ``prompt``.

        Raises:
            InvalidRequest: The prompt is empty, is too long, or contains an id that is not in the vocabulary.
        """
        limit = self.served.max_model_len
        if not prompt:
            raise InvalidRequest("The decoder prompt cannot be empty", param="prompt")
        if len(prompt) > limit:
            raise InvalidRequest(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains "
                f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
                f"Please reduce the length of the input prompt.",
                param="input_tokens",
                value=len(prompt),
            )
        if len(prompt) == limit:
            raise InvalidRequest(
                f"The decoder prompt (length {len(prompt)}) plus the number of requested output tokens "
                f"(at least 1) is longer than the maximum model length of {limit}. Make sure that "
                f"`max_model_len` is no smaller than the number of text tokens (prompt + requested output "
                f"tokens)."
            )
        largest = max(prompt)
        if largest >= self.served.vocab_size:
            raise InvalidRequest(f"Token id {largest} is out of vocabulary", param="prompt", value=largest)
        return limit - len(prompt)

    async def call(self, run: Callable[[Scheduler], T]) -> T:
        """Run a function on the scheduler, on the engine thread, and return its result."""
        return await asyncio.wrap_future(self.engine.call(run))

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause the scheduler, and return once nothing runs."""
        paused: Future[None] = Future()

        def when_paused() -> None:
            if paused.set_running_or_notify_cancel():
                paused.set_result(None)

        await self.call(
            lambda scheduler: scheduler.pause(mode, clear_cache=clear_cache, when_paused=when_paused)
        )
        await asyncio.wrap_future(paused)

    async def reload_weights(self, path: Path) -> None:
        """Load another model folder beside the served one, and then swap the two.

        Raises:
            EngineError: The folder cannot be served. The old weights then remain in use.
        """
        model = await asyncio.to_thread(load_model, path, self.served.threads)
        await self.call(lambda scheduler: scheduler.swap_model(model))

    async def set_version(self, version: str) -> None:
        """Set the label of the weights, which applies from the next sampled token on."""

        def label(scheduler: Scheduler) -> None:
            scheduler.version = version

        await self.call(label)


class QueuedRequest:
    """A queued request, as seen from the event loop."""

    def __init__(self, sequence: Sequence, news: asyncio.Event, engine: EngineThread) -> None:
        self.sequence = sequence
        self._news = news
        self._engine = engine

    async def finished(self) -> Sequence:
        """Return the sequence once it has ended.

        If the sequence fails, its error is raised. If this coroutine is cancelled, the sequence is aborted.
        """
        async for _ in self.progress():
            pass
        return self.sequence

    async def progress(self) -> AsyncGenerator[tuple[int, int], None]:
        """Yield the ranges of newly sampled tokens as they arrive.

        The last range is yielded even if it is empty.
        """
        sequence, start = self.sequence, 0
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if sequence.error is not None:
                    raise sequence.error
                ended = sequence.finished
                size = len(sequence.output)
                if size > start or ended:
                    yield start, size
                    start = size
                if ended:
                    return
        finally:
            if not sequence.finished:
                with contextlib.suppress(EngineStopped):
                    self._engine.call(lambda scheduler: scheduler.abort(sequence))


def new_request_id(header: str | None, body_id: str | None) -> str:
    """Return the id of a request, in the same way as vLLM.

    It is the ``X-Request-Id`` header if there is one, otherwise the id in the body, and otherwise a random
    id.
    """
    return header or body_id or uuid.uuid4().hex


def now() -> int:
    """Return the Unix time in whole seconds."""
    return int(time.time())


class EngineCollector(Collector):
    """A collector that reads the engine's counters at each scrape. The names of metrics are vLLM's."""

    def __init__(self, engine: EngineThread, model_name: str) -> None:
        self._engine = engine
        self._labels = (model_name, "0")

    def collect(self) -> Iterable[Metric]:
        """Yield one metric family for each number."""
        scheduler = self._engine.scheduler
        stats = scheduler.stats
        gauges = (
            ("vllm:num_requests_running", "Requests that hold a slot.", len(scheduler.running)),
            ("vllm:num_requests_waiting", "Requests that wait for a slot.", self._engine.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the KV cache memory in use, 1 is all.",
                scheduler.cache_usage,
            ),
        )
        counters = (
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_queries,
            ),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens that were not computed again.", stats.prefix_hits),
            ("vllm:generation_tokens", "Sampled tokens.", stats.generation_tokens),
        )
        for name, text, number in gauges:
            gauge = GaugeMetricFamily(name, text, labels=METRIC_LABELS)
            gauge.add_metric(self._labels, number)
            yield gauge
        for name, text, number in counters:
            counter = CounterMetricFamily(name, text, labels=METRIC_LABELS)
            counter.add_metric(self._labels, number)
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Ended requests by how they ended.",
            labels=(*METRIC_LABELS, "finished_reason"),
        )
        for reason, number in stats.finished_requests.items():
            ended.add_metric((*self._labels, reason), number)
        yield ended


def exposition(engine: EngineThread, model_name: str) -> bytes:
    """Return the metrics in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, model_name))
    return generate_latest(registry)
