"""`rollyard up --sandbox apptainer` takes a job from submission to reward, and nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

pytestmark = pytest.mark.apptainer


def rollyard(*arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollyard", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=patience(seconds), stdin=subprocess.DEVNULL
    )


def task(number: int) -> dict[str, Any]:
    """Return a task whose tests come when the Run stage is over, and look at what it left."""
    call = {"name": "bash", "arguments": {"command": f"cat given > out; echo {number} >> out; sleep 300 & "}}
    return {
        "id": f"t{number}",
        "prompt": "Write the number below what was given.",
        "sandbox": {"files": {"given": "given\n"}},
        "solution": [call, {"name": "submit", "arguments": {"answer": "done"}}],
        "test_script": f"[ \"$(cat out)\" = $'given\\n{number}' ] && ! grep -lx sleep /proc/[0-9]*/comm\n",
    }


def test_a_job_in_apptainer_sandboxes(kit: Any, sif: Path, run_dir: Path) -> None:
    home = run_dir / "home"
    manifest = job_manifest(
        "app",
        {
            "tasks": {"inline": [task(number) for number in range(3)]},
            "handler": "shell",
            "samplesPerTask": 2,
            "agent": {"type": "oracle", "tools": ["bash", "submit"]},
            "sandbox": {"resources": {"memory": "192Mi", "disk": "16Mi", "processes": 64}, "warm": 2},
        },
    )
    job = run_dir / "job.yaml"
    job.write_text(yaml.safe_dump(manifest))
    where = ("--home", str(home))
    up = rollyard(
        "up", *where, "--port", "0", "--sandbox", "apptainer", "--default-image", str(sif), "--detach"
    )
    assert up.returncode == 0, up.stderr
    try:
        submitted = rollyard("submit", "-f", str(job), *where, "--wait", seconds=150)
        logs = "\n".join(path.read_text()[-3000:] for path in (home / "logs").glob("*.log"))
        assert submitted.returncode == 0, f"{submitted.stderr}\n{logs}"
        out = run_dir / "out.jsonl"
        assert rollyard("trajectories", "app", *where, "-o", str(out)).returncode == 0
        rewards = [json.loads(line)["reward"] for line in out.read_text().splitlines()]
        assert rewards == [1.0] * 6
    finally:
        down = rollyard("down", *where)
    assert down.returncode == 0, down.stderr
    assert SandboxFolder(home / "run").ids() == []
    assert [path for path in (home / "run/apptainer/instances").rglob("*") if path.is_file()] == []


def test_options_of_apptainer_alone(run_dir: Path) -> None:
    done = rollyard("up", "--home", str(run_dir / "home"), "--default-image", "/x.sif")
    assert done.returncode == 2
    assert "--default-image goes with --sandbox apptainer, docker or podman" in done.stderr
