"""A trainer for `step_overhead`: one step for each line of its input, with rollouts from one of two sides.

`python -m rollyard_bench.step_trainer rollyard|in-process FOLDER`. ROLLYARD_BENCH_TORCH names the folder of
packages with torch (`scripts/train-env`). Each line of the input is the number of a step, and each line of
the output says what the step took, as JSON. Both sides play the same tasks, as often and as many at once,
with the same first weights, and do the same with the rollouts: examples/grpo's update, and the checkpoint for
the engine. They differ in these points:

- `rollyard` pushes the tasks to a stream, takes a batch, and pushes the weights with the check of
  examples/grpo, which compares log-probabilities after the update.
- `in-process` plays the tasks itself, as a trainer without a service does, and loads the weights without a
  check. The model is the embedded engine's, on a thread of this process; sandboxes come from the stage
  workers' own provider; the tools are the stage workers' own. There is no HTTP, no queue, no record and no
  recovery: whatever fails ends the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "grpo"), str(ROOT / "examples" / "tiny-policy")]
if packages := os.environ.get("ROLLYARD_BENCH_TORCH"):
    # This folder comes last, so that all packages but torch and its like are those of this environment.
    sys.path.append(packages)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import uvloop  # noqa: E402
from rollyard import Client  # noqa: E402
from rollyard_engine.generation.model import load_model  # noqa: E402
from rollyard_engine.generation.sampling import SamplingParams  # noqa: E402
from rollyard_engine.generation.scheduler import Scheduler, SchedulerLimits  # noqa: E402
from rollyard_engine.generation.sequence import Sequence as EngineSequence  # noqa: E402
from rollyard_engine.generation.thread import EngineThread  # noqa: E402
from rollyard_engine.server import SWITCH_INTERVAL_SECONDS  # noqa: E402
from rollyard_pipeline.handlers.base import run_test  # noqa: E402
from rollyard_pipeline.sandboxes.interface import SandboxProvider, SandboxRequest  # noqa: E402
from rollyard_pipeline.tools.base import Tool, ToolContext, check_arguments, refusal  # noqa: E402
from rollyard_pipeline.tools.shipped import BashTool, EditTool  # noqa: E402
from rollyard_testing.manifests import job_manifest  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from rollyard_bench.sandboxes import claimed, started  # noqa: E402
from tinygrpo.batch import Row, advantages, rows_of  # noqa: E402
from tinygrpo.onnx_folder import OnnxTemplate  # noqa: E402
from tinygrpo.policy import load_policy  # noqa: E402
from tinygrpo.rollouts import StreamSettings, episode, sampling  # noqa: E402
from tinygrpo.tasks import training_tasks  # noqa: E402
from tinygrpo.update import UpdateSettings, make_optimizer, update_policy  # noqa: E402
from tinygrpo.versions import PolicyVersions  # noqa: E402
from tinygrpo.weights import WeightPusher  # noqa: E402
from tinypolicy.chat import IM_END, chat_template, parse_call, token_id, user  # noqa: E402

BASE: Final = ROOT / "examples" / "tiny-policy" / "hf"
ONNX: Final = ROOT / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"
GROUPS, SAMPLES, CONCURRENCY, SEED = 16, 8, 32, 11
POOL: Final = "default"
LEARNING_RATE: Final = 1e-5
"""It is low, so that both sides sample from nearly the same policy in every step."""
BATCH_SECONDS: Final = 600.0
MAX_TURNS, TURN_TOKENS, CONTEXT_TOKENS = 8, 64, 1024
TOOL_SECONDS, TEST_SECONDS, OUTPUT_BYTES = 60.0, 60.0, 16_384
STOP_SECONDS: Final = 5.0


def tasks_of(step: int) -> list[dict[str, Any]]:
    """Return the tasks of a step, which are the same on both sides."""
    return list(islice(training_tasks(SEED, step * GROUPS), GROUPS))


class RollyardSide:
    """Rollouts from a running Rollyard, which the environment names as usual.

    Args:
        model: The policy, from which the references of weight updates are computed.
    """

    def __init__(self, client: Client, model: Any) -> None:
        self._client = client
        self._model = model
        self._versions = PolicyVersions("bench")
        self._weights = WeightPusher(client, POOL, BASE / "tokenizer.json")
        self._cursor: str | None = None

    def begin(self, folder: Path) -> None:
        """Submit the stream, and give the pool the first weights under the label of this run."""
        spec = {
            **episode(StreamSettings(concurrency=CONCURRENCY)),
            "tasks": {"stream": True},
            "samplesPerTask": SAMPLES,
            "sampling": sampling(SEED),
            "backendRef": {"name": POOL},
        }
        self._client.submit(job_manifest("bench", spec))
        self._weights.push(self._versions.label(0), folder, self._model)

    async def rows(self, step: int) -> list[list[Row]]:
        """Push the tasks, and take the batch."""
        return await asyncio.to_thread(self._rows, step)

    def _rows(self, step: int) -> list[list[Row]]:
        self._client.push_tasks("bench", tasks_of(step))
        batch = self._client.batch(
            "bench", groups=GROUPS, max_lag=0, cursor=self._cursor, timeout=BATCH_SECONDS
        )
        self._cursor = batch.cursor
        return [rows_of(group, self._versions) for group in batch.groups]

    async def push(self, step: int, folder: Path) -> None:
        """Update the pool, and wait until it has the weights, verified."""
        await asyncio.to_thread(self._weights.push, self._versions.label(step), folder, self._model)


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


class InProcessSide:
    """Rollouts in this process, up to CONCURRENCY at once.

    Args:
        engine: The model.
        provider: The sandboxes.
        tokenizer: The policy's tokenizer.
    """

    def __init__(self, engine: LocalEngine, provider: SandboxProvider, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._provider = provider
        self._tokenizer = tokenizer
        self._template = chat_template()
        self._stop = token_id(tokenizer, IM_END)
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def rows(self, step: int) -> list[list[Row]]:
        """Play the tasks."""
        async with asyncio.TaskGroup() as group:
            playing = [
                [
                    group.create_task(
                        self._episode(task, step * 10_000 + number * SAMPLES + sample, step - 1)
                    )
                    for sample in range(SAMPLES)
                ]
                for number, task in enumerate(tasks_of(step))
            ]
        groups = []
        for episodes in playing:
            rows, rewards = zip(*(task.result() for task in episodes), strict=True)
            worth = advantages(rewards)
            groups.append([replace(row, advantage=float(v)) for row, v in zip(rows, worth, strict=True)])
        return groups

    async def push(self, step: int, folder: Path) -> None:
        """Load the weights."""
        await self._engine.load(folder, str(step))

    async def _episode(self, task: Mapping[str, Any], seed: int, newest: int) -> tuple[Row, float]:
        """Return the row of a rollout, still without its advantage, and its reward."""
        request = SandboxRequest(
            files=task.get("sandbox", {}).get("files", {}),
            memory_bytes=256 << 20,
            disk_bytes=64 << 20,
            processes=64,
        )
        async with self._slots, claimed(self._provider, request) as sandbox:
            return await self._play(task, sandbox.client, seed, newest)

    async def _play(self, task: Mapping[str, Any], client: Any, seed: int, newest: int) -> tuple[Row, float]:
        tools: dict[str, Tool] = {tool.name: tool for tool in (BashTool(), EditTool())}
        context = ToolContext(client, TOOL_SECONDS, OUTPUT_BYTES)
        text = self._template.render(messages=[user(task["prompt"])], add_generation_prompt=True)
        ids = list(self._tokenizer.encode(text).ids)
        mask = [0] * len(ids)
        logprobs = [0.0] * len(ids)
        answer, turns = "", 0
        while turns < MAX_TURNS and (room := CONTEXT_TOKENS - len(ids)) > 0:
            sequence = await self._engine.sample(ids, min(TURN_TOKENS, room), seed * 16 + turns)
            turns += 1
            sampled = [token.token_id for token in sequence.output]
            ids += sampled
            mask += [1] * len(sampled)
            logprobs += [min(0.0, token.logprob) for token in sequence.output]
            call = parse_call(self._tokenizer.decode(sampled)) if sampled[-1] == self._stop else None
            if call is None:
                break
            name, arguments = call.name, call.arguments
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
            ids += seen
            mask += [0] * len(seen)
            logprobs += [0.0] * len(seen)
        evaluation = await client.begin_eval()
        tested = await run_test(
            client,
            task["test_script"],
            env={"ROLLYARD_REWARD_FILE": evaluation.reward_file, "PATH": "/usr/local/bin:/usr/bin:/bin"},
            answer=answer,
            timeout=TEST_SECONDS,
            max_output=OUTPUT_BYTES,
        )
        sampled_here = np.array(mask, bool)
        row = Row(
            ids=np.array(ids, np.int64),
            mask=sampled_here,
            behaviour=np.array(logprobs, np.float32),
            updates=np.where(sampled_here, newest, -1),
            advantage=0.0,
        )
        return row, float(tested.exit_code == 0)


@asynccontextmanager
async def in_process(folder: Path) -> AsyncIterator[InProcessSide]:
    """Yield the side that plays in this process; its sandboxes lie in `folder`."""
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    async with started("bubblewrap", folder) as provider:
        engine = LocalEngine(ONNX, token_id(tokenizer, IM_END))
        try:
            yield InProcessSide(engine, provider, tokenizer)
        finally:
            engine.close()


async def _steps(side: RollyardSide | InProcessSide, model: Any, folder: Path) -> None:
    optimizer = make_optimizer(model, LEARNING_RATE)
    template = OnnxTemplate(ONNX)
    settings = UpdateSettings(learning_rate=LEARNING_RATE)
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        step = int(line)
        begin = time.perf_counter()
        groups = await side.rows(step)
        played = time.perf_counter()
        update_policy(model, optimizer, groups, step - 1, random.Random(step), settings)
        target = folder / f"step-{step}"
        target.mkdir()
        template.write({name: value.detach().numpy() for name, value in model.state_dict().items()}, target)
        trained = time.perf_counter()
        await side.push(step, target)
        end = time.perf_counter()
        rows = [row for group in groups for row in group]
        taken = {
            "seconds": end - begin,
            "rollouts": played - begin,
            "update": trained - played,
            "push": end - trained,
            "count": len(rows),
            "sampled": sum(int(row.mask.sum()) for row in rows),
            "tokens": sum(len(row.ids) for row in rows),
        }
        print(json.dumps(taken), flush=True)


async def _run(side: str, folder: Path) -> None:
    torch.set_num_threads(1)
    model = load_policy(BASE)
    if side == "in-process":
        async with in_process(folder / "s") as theirs:
            await _steps(theirs, model, folder)
        return
    with Client() as client:
        ours = RollyardSide(client, model)
        await asyncio.to_thread(ours.begin, ONNX)
        await _steps(ours, model, folder)


def main() -> None:
    """Take steps until the input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("side", choices=("rollyard", "in-process"))
    parser.add_argument("folder", type=Path, help="an absolute folder for checkpoints and sandboxes")
    options = parser.parse_args()
    # The engine's own server does the same, so that its loop does not wait long for the interpreter's lock.
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(options.side, options.folder))


if __name__ == "__main__":
    main()
