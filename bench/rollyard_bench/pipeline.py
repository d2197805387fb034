"""The real pipeline against a fixed-latency model, beside its capacity bound."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rollyard_bench.harness import deliver, external_pool, stage_worker
from rollyard_bench.latency_model import MODEL
from rollyard_bench.memory import counts, manifest, posted
from rollyard_bench.processes import ProgramFailed, answers, control_plane, port_of, program
from rollyard_bench.results import Baseline, Measurement, Settings

HERE = Path(__file__).resolve().parents[1]
NAME = "latency"
POOL = "latency"
SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Slots:
    """The number of rollouts that each stage holds at once."""

    init: int
    run: int
    eval: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A number of rollouts with fixed latencies; every `slow_every`th evaluates for `eval_slow` seconds."""

    rollouts: int
    init: float
    model_call: float
    turns: int
    """The number of model calls in one rollout's Run."""
    eval: float
    eval_slow: float
    slow_every: int

    @property
    def run(self) -> float:
        """Return the seconds of model time in one Run."""
        return self.model_call * self.turns

    @property
    def slow(self) -> int:
        """Return the number of rollouts that evaluate slowly: numbers 0, `slow_every`, 2 `slow_every`, …"""
        return -(-self.rollouts // self.slow_every)

    @property
    def eval_total(self) -> float:
        """Return the seconds of evaluation of all rollouts together."""
        return self.slow * self.eval_slow + (self.rollouts - self.slow) * self.eval

    def eval_of(self, number: int) -> float:
        """Return the seconds that the evaluation of this sample of its group takes."""
        return self.eval_slow if number % self.slow_every == 0 else self.eval


def stage_bounds(work: Workload, slots: Slots) -> dict[str, float]:
    """Return the bound of each stage: fill + total work / slots + drain.

    Fill is the least time that any rollout needs before the stage, and drain the least time after it: no slot
    of the stage can begin earlier, and the rollout that leaves it last still has to pass the rest.
    """
    shortest_eval = min(work.eval, work.eval_slow) if work.slow < work.rollouts else work.eval_slow
    return {
        "init": work.rollouts * work.init / slots.init + work.run + shortest_eval,
        "run": work.init + work.rollouts * work.run / slots.run + shortest_eval,
        "eval": work.init + work.run + work.eval_total / slots.eval,
    }


def pipeline_bound(work: Workload, slots: Slots) -> float:
    """Return the largest of the stages' bounds: no pipeline of these slots ends sooner."""
    return max(stage_bounds(work, slots).values())


SLOTS = Slots(init=8, run=8, eval=8)


def workload(settings: Settings) -> Workload:
    """Return the workload. Run is its narrowest stage; one rollout in eight evaluates five times as long."""
    return Workload(
        rollouts=48 if settings.quick else 80,
        init=2.0,
        model_call=1.0,
        turns=4,
        eval=0.2,
        eval_slow=1.0,
        slow_every=8,
    )


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """One run, from the submission until the last trajectory was delivered."""

    seconds: float
    run_active: float
    """The seconds of Run, over all rollouts."""
    trajectories: list[dict[str, Any]]


@asynccontextmanager
async def model_server(folder: Path, latency: float, turns: int) -> AsyncIterator[str]:
    """Start the fixed-latency model and yield its URL. Its tokenizer lies in `folder/model`."""
    port_file = folder / "model.port"
    words = [sys.executable, "-m", "rollyard_bench.latency_model", "--latency", str(latency)]
    words += ["--turns", str(turns), "--folder", str(folder / "model"), "--port-file", str(port_file)]
    async with program(words, folder / "model.log", {"PYTHONPATH": str(HERE)}) as running:
        url = f"http://127.0.0.1:{await port_of(running, 'the latency model', port_file)}"
        await answers(running, "the latency model", f"{url}/health")
        yield url


def _job(work: Workload) -> dict[str, Any]:
    metadata = {
        "init": work.init,
        "eval": work.eval,
        "eval_slow": work.eval_slow,
        "slow_every": work.slow_every,
    }
    tasks = [
        {"id": f"task-{number:03d}", "prompt": "Take four steps.", "metadata": metadata}
        for number in range(work.rollouts // SAMPLES)
    ]
    return manifest(
        NAME,
        tasks={"inline": tasks},
        handler="bench_latency",
        samplesPerTask=SAMPLES,
        agent={"type": "tools", "tools": ["bash", "submit"], "maxTurns": work.turns + 2},
        sampling={"maxTokens": 256},
        backendRef={"name": POOL},
        sandbox={"resources": {"memory": "256Mi", "disk": "32Mi"}},
        stages={
            "init": {"concurrency": SLOTS.init},
            "run": {"concurrency": SLOTS.run},
            "eval": {"concurrency": SLOTS.eval},
        },
    )


def _check(found: list[dict[str, Any]], work: Workload) -> None:
    """Check that every rollout was really played, each with a reward of 1; otherwise a makespan does not
    count.
    """
    bad = [item for item in found if item["status"] != "succeeded" or item["reward"] != 1.0]
    if bad:
        first = bad[0]
        raise ProgramFailed(
            f"{len(bad)} of {len(found)} rollouts did not succeed; {first['id']}: {first['status']} "
            f"{first['reason']} {first['message'][:300]} reward {first['reward']}"
        )
    if len(found) != work.rollouts or any(len(item["turns"]) != work.turns for item in found):
        raise ProgramFailed(
            f"{len(found)} trajectories, {work.rollouts} expected, each of {work.turns} turns"
        )


async def _pipeline(folder: Path, url: str, work: Workload) -> PipelineRun:
    environment = {"PYTHONPATH": str(HERE / "latency_handler")}
    async with (
        control_plane(folder, environment) as plane,
        plane.client() as client,
        stage_worker(plane, folder, dataclasses.asdict(SLOTS), environment) as worker,
    ):
        await external_pool(client, POOL, MODEL, folder / "model", [url])
        # The worker waits for its first lease, as it does between two steps of a training run.
        await asyncio.sleep(2.0)
        begin = time.perf_counter()
        await posted(client, "/v1/rolloutjobs", json=_job(work))
        try:
            async with asyncio.timeout(4 * pipeline_bound(work, SLOTS)):
                found = await deliver(client, worker, NAME, work.rollouts)
        except TimeoutError as error:
            raise ProgramFailed(
                f"not finished in four times the bound; the job: {await counts(client, NAME)}; "
                f"the worker said: {worker.tail()}"
            ) from error
        seconds = time.perf_counter() - begin
    _check(found, work)
    active = sum(item["timings"]["run"]["active_seconds"] for item in found)
    return PipelineRun(seconds, active, found)


def _overhead(run: PipelineRun, work: Workload) -> str:
    """Return where the seconds beyond the latencies lie, per rollout."""
    timings = [item["timings"] for item in run.trajectories]

    def beyond(seconds: Callable[[dict[str, Any]], float]) -> str:
        return f"{median(map(seconds, timings)) * 1e3:.0f} ms"

    # A slot is idle between two rollouts (complete, lease), and while the pipeline fills and drains.
    idle = (SLOTS.run * run.seconds - run.run_active) / len(timings)
    run_own = beyond(
        lambda item: item["run"]["active_seconds"] - item["model_seconds"] - item["tool_seconds"]
    )
    return (
        f"beyond the latencies, medians: "
        f"model calls {beyond(lambda item: item['model_seconds'] - work.run)}, "
        f"tools {beyond(lambda item: item['tool_seconds'])}, the rest of Run {run_own}, "
        f"Init {beyond(lambda item: item['init']['active_seconds'] - work.init)}; a Run slot is empty for "
        f"{idle * 1e3:.0f} ms a rollout, fill and drain included"
    )


async def measure(settings: Settings) -> list[Measurement]:
    """Measure the makespan of one job, after its bound was computed."""
    work = workload(settings)
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        folder = Path(name)
        os.chmod(folder, 0o700)
        async with model_server(folder, work.model_call, work.turns) as url:
            run = await _pipeline(folder, url, work)
    bound = pipeline_bound(work, SLOTS)
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stage_bounds(work, SLOTS).items())
    shape = (
        f"{work.rollouts} rollouts of {work.turns} model calls of {work.model_call} s, Init {work.init} s, "
        f"Eval {work.eval} s and {work.eval_slow} s for one in {work.slow_every}; slots of Init, Run, Eval: "
        f"{SLOTS.init}, {SLOTS.run}, {SLOTS.eval}"
    )
    how = f"{shape}; bounds: {stages}; {_overhead(run, work)}"
    return [
        Measurement("pipeline_makespan", run.seconds, Baseline("stage-capacity bound", bound), how),
    ]
