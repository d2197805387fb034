"""A trainer for `step_overhead`: one step for each line of its input, with rollouts from one of two sides.

`python -m rollyard_bench.step_trainer rollyard|in-process FOLDER`. ROLLYARD_BENCH_TORCH names the folder of
packages with torch (`scripts/train-env`). Each line of the input is the number of a step, and each line of
the output says what the step took, as JSON. Both sides play the same tasks, as often and as many at once,
with the same first weights, and do the same with the rollouts: examples/grpo's update, and the checkpoint for
the engine. They differ in these points:

- `rollyard` pushes the tasks to a stream, takes a batch, and pushes the weights with the check of
  examples/grpo, which compares log-probabilities after the update.
- `in-process` plays the tasks itself (`inprocess_rollouts`), and loads the weights without a check.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "grpo"), str(ROOT / "examples" / "tiny-policy")]
if packages := os.environ.get("ROLLYARD_BENCH_TORCH"):
    # This folder comes last, so that all packages but torch and its like are those of this environment.
    sys.path.append(packages)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import uvloop  # noqa: E402
from rollyard_engine.server import SWITCH_INTERVAL_SECONDS  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from tinygrpo.batch import Row, advantages, rows_of  # noqa: E402
from tinygrpo.onnx_folder import OnnxTemplate  # noqa: E402
from tinygrpo.policy import load_policy  # noqa: E402
from tinygrpo.rollouts import StreamSettings, episode, sampling  # noqa: E402
from tinygrpo.tasks import training_tasks  # noqa: E402
from tinygrpo.update import UpdateSettings, make_optimizer, update_policy  # noqa: E402
from tinygrpo.versions import PolicyVersions  # noqa: E402
from tinygrpo.weights import WeightPusher  # noqa: E402

BASE: Final = ROOT / "examples" / "tiny-policy" / "hf"
ONNX: Final = ROOT / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"
GROUPS, SAMPLES, CONCURRENCY, SEED = 16, 8, 32, 11
POOL: Final = "default"
LEARNING_RATE: Final = 1e-5
"""It is low, so that both sides sample from nearly the same policy in every step."""
BATCH_SECONDS: Final = 600.0


class Side(Protocol):
    """Where the rollouts of a step come from, and where its weights go."""

    async def rows(self, step: int) -> list[list[Row]]:
        """Return the rows of each group of a step."""

    async def push(self, step: int, folder: Path) -> None:
        """Bring the weights of a step, which are in `folder`, to the model that samples."""


def tasks_of(step: int) -> list[dict[str, Any]]:
    """Return the tasks of a step, which are the same on both sides."""
    return list(islice(training_tasks(SEED, step * GROUPS), GROUPS))


class RollyardSide:
    """Rollouts from a running Rollyard, which the environment names as usual.

    Args:
        model: The policy, from which the references of weight updates are computed.
    """

    def __init__(self, client: Any, model: Any) -> None:
        self._client = client
        self._model = model
        self._versions = PolicyVersions("bench")
        self._weights = WeightPusher(client, POOL, BASE / "tokenizer.json")
        self._cursor: str | None = None

    def begin(self, folder: Path) -> None:
        """Submit the stream, and give the pool the first weights under the label of this run."""
        job = {
            "apiVersion": "rollyard.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "bench"},
            "spec": {
                **episode(StreamSettings(concurrency=CONCURRENCY)),
                "tasks": {"stream": True},
                "samplesPerTask": SAMPLES,
                "sampling": sampling(SEED),
                "backendRef": {"name": POOL},
            },
        }
        self._client.submit(job)
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


class InProcessSide:
    """Rollouts in this process."""

    def __init__(self, engine: Any, rollouts: Any) -> None:
        self._engine = engine
        self._rollouts = rollouts

    async def rows(self, step: int) -> list[list[Row]]:
        """Play the tasks."""
        groups = await self._rollouts.groups(tasks_of(step), SAMPLES, step)
        found = []
        for group in groups:
            worth = advantages([one.reward for one in group])
            found.append([_row(one, float(value), step - 1) for one, value in zip(group, worth, strict=True)])
        return found

    async def push(self, step: int, folder: Path) -> None:
        """Load the weights."""
        await self._engine.load(folder, str(step))


def _row(one: Any, advantage: float, newest: int) -> Row:
    before = len(one.prompt)
    mask = np.array([0] * before + one.mask, bool)
    return Row(
        ids=np.array(one.prompt + one.response, np.int64),
        mask=mask,
        behaviour=np.array([0.0] * before + one.logprobs, np.float32),
        updates=np.where(mask, newest, -1),
        advantage=advantage,
    )


@asynccontextmanager
async def in_process(folder: Path) -> AsyncIterator[InProcessSide]:
    """Yield the side that plays in this process; its sandboxes lie in `folder`."""
    from rollyard_bench.inprocess_rollouts import InProcessRollouts, LocalEngine
    from rollyard_bench.sandboxes import started
    from tinypolicy.chat import IM_END, chat_template, parse_call, token_id, user

    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    template = chat_template()
    stop = token_id(tokenizer, IM_END)

    def first(prompt: str) -> str:
        return str(template.render(messages=[user(prompt)], add_generation_prompt=True))

    def parse(text: str) -> tuple[str, Mapping[str, str]] | None:
        call = parse_call(text)
        return None if call is None else (call.name, call.arguments)

    async with started("bubblewrap", folder) as provider:
        engine = LocalEngine(ONNX, stop)
        try:
            yield InProcessSide(engine, InProcessRollouts(engine, provider, tokenizer, first, parse, stop))
        finally:
            engine.close()


async def _steps(side: Side, model: Any, folder: Path) -> None:
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
        said = {
            "seconds": end - begin,
            "rollouts": played - begin,
            "update": trained - played,
            "push": end - trained,
            "count": len(rows),
            "sampled": sum(int(row.mask.sum()) for row in rows),
            "tokens": sum(len(row.ids) for row in rows),
        }
        print(json.dumps(said), flush=True)


async def _run(side: str, folder: Path) -> None:
    torch.set_num_threads(1)
    model = load_policy(BASE)
    async with AsyncExitStack() as stack:
        if side == "rollyard":
            from rollyard_client import Client

            client = stack.enter_context(Client())
            ours = RollyardSide(client, model)
            await asyncio.to_thread(ours.begin, ONNX)
            await _steps(ours, model, folder)
        else:
            await _steps(await stack.enter_async_context(in_process(folder / "s")), model, folder)


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
