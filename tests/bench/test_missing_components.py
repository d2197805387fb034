"""What a figure needs and this machine does not have is not measured; what breaks is missed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from rollyard_bench import echo, lab, results
from rollyard_bench.main import main, run_group
from rollyard_bench.processes import Missing, ProgramFailed, output
from rollyard_bench.results import Settings
from rollyard_bench.stats import Sample

ROOT = Path(__file__).parents[2]
QUICK = Settings(quick=True)

WITHOUT = {
    "kubernetes": ({"ROLLYARD_SHARED": ""}, "set ROLLYARD_SHARED to the folder that holds kit/kube-lab"),
    "kubernetes_fleet": ({"ROLLYARD_SHARED": "/none"}, "/none/kit/kube-lab is not there"),
    "humaneval_evals": ({"ROLLYARD_SHARED": "/none"}, "a folder with data/HumanEval.jsonl.gz"),
    "prefix": ({"VLLM_PYTHON": "/bin/false"}, "VLLM_PYTHON=/bin/false has no vllm"),
    "overhead": ({"VLLM_PYTHON": "/bin/false"}, "scripts/vllm-env makes it"),
    "step_overhead": ({"TRAIN_PYTHON": "/bin/false"}, "TRAIN_PYTHON=/bin/false lacks a package"),
    "page": ({"PATH": "/none"}, "apt install chromium"),
    "swe_action_time": ({"PATH": "/none"}, "apt install tmux"),
    "start": ({"PATH": "/none"}, "apt install bubblewrap"),
    "own_cpu": ({"PATH": "/none"}, "apt install bubblewrap"),
}


def _not_measured(group: str, reason: str) -> None:
    entries = run_group(group, QUICK)
    assert entries
    for entry in entries:
        assert (entry.value, entry.baseline, entry.met) == (None, None, None)
        assert entry.how.startswith("not measured: ")
        assert reason in entry.how


@pytest.mark.parametrize("group", WITHOUT)
def test_a_group_whose_component_is_missing_says_which(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, reason = WITHOUT[group]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    _not_measured(group, reason)


@pytest.mark.parametrize("group", ["slurm_start", "apptainer"])
def test_an_ordinary_user_without_slurm_or_apptainer(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/none")
    _not_measured(group, "apptainer nor singularity" if group == "apptainer" else "sinfo is not installed")


@pytest.mark.parametrize(("listed", "reason"), [("exit 1", "no Slurm answers"), ("exit 0", "no partition")])
def test_slurms_programs_without_a_cluster(
    listed: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\n{listed}\n")
    sinfo.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _not_measured("slurm_start", reason)


def test_a_lab_that_is_not_here_and_one_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "lab"
    script.write_text("#!/bin/sh\necho working >&2\necho no Apptainer >&2\nexit $STATUS\n")
    script.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab, "LAB", script)
    monkeypatch.setenv("STATUS", "69")
    _not_measured("slurm_start", "not measured: no Apptainer")
    monkeypatch.setenv("STATUS", "1")
    out = tmp_path / "results.json"
    monkeypatch.setattr("rollyard_bench.main.signal.signal", lambda *arguments: None)
    assert main(["--quick", "--only", "slurm_start", "apptainer", "--out", str(out)]) == 1
    entries = results.read(out)
    assert {(entry.value, entry.met) for entry in entries} == {(None, False)}
    assert all("failed: ProgramFailed: " in entry.how for entry in entries)
    monkeypatch.setenv("STATUS", "69")
    assert main(["--quick", "--only", "slurm_start", "apptainer", "--out", str(out)]) == 0


async def test_output_tells_what_is_missing_from_what_fails() -> None:
    assert await output("sh", "-c", "echo $X", environment={"X": "1"}) == "1\n"
    with pytest.raises(Missing, match=r"^it is not here$"):
        await output("sh", "-c", "echo looking >&2; echo it is not here >&2; exit 69")
    with pytest.raises(ProgramFailed, match=r"exit 3 ended with code 3: out"):
        await output("sh", "-c", "echo out; exit 3")
    with pytest.raises(ProgramFailed, match="sleep 60 took longer than 0 s"):
        await output("sleep", "60", seconds=0.2)


def test_scripts_tell_what_is_missing_by_their_exit_status(tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([ROOT / "scripts/sif"], env=environment, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (os.EX_UNAVAILABLE, "")
    assert done.stderr == "sif: neither apptainer nor singularity is on the PATH\n"


async def test_without_tmux_only_its_own_figures_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = Sample((0.4,)), Sample((0.1,))

    async def commands(settings: Settings) -> tuple[dict[str, Sample], str]:
        return {"ours": ours, "raw": other}, "no tmux"

    async def ways(settings: Settings) -> dict[str, Sample]:
        return {"ours": ours, "raw": other}

    monkeypatch.setattr(echo, "_echo", commands)
    monkeypatch.setattr(echo, "_seq", ways)
    found = {one.figure: (one.value, one.how) for one in await echo.measure(QUICK)}
    assert [name for name, (value, _) in found.items() if value is None] == [
        "echo_vs_tmux_at_once",
        "echo_vs_tmux_after_sleep",
    ]
    assert found["echo_vs_tmux_at_once"] == (None, "no tmux")
