"""The real pipeline against a fixed-latency model, beside its capacity bound."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rollyard_crds import Trajectory
from rollyard_crds.trajectory import Timings

from rollyard_bench.harness import deployment, manifest
from rollyard_bench.model_servers import MODEL, model_server
from rollyard_bench.processes import ProgramFailed
from rollyard_bench.results import Baseline, Measurement, Settings

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
    rollouts = 48 if settings.quick else 80
    return Workload(rollouts, init=2.0, model_call=1.0, turns=4, eval=0.2, eval_slow=1.0, slow_every=8)


def latency_job(name: str, turns: int, slots: Mapping[str, int], **spec: Any) -> dict[str, Any]:
    """Return a job of the bench's handler with real sandboxes and agents."""
    return manifest(
        name,
        handler="bench_latency",
        samplesPerTask=SAMPLES,
        agent={"type": "tools", "tools": ["bash", "submit"], "maxTurns": turns + 2},
        sampling={"maxTokens": 256},
        sandbox={"resources": {"memory": "256Mi", "disk": "32Mi"}},
        stages={stage: {"concurrency": count} for stage, count in slots.items()},
        **spec,
    )


def _job(work: Workload) -> dict[str, Any]:
    metadata = {name: getattr(work, name) for name in ("init", "eval", "eval_slow", "slow_every")}
    tasks = [
        {"id": f"task-{number:03d}", "prompt": "Take four steps.", "metadata": metadata}
        for number in range(work.rollouts // SAMPLES)
    ]
    slots = dataclasses.asdict(SLOTS)
    return latency_job(NAME, work.turns, slots, tasks={"inline": tasks}, backendRef={"name": POOL})


def _check(delivered: list[Trajectory], work: Workload) -> None:
    """Check that every rollout was really played, each with a reward of 1; otherwise a makespan does not
    count.
    """
    bad = [one for one in delivered if one.status != "succeeded" or one.reward != 1.0]
    if bad:
        first = bad[0]
        raise ProgramFailed(
            f"{len(bad)} of {len(delivered)} rollouts did not succeed; {first.id}: {first.status} "
            f"{first.reason} {first.message[:300]} reward {first.reward}"
        )
    if len(delivered) != work.rollouts or any(len(one.turns) != work.turns for one in delivered):
        raise ProgramFailed(
            f"{len(delivered)} trajectories, {work.rollouts} expected, each of {work.turns} turns"
        )


async def _pipeline(folder: Path, work: Workload) -> tuple[float, list[Timings]]:
    """Return the seconds from the submission until the last trajectory was delivered, and all timings."""
    places = dataclasses.asdict(SLOTS)
    async with (
        model_server("latency", folder, "model", work.model_call, work.turns) as url,
        deployment(folder, places, handlers=True) as deployed,
    ):
        await deployed.external_pool(POOL, MODEL, folder / "model", [url])
        # The worker waits for its first lease, as it does between two steps of a training run.
        await asyncio.sleep(2.0)
        begin = time.perf_counter()
        await deployed.client.submit(_job(work))
        delivered = await deployed.deliver(NAME, work.rollouts, 4 * pipeline_bound(work, SLOTS))
        seconds = time.perf_counter() - begin
    _check(delivered, work)
    return seconds, [one.timings for one in delivered]


def _overhead(seconds: float, timings: list[Timings], work: Workload) -> str:
    """Return where the seconds beyond the latencies lie, per rollout."""

    def beyond(part: Callable[[Timings], float]) -> str:
        return f"{median(map(part, timings)) * 1e3:.0f} ms"

    # A slot is idle between two rollouts (complete, lease), and while the pipeline fills and drains.
    idle = (SLOTS.run * seconds - sum(one.run.active_seconds for one in timings)) / len(timings)
    return (
        f"beyond the latencies, medians: model calls {beyond(lambda one: one.model_seconds - work.run)}, "
        f"tools {beyond(lambda one: one.tool_seconds)}, the rest of Run "
        f"{beyond(lambda one: one.run.active_seconds - one.model_seconds - one.tool_seconds)}, "
        f"Init {beyond(lambda one: one.init.active_seconds - work.init)}; a Run slot is empty for "
        f"{idle * 1e3:.0f} ms a rollout, fill and drain included"
    )


async def measure(settings: Settings) -> list[Measurement]:
    """Measure the makespan of one job, after its bound was computed."""
    work = workload(settings)
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        seconds, timings = await _pipeline(Path(name), work)
    bound = pipeline_bound(work, SLOTS)
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stage_bounds(work, SLOTS).items())
    shape = (
        f"{work.rollouts} rollouts of {work.turns} model calls of {work.model_call} s, Init {work.init} s, "
        f"Eval {work.eval} s and {work.eval_slow} s for one in {work.slow_every}; slots of Init, Run, Eval: "
        f"{SLOTS.init}, {SLOTS.run}, {SLOTS.eval}"
    )
    how = f"{shape}; bounds: {stages}; {_overhead(seconds, timings, work)}"
    return [Measurement("pipeline_makespan", seconds, Baseline("stage-capacity bound", bound), how)]
