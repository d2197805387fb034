"""What the Slurm benchmarks make of their observations, without a cluster."""

from __future__ import annotations

import pytest
from rollyard_bench.processes import ProgramFailed
from rollyard_bench.slurm_start import first_command, job
from rollyard_crds import Trajectory


def test_the_first_command_tells_the_time_or_the_measurement_fails() -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "tool", "content": "12.5\n"}]
    run = {"id": "r", "job": "j", "task_id": "t", "group_id": "g", "sample_index": 0}
    assert first_command(Trajectory.model_validate(run | {"messages": messages})) == 12.5
    with pytest.raises(ProgramFailed, match="NoBash"):
        first_command(Trajectory.model_validate(run | {"reason": "NoBash"}))
    assert job("j", "/i.sif")["spec"]["tasks"]["inline"][0]["solution"][0]["name"] == "bash"
