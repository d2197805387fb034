"""What the lab is: nodes, an ordinary user without root's home, limits, Apptainer; and what Slurm does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rollyard_testing.pace import patience

if TYPE_CHECKING:
    from rollyard_testing.slurm.slurmlab import Slurm

pytestmark = pytest.mark.slurm

SLEEPER = "#!/bin/bash\nexec sleep 600\n"


def wait(met: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Return whether the condition was met in time."""
    deadline = time.monotonic() + patience(seconds)
    while not met():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def files_on_nodes(slurm: Slurm) -> set[Path]:
    """Return what lies in the nodes' own folders."""
    return {path for tmp in slurm.node_tmp.values() for path in tmp.iterdir()}


def test_four_nodes_run_an_ordinary_user_s_commands(slurm: Slurm) -> None:
    script = 'echo "$(id -un) $SLURMD_NODENAME $(id -u)"'
    lines = slurm.run_as_user(["srun", "-N4", "sh", "-c", script]).stdout.splitlines()
    assert sorted(lines) == [f"{slurm.user} {node} {slurm.uid}" for node in slurm.nodes]


def test_each_node_has_a_tmp_of_its_own_and_all_share_the_home(slurm: Slurm, shared: Path) -> None:
    script = f"echo $SLURMD_NODENAME > /tmp/who; echo x > {shared}/$SLURMD_NODENAME"
    slurm.run_as_user(["srun", "-N4", "sh", "-c", script])
    try:
        for node in slurm.nodes:
            assert (slurm.node_tmp[node] / "who").read_text() == f"{node}\n"
    finally:
        for node in slurm.nodes:
            (slurm.node_tmp[node] / "who").unlink(missing_ok=True)
    assert {path.name for path in shared.iterdir()} == set(slurm.nodes)


def test_the_user_runs_this_python_and_sees_nothing_else_of_root_s(slurm: Slurm) -> None:
    script = "import os, rollyard_pipeline; print(os.getuid(), os.access('/dev/fuse', os.R_OK | os.W_OK))"
    told = slurm.run_as_user(["srun", sys.executable, "-c", script]).stdout
    assert told.split() == [str(slurm.uid), "True"]
    seen = slurm.run_as_user(["find", "/root", "-maxdepth", "1"], check=False)
    secrets = [name for name in os.listdir("/root") if os.stat(f"/root/{name}").st_mode & 0o044 == 0]
    assert secrets, "nothing there to hide"
    assert not any(f"/root/{name}" in seen.stdout.split() for name in secrets)
    assert slurm.run_as_user(["touch", "/root/x"], check=False).returncode != 0


@pytest.mark.parametrize("where", [[], ["srun"]], ids=["login", "job"])
def test_user_namespaces_nest(slurm: Slurm, where: list[str]) -> None:
    sandbox = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    assert slurm.run_as_user([*where, *sandbox, "id", "-u"]).stdout == f"{slurm.uid}\n"
    mapped = ["unshare", "--map-root-user", "--user", "--mount", "id", "-u"]
    assert slurm.run_as_user([*where, *mapped]).stdout == "0\n"


def test_a_job_s_memory_limit_kills(slurm: Slurm) -> None:
    script = "#!/bin/bash\nexec python3 -c 'x = b\"x\" * (400 << 20)'\n"
    job = slurm.sbatch(script, "--mem=100", "-o", "/dev/null")
    assert slurm.wait_state(job, "OUT_OF_MEMORY", "COMPLETED", "FAILED") == "OUT_OF_MEMORY"


@pytest.fixture
def image(slurm: Slurm, shared: Path) -> Path:
    """Return a folder image of a static shell, made by the user."""
    busybox = "/bin/busybox"
    if not Path(busybox).exists():
        pytest.skip("no /bin/busybox (Debian: busybox-static)")
    script = f"""cd {shared} && mkdir -p image/bin image/etc image/proc image/sys image/dev image/tmp &&
    cp {busybox} image/bin/ && for name in sh sleep id; do ln -s busybox image/bin/$name; done"""
    slurm.run_as_user(["sh", "-c", script])
    return shared / "image"


@pytest.mark.parametrize("kind", ["folder", "sif"])
def test_scancel_leaves_nothing_of_an_apptainer_instance(
    slurm: Slurm, shared: Path, image: Path, kind: str
) -> None:
    built = shared / "built"
    options = ["--sandbox"] if kind == "folder" else []
    slurm.run_as_user(["apptainer", "-s", "build", *options, str(built), str(image)])
    script = f"""#!/bin/bash
export APPTAINER_CONFIGDIR=/tmp/apptainer-$SLURM_JOB_ID
trap 'apptainer instance stop -t 1 box; rm -rf $APPTAINER_CONFIGDIR; exit 0' TERM
apptainer -s instance start --containall --writable-tmpfs --net --network none {built} box
apptainer -s exec --pwd / instance://box id -u && echo ready
sleep 600 & wait
"""
    before = files_on_nodes(slurm)
    job = slurm.sbatch(script, "-o", f"{shared}/out")
    assert wait(lambda: "ready" in (shared / "out").read_text() if (shared / "out").exists() else False)
    assert (shared / "out").read_text().split() == [str(slurm.uid), "ready"]
    there = " ".join(slurm.job_processes().values())
    assert "Apptainer instance" in there
    assert ("squashfuse" in there) == (kind == "sif")
    assert files_on_nodes(slurm) - before != set()
    slurm.run_as_user(["scancel", "--signal=TERM", "--batch", str(job)])
    slurm.wait_state(job, "COMPLETED")
    assert wait(lambda: slurm.job_processes() == {})
    assert files_on_nodes(slurm) <= before


@pytest.mark.nightly
def test_a_killed_slurmd_leaves_its_job_s_processes_running(slurm: Slurm) -> None:
    job = slurm.sbatch(SLEEPER, "-w", "cn2", "--no-requeue", "-o", "/dev/null")
    slurm.wait_state(job, "RUNNING")
    assert wait(lambda: any("sleep 600" in line for line in slurm.job_processes().values()))
    slurm.kill_slurmd("cn2")
    assert slurm.wait_state(job, "NODE_FAIL", seconds=240) == "NODE_FAIL"
    assert any("sleep 600" in line for line in slurm.job_processes().values()), "a double execution"
    slurm.start_slurmd("cn2")
    # A slurmd that comes back learns what should not run any more.
    assert wait(lambda: slurm.job_processes() == {}, 240)


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
