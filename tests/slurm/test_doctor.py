"""`rollyard doctor` on the nodes of a real Slurm, and where its controller does not answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rollyard_testing.pace import patience

if TYPE_CHECKING:
    from rollyard_testing.slurm.slurmlab import Slurm

pytestmark = pytest.mark.slurm

SLEEPER = "#!/bin/bash\nexec sleep 600\n"


@pytest.mark.nightly
def test_doctor_on_login_and_compute_node_and_without_a_controller(slurm: Slurm, shared: Path) -> None:
    doctor = [sys.executable, "-m", "rollyard", "doctor"]
    env = {"ROLLYARD_HOME": str(shared / "yard"), "LANG": "C.UTF-8"}
    login = slurm.run_as_user(doctor, env=env, check=False)
    lines = {line[9:26].strip(): line for line in login.stdout.splitlines() if not line.startswith(" ")}
    for name in (
        "apptainer",
        "user namespaces",
        "fuse",
        "slurm",
        "slurmctld",
        "job cleanup",
        "locks",
        "space",
    ):
        assert lines[name].startswith("ok"), lines.get(name, login.stdout)
    assert "debug*" in lines["slurmctld"]
    node = slurm.run_as_user(["srun", "-w", "cn3", *doctor], env=env, check=False)
    assert "inside job" in node.stdout
    assert "on cn3" in node.stdout
    job = slurm.sbatch(SLEEPER, "-o", "/dev/null")
    slurm.wait_state(job, "RUNNING")
    slurm.stop_controller()
    away = slurm.run_as_user(doctor, env=env, check=False, timeout=patience(120))
    assert away.returncode == 1
    assert "does not answer" in away.stdout
    slurm.start_controller()
    assert slurm.wait_state(job, "RUNNING") == "RUNNING", "it knows its jobs"
