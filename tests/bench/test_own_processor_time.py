"""The processor time of a rollout stands beside the engine's in the same run."""

from __future__ import annotations

import pytest
from rollyard_bench import own_cpu
from rollyard_bench.registry import FIGURES, judge
from rollyard_bench.results import Settings


async def test_the_engine_of_the_median_run_is_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    # The run in the middle by our own time has neither the lowest nor the middle engine.
    runs = [
        {"control plane": 10.0, "worker": 20.0, "exec server": 5.0, "engine": 50.0},
        {"control plane": 10.0, "worker": 10.0, "exec server": 5.0, "engine": 40.0},
        {"control plane": 10.0, "worker": 15.0, "exec server": 5.0, "engine": 60.0, "bwrap": 9.0},
    ]

    async def run(tasks: int, samples: int) -> tuple[float, dict[str, float]]:
        return 30.0, runs.pop()

    monkeypatch.setattr(own_cpu, "_run", run)
    (measured,) = await own_cpu.measure(Settings(quick=False))
    (figure,) = [figure for figure in FIGURES if figure.name == measured.figure]
    entry = judge(figure, measured)
    assert entry.baseline is not None
    assert (entry.value, entry.baseline.value, entry.ratio, entry.met) == (30.0, 60.0, 0.5, True)
