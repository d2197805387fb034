"""What the Slurm benchmarks make of their observations, without a cluster."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from rollyard_bench.processes import ProgramFailed
from rollyard_bench.slurm_load import Counted, Window
from rollyard_bench.slurm_nodes import Round
from rollyard_bench.slurm_start import first_command, job


def test_efficiency_is_throughput_beside_as_many_times_that_of_one_node() -> None:
    one = Round(1, 4.0, 20, 42.0, 2.0, 0.001, 0.1)
    sixteen = Round(16, 51.2, 20, 52.5, 2.5, 0.002, 0.9, {"workers": 1.25, "bridge": 0.001})
    assert (one.throughput, sixteen.throughput) == (0.2, 2.56)
    assert one.efficiency(one) == 1.0
    assert sixteen.efficiency(one) == pytest.approx(0.8)
    text = sixteen.text(one)
    assert "16 nodes: 51.20 turns/s, efficiency 0.800" in text
    assert "(workers 1.25)" in text
    assert "52.50 s (efficiency 0.800)" in text


def test_the_first_command_tells_the_time_or_the_measurement_fails() -> None:
    told = {"messages": [{"role": "user", "content": "?"}, {"role": "tool", "content": "12.5\n"}]}
    assert first_command(told | {"reason": ""}) == 12.5
    with pytest.raises(ProgramFailed, match="NoBash"):
        first_command({"messages": [], "reason": "NoBash"})
    assert job("j", "/i.sif")["spec"]["tasks"]["inline"][0]["solution"][0]["name"] == "bash"


async def test_runs_of_slurms_programs_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "squeue").write_text('#!/bin/sh\necho "real $1"\n')
    (real / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{real}:{os.environ['PATH']}")
    counted = Counted(tmp_path)
    window = asyncio.create_task(counted.window(0.5))
    await asyncio.sleep(0)
    said = await asyncio.to_thread(subprocess.check_output, [counted.bin / "squeue", "--me"], text=True)
    assert said == "real --me\n"
    assert (await window).runs == Counter(squeue=1)
    assert Window(30.0, Counter(squeue=2, sbatch=1)).per_minute == 6.0
