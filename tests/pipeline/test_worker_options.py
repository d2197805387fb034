"""`python -m rollyard_pipeline`: options that cannot be used are refused in one line, by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rollyard_pipeline.program import main
from rollyard_pipeline.sandboxes.host.cgroups import memory_limit


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stages", "init,test"], "--stages: test given; expected some of init, run, eval"),
        (["--stages", ","], "--stages: nothing given"),
        (["--concurrency", "run=0"], "--concurrency: 'run=0'; expected for example init=16"),
        (["--concurrency", "walk=3"], "--concurrency: 'walk=3'"),
        (
            ["--default-image", "/x.sif"],
            "--default-image goes with --sandbox apptainer, docker or podman (got --sandbox bubblewrap)",
        ),
        (["--fakeroot"], "--fakeroot goes with --sandbox apptainer"),
        (["--build-dockerfiles"], "--build-dockerfiles goes with --sandbox apptainer"),
        (["--token-file", "/no/such/file"], "--token-file: /no/such/file cannot be read"),
    ],
)
def test_bad_options(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    code = main(["--url", "http://127.0.0.1:9", "--token-file", str(token), *options])
    assert code == 2
    error = capsys.readouterr().err
    assert "InvalidOption" in error
    assert says in error
    assert "secret" not in error


def test_a_token_file_without_a_workers_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"admin": "secret"}))
    assert main(["--url", "http://127.0.0.1:9", "--token-file", str(file)]) == 2
    assert "no token of the role 'worker'" in capsys.readouterr().err


def test_a_worker_that_starts_imports_no_template_engine_and_collects_garbage() -> None:
    """Agents that use no model begin their first sandbox without Jinja and tokenizers."""
    code = (
        "import gc, sys, rollyard_pipeline.__main__; "
        "print(gc.isenabled(), sorted({'jinja2', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"


def test_a_prepared_worker_imports_and_builds_nothing_with_its_first_request() -> None:
    """The preparation proceeds while the node is checked, and leaves no such work to the first lease."""
    code = """
import asyncio, json, sys
from rollyard_crds.lease import LeaseRequest, LeaseResponse
from rollyard_crds.rolloutjob import WorkerJobSpec, StagesSpec
from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable
from rollyard_pipeline.control_plane.rest import RestControlPlane

async def main():
    async with RestControlPlane("http://127.0.0.1:9", "token") as control:
        await asyncio.to_thread(control.prepare)
        before = set(sys.modules)
        try:
            await control.lease(LeaseRequest(worker="w", node="n", capacity={"init": 1}))
        except ControlPlaneUnavailable:
            built = [one.__pydantic_complete__ for one in (LeaseResponse, WorkerJobSpec, StagesSpec)]
            print(json.dumps([built, sorted(set(sys.modules) - before)]))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[True, True, True], []]


def test_a_worker_looks_for_no_plugins_of_pydantic_by_itself() -> None:
    """An installation that needs them sets the variable itself."""
    code = "import os, rollyard_pipeline.__main__; print(os.environ['PYDANTIC_DISABLE_PLUGINS'])"
    for given, found in ((None, "__all__"), ("other-plugin", "other-plugin")):
        env = {name: value for name, value in os.environ.items() if name != "PYDANTIC_DISABLE_PLUGINS"}
        env |= {} if given is None else {"PYDANTIC_DISABLE_PLUGINS": given}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        )
        assert done.stdout.strip() == found


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_batch_job_is_that_of_its_groups(tmp_path: Path, version: int) -> None:
    """Slurm limits the group of a job, and the worker is in one of a step below."""
    proc, mount = tmp_path / "proc", tmp_path / "mount"
    step = mount / "job_7" / "step_0"
    step.mkdir(parents=True)
    proc.mkdir()
    kind, name, file = (
        ("cgroup cgroup rw,memory", "4:memory", "memory.limit_in_bytes")
        if version == 1
        else ("cgroup2 cgroup2 rw", "0:", "memory.max")
    )
    (proc / "mountinfo").write_text(f"31 23 0:27 / {mount} rw,nosuid - {kind}\n")
    (proc / "cgroup").write_text(f"{name}:/job_7/step_0\n")
    machine = memory_limit(proc)
    assert machine == memory_limit(tmp_path / "missing") > 1 << 28, "no group has a limit"
    (step / file).write_text("max\n" if version == 2 else "9223372036854771712\n")
    assert memory_limit(proc) == machine
    (step.parent / file).write_text(f"{1 << 28}\n")
    assert memory_limit(proc) == 1 << 28
    (tmp_path / file).write_text("5\n")
    assert memory_limit(proc) == 1 << 28, "what is above the mount is no group"
