"""A training step with rollouts that overlap with the update of the weights, beside one without overlap."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from rollyard import Client

from rollyard_bench.harness import deployment
from rollyard_bench.model_servers import MODEL, model_server
from rollyard_bench.pipeline import SAMPLES, latency_job
from rollyard_bench.processes import ControlPlane, ProgramFailed
from rollyard_bench.results import Baseline, Measurement, Settings

POOL = "overlap"
GROUPS = 4
PLACES = {"init": 8, "run": 16, "eval": 8}
LATENCY, TURNS = 0.5, 4
ROLLOUT_SECONDS = GROUPS * SAMPLES / PLACES["run"] * LATENCY * TURNS
"""The least time in which the rollouts of a step are sampled."""
TRAIN_SECONDS = ROLLOUT_SECONDS
"""What the trainer's update takes, which is a wait. It is as long as the rollouts."""
STEP_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """The steps of one training run."""

    seconds: list[float]
    """The wall time of each step but the first, from the end of the step before it."""
    lags: list[int]
    """The lags of all groups."""


def _train(plane: ControlPlane, job: str, max_lag: int, steps: int) -> Run:
    """Train with a new stream, as a trainer whose update is a wait, and return what its steps took.

    With `max_lag` 0, the tasks of a step are pushed when the pool has the weights of the step before.
    With 1, they are pushed before the step before begins to train.

    Raises:
        ProgramFailed: A group was too old, a rollout failed, or the weights were refused.
    """
    ends, lags, cursor = [], [], None
    with Client(plane.url, plane.tokens["admin"], timeout=60.0) as client:
        client.submit(latency_job(job, TURNS, PLACES, tasks={"stream": True}, backendRef={"name": POOL}))
        _push(client, job, 0)
        for step in range(steps + 1):
            batch = client.batch(job, GROUPS, max_lag=max_lag, cursor=cursor, timeout=STEP_SECONDS)
            cursor = batch.cursor
            bad = [one for one in batch.trajectories if one.reward != 1.0]
            if bad or len(batch.trajectories) != GROUPS * SAMPLES or batch.stale_groups:
                raise ProgramFailed(
                    f"step {step} of {job}: {len(batch.trajectories)} rollouts, {len(bad)} without their "
                    f"reward, {batch.stale_groups} groups too old"
                )
            lags += batch.lags
            if max_lag and step < steps:
                _push(client, job, step + 1)
            time.sleep(TRAIN_SECONDS)
            update = client.update_weights(POOL, f"{job}-{step}", pushed=True, mode="wait")
            done = client.wait_weights(POOL, update.id, timeout=STEP_SECONDS)
            if done.state != "Succeeded":
                raise ProgramFailed(f"step {step} of {job}: the weights: {done.state}: {done.message}")
            ends.append(time.perf_counter())
            if not max_lag and step < steps:
                _push(client, job, step + 1)
        client.cancel(job)
    return Run([after - before for before, after in pairwise(ends)], lags)


def _push(client: Client, job: str, step: int) -> None:
    metadata = {"init": 0.1, "eval": 0.1, "eval_slow": 0.1, "slow_every": SAMPLES}
    tasks = [
        {"id": f"{step}-{number}", "prompt": "Take four steps.", "metadata": metadata}
        for number in range(GROUPS)
    ]
    client.push_tasks(job, tasks)


async def measure(settings: Settings) -> list[Measurement]:
    """Train with and without overlap in turns, and compare the medians of their steps."""
    steps, rounds = 2, 1 if settings.quick else 2
    runs: dict[int, list[Run]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        folder = Path(name)
        async with (
            model_server("weighted", folder, "model", LATENCY, TURNS) as url,
            deployment(folder, PLACES, handlers=True) as deployed,
        ):
            await deployed.external_pool(POOL, MODEL, folder / "model", [url])
            for number in range(rounds):
                for lag in (0, 1) if number % 2 == 0 else (1, 0):
                    job = f"lag-{lag}-{number}"
                    runs[lag].append(await asyncio.to_thread(_train, deployed.plane, job, lag, steps))
    seconds = {lag: [one for run in some for one in run.seconds] for lag, some in runs.items()}
    lags = {lag: sorted({one for run in some for one in run.lags}) for lag, some in runs.items()}
    if lags[0] != [0] or lags[1] != [0, 1]:
        raise ProgramFailed(f"the lags of groups are {lags}: the rollouts did not overlap as they should")
    without, overlapped = median(seconds[0]), median(seconds[1])
    how = (
        f"median of {len(seconds[1])} steps each, in {rounds} rounds; {GROUPS} groups of {SAMPLES} rollouts "
        f"a step, {TURNS} turns of {LATENCY:g} s with a command in a sandbox each, {PLACES['run']} at once: "
        f"at least {ROLLOUT_SECONDS:g} s; the update is a wait of {TRAIN_SECONDS:g} s, then the weights are "
        f"pushed; real client, control plane, worker and sandboxes; with max_lag 0, a step is "
        f"{without:.2f} s (from {min(seconds[0]):.2f} to {max(seconds[0]):.2f}), with max_lag 1 "
        f"{overlapped:.2f} s (from {min(seconds[1]):.2f} to {max(seconds[1]):.2f}) and every group is "
        "at most one update old; without any overhead both would be "
        f"{ROLLOUT_SECONDS + TRAIN_SECONDS:g} s and {max(ROLLOUT_SECONDS, TRAIN_SECONDS):g} s"
    )
    return [Measurement("step_overlap", overlapped, Baseline("max_lag 0", without), how)]
