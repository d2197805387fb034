"""Rollouts without a service: model, sandboxes and episodes in the trainer's own process.

This is what a trainer writes that plays its rollouts itself. The model is the embedded engine's, on a thread
of this process; sandboxes come from the stage workers' own provider; the tools are the stage workers' own.
There is no HTTP, no queue, no record and no recovery: whatever fails ends the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rollyard_crds.lease import LeaseRef
from rollyard_engine.generation.model import load_model
from rollyard_engine.generation.sampling import SamplingParams
from rollyard_engine.generation.scheduler import Scheduler, SchedulerLimits
from rollyard_engine.generation.sequence import Sequence as EngineSequence
from rollyard_engine.generation.thread import EngineThread
from rollyard_pipeline.handlers.base import run_test
from rollyard_pipeline.sandboxes.interface import SandboxProvider, SandboxRequest
from rollyard_pipeline.tools.base import Tool, ToolContext, check_arguments, refusal
from rollyard_pipeline.tools.shipped import BashTool, EditTool
from tokenizers import Tokenizer

CONCURRENCY: Final = 32
MAX_TURNS, TURN_TOKENS, CONTEXT_TOKENS = 8, 64, 1024
TOOL_SECONDS, TEST_SECONDS, OUTPUT_BYTES = 60.0, 60.0, 16_384
STOP_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Episode:
    """One rollout."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    """1 on the tokens of `response` that the policy sampled."""
    logprobs: list[float]
    reward: float
    turns: int


class LocalEngine:
    """The embedded engine's scheduler on a thread of this process, with the settings of `rollyard up`.

    Args:
        folder: The first weights.
        stop: The token that ends a turn.
    """

    def __init__(self, folder: Path, stop: int) -> None:
        model = load_model(folder, 0)
        limits = SchedulerLimits(CONTEXT_TOKENS * 2, 64, 256, 1024 << 20)
        scheduler = Scheduler(model, "0", {*model.folder.eos_token_ids, stop}, limits)
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(scheduler, max_waiting=2048, notify=self._notify)
        self._thread.start()

    def _notify(self, sequences: list[EngineSequence]) -> None:
        callbacks = [sequence.on_progress for sequence in sequences if sequence.finished]
        with contextlib.suppress(RuntimeError):  # The loop has closed, so nobody waits any more.
            self._loop.call_soon_threadsafe(_call_all, callbacks)

    async def sample(self, prompt: Sequence[int], max_tokens: int, seed: int) -> EngineSequence:
        """Return a finished sequence, sampled at temperature 1 from the whole distribution."""
        ended = asyncio.Event()
        sequence = EngineSequence(
            "",
            np.asarray(prompt, dtype=np.int32),
            SamplingParams(max_tokens, seed=seed),
            max_model_len=CONTEXT_TOKENS * 2,
            stream=False,
            on_progress=ended.set,
        )
        self._thread.submit(sequence)
        await ended.wait()
        if sequence.error is not None:
            raise sequence.error
        return sequence

    async def load(self, folder: Path, version: str) -> None:
        """Swap the weights for those of another folder, and forget what the old ones have computed."""
        model = await asyncio.to_thread(load_model, folder, 0)

        def swap(scheduler: Scheduler) -> None:
            scheduler.swap_model(model)
            scheduler.reset_prefix_cache(running_too=True)
            scheduler.version = version

        await asyncio.wrap_future(self._thread.call(swap))

    def close(self) -> None:
        """End the thread."""
        self._thread.stop(STOP_SECONDS)


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()


class InProcessRollouts:
    """It plays groups of rollouts, up to CONCURRENCY at once.

    Args:
        engine: The model.
        provider: The sandboxes.
        tokenizer: The policy's tokenizer.
        first: Returns the text of a first prompt.
        parse: Returns the name and the arguments of the tool call in a turn, or None.
        stop: The token that ends a turn.
    """

    def __init__(
        self,
        engine: LocalEngine,
        provider: SandboxProvider,
        tokenizer: Tokenizer,
        first: Callable[[str], str],
        parse: Callable[[str], tuple[str, Mapping[str, str]] | None],
        stop: int,
    ) -> None:
        self._engine = engine
        self._provider = provider
        self._tokenizer = tokenizer
        self._first = first
        self._parse = parse
        self._stop = stop
        self._places = asyncio.Semaphore(CONCURRENCY)

    async def groups(
        self, tasks: Sequence[Mapping[str, Any]], samples: int, seed: int
    ) -> list[list[Episode]]:
        """Return `samples` rollouts of each task."""
        async with asyncio.TaskGroup() as started:
            playing = [
                [
                    started.create_task(self._episode(task, seed * 10_000 + at * samples + n))
                    for n in range(samples)
                ]
                for at, task in enumerate(tasks)
            ]
        return [[one.result() for one in group] for group in playing]

    async def _episode(self, task: Mapping[str, Any], seed: int) -> Episode:
        request = SandboxRequest(
            files=task.get("sandbox", {}).get("files", {}),
            memory_bytes=256 << 20,
            disk_bytes=64 << 20,
            processes=64,
        )
        async with self._places:
            sandbox = await self._provider.acquire(request, LeaseRef(rollout=f"r{seed}", token=1))
            try:
                async with sandbox:
                    return await self._play(task, sandbox.client, seed)
            finally:
                await self._provider.release(sandbox.handle)

    async def _play(self, task: Mapping[str, Any], client: Any, seed: int) -> Episode:
        tools: dict[str, Tool] = {tool.name: tool for tool in (BashTool(), EditTool())}
        context = ToolContext(client, TOOL_SECONDS, OUTPUT_BYTES)
        prompt = self._tokenizer.encode(self._first(task["prompt"])).ids
        response: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        answer, turns = "", 0
        while turns < MAX_TURNS and (room := CONTEXT_TOKENS - len(prompt) - len(response)) > 0:
            sequence = await self._engine.sample(prompt + response, min(TURN_TOKENS, room), seed * 16 + turns)
            turns += 1
            ids = [token.token_id for token in sequence.output]
            response += ids
            mask += [1] * len(ids)
            logprobs += [min(0.0, token.logprob) for token in sequence.output]
            call = self._parse(self._tokenizer.decode(ids)) if ids[-1] == self._stop else None
            if call is None:
                break
            name, arguments = call
            if name == "submit":
                answer = arguments.get("answer", "")
                break
            tool = tools.get(name)
            wrong = f"no tool {name}" if tool is None else check_arguments(tool.parameters, arguments)
            result = (
                refusal(wrong or name) if tool is None or wrong else await tool.call(dict(arguments), context)
            )
            # The chat template renders this between two turns of the assistant.
            seen = self._tokenizer.encode(
                f"\n<|im_start|>user\n<tool_response>\n{result.text}\n</tool_response><|im_end|>\n"
                "<|im_start|>assistant\n"
            ).ids
            response += seen
            mask += [0] * len(seen)
            logprobs += [0.0] * len(seen)
        place = await client.begin_eval()
        tested = await run_test(
            client,
            task["test_script"],
            env={"ROLLYARD_REWARD_FILE": place.reward_file, "PATH": "/usr/local/bin:/usr/bin:/bin"},
            answer=answer,
            timeout=TEST_SECONDS,
            max_output=OUTPUT_BYTES,
        )
        return Episode(prompt, response, mask, logprobs, float(tested.exit_code == 0), turns)
