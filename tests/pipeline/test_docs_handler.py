"""The handler of docs/handlers.md: built, installed, and taken through its three stages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rollyard_crds.reading.plugin import offers_of
from rollyard_testing.pace import patience

DOCS = Path(__file__).parents[2] / "docs" / "handlers.md"
FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)

STAGES = """
import asyncio, sys, tempfile
from pathlib import Path
from rollyard_crds.lease import Lease, SandboxHandle, StageTimes
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.registry import HANDLERS, Registry, installed
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.stages.stages import Stages

assert "closeness" in installed(HANDLERS)
spec = RolloutJobSpec.model_validate({
    "tasks": {"stream": True}, "handler": "closeness", "agent": {"type": "oracle"}, "sandbox": {"warm": 0},
})
task = Task.model_validate({
    "id": "t", "prompt": "Write 40 into out.txt", "answer": "42",
    "solution": [{"name": "bash", "arguments": {"command": "cat out.txt; echo 41 > out.txt"}}],
})

class Plane:
    async def job_spec(self, namespace, name, uid):
        return spec

def lease(stage, **fields):
    return HeldLease(Lease(
        rollout="r", token=1, stage=stage, job="j", namespace="default", job_uid="u", group_id="g",
        sample_index=0, attempt=0, queued_seconds=0, lease_seconds=30, task=task, **fields,
    ))

async def main(run_dir):
    provider = open_provider("process", run_dir=Path(run_dir), node="n")
    await provider.start()
    try:
        async with BackendClient() as backends:
            stages = Stages(Plane(), backends, provider, Registry())
            init = await stages.work(lease("init"), StageTimes())
            run = await stages.work(lease("run", sandbox=init.sandbox, carry=init.carry), StageTimes())
            done = await stages.work(
                lease("eval", sandbox=init.sandbox, carry=run.carry, trajectory=run.transcript), StageTimes()
            )
            await provider.release(init.sandbox)
            seen = [m.content for m in run.trajectory.messages if m.role == "tool"]
            print(seen, done.reward, done.reward_components)
    finally:
        await provider.aclose()

asyncio.run(main(sys.argv[1]))
"""


def test_the_documented_handler_installs_and_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("h")
    source, target = folder / "closeness", folder / "site"
    source.mkdir()
    files = FILE.findall(DOCS.read_text())
    assert [name for name, _ in files] == ["closeness.py", "pyproject.toml"]
    for name, text in files:
        (source / name).write_text(text)
    assert len(files[0][1].splitlines()) <= 25
    assert offers_of(files[0][1].encode()) == {"handlers": {"closeness": "ClosenessHandler"}}, "as a plugin"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--disable-pip-version-check", "--root-user-action=ignore", "--target", str(target), str(source)],
        check=True, timeout=patience(120),
    )  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", STAGES, str(folder / "run")],
        env={**os.environ, "PYTHONPATH": str(target)}, capture_output=True, text=True, timeout=patience(120),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "['0'] 0.5 {'readable': 1.0}\n"
