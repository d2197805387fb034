"""The engine as coroutines: from parsed bodies to finished sequences."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from rollyard_engine.errors import EngineStopped, InvalidRequest, ModelNotServed
from rollyard_engine.generation.model import load_model
from rollyard_engine.generation.scheduler import PauseMode, Scheduler
from rollyard_engine.generation.sequence import Sequence
from rollyard_engine.generation.thread import EngineThread
from rollyard_engine.serving.protocol import SamplingFields
from rollyard_engine.tokens import ChatTokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The identity of the server: the names that it answers to (the first is canonical) and its limits."""

    names: tuple[str, ...]
    root: Path
    max_model_len: int
    vocab_size: int
    threads: int
    created: int


class EngineService:
    """Validates requests, submits them to the engine thread and awaits what comes."""

    def __init__(self, served: ServedModel, tokenizer: ChatTokenizer, engine: EngineThread) -> None:
        self.served = served
        self.tokenizer = tokenizer
        self.engine = engine

    def check_model(self, name: str | None) -> None:
        """Raises ``ModelNotServed`` unless ``name`` is absent or one that is served."""
        if name and name not in self.served.names:
            raise ModelNotServed(
                f"The model `{name}` does not exist. Valid aliases: {', '.join(self.served.names)}.",
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
    ) -> Submission:
        """Check and queue a request; ``default_max_tokens`` ``None`` means what the context has room for.

        Raises ``InvalidRequest``, ``QueueFull`` or ``EngineStopped``.
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
            stream=stream,
            on_progress=news.set,
        )
        self.engine.submit(sequence)
        return Submission(sequence, news, self.engine)

    def _room(self, prompt: list[int]) -> int:
        """The tokens that the context has left after ``prompt``. Raises ``InvalidRequest``."""
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
        """Run a function of the scheduler on the engine thread."""
        return await asyncio.wrap_future(self.engine.call(run))

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause, and return once nothing runs."""
        paused: Future[None] = Future()

        def when_paused() -> None:
            if paused.set_running_or_notify_cancel():
                paused.set_result(None)

        await self.call(
            lambda scheduler: scheduler.pause(mode, clear_cache=clear_cache, when_paused=when_paused)
        )
        await asyncio.wrap_future(paused)

    async def reload_weights(self, path: Path) -> None:
        """Load another model folder beside the served one, then swap.

        Raises ``ModelFolderInvalid``; the old weights then stay in use.
        """
        model = await asyncio.to_thread(load_model, path, self.served.threads)
        await self.call(lambda scheduler: scheduler.swap_model(model))

    async def set_version(self, version: str) -> None:
        """Label the weights that sample from the next token on."""

        def label(scheduler: Scheduler) -> None:
            scheduler.version = version

        await self.call(label)


class Submission:
    """A queued request, seen from the event loop."""

    def __init__(self, sequence: Sequence, news: asyncio.Event, engine: EngineThread) -> None:
        self.sequence = sequence
        self._news = news
        self._engine = engine

    async def finished(self) -> Sequence:
        """The sequence once it has ended. Raises its error; aborts it if this coroutine is cancelled."""
        async for _ in self.progress():
            pass
        return self.sequence

    async def progress(self) -> AsyncGenerator[tuple[int, int], None]:
        """The ranges of newly sampled tokens as they come; the last one is yielded even when empty."""
        sequence, seen = self.sequence, 0
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if sequence.error is not None:
                    raise sequence.error
                ended = sequence.finished
                size = len(sequence.output)
                if size > seen or ended:
                    yield seen, size
                    seen = size
                if ended:
                    return
        finally:
            if not sequence.finished:
                with contextlib.suppress(EngineStopped):
                    self._engine.call(lambda scheduler: scheduler.abort(sequence))


def new_request_id(header: str | None, given: str | None) -> str:
    """A request's id: the ``X-Request-Id`` header, else the body's, else a random one; as vLLM."""
    return header or given or uuid.uuid4().hex


def now() -> int:
    """Unix seconds."""
    return int(time.time())
