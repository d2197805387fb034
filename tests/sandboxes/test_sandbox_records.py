"""Records, identities and requests: the parts that need no sandbox."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rollyard_crds.fields.quantity import parse_quantity
from rollyard_crds.rolloutjob import SandboxSpec
from rollyard_crds.task import TaskSandbox
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.errors import DiskFull, NodeUnusable
from rollyard_pipeline.sandboxes.host.processes import (
    ProcessRef,
    descendants,
    kill_and_wait,
    kill_tree,
    process_ref,
    this_process,
)
from rollyard_pipeline.sandboxes.host.records import Death, SandboxFolder, SandboxRecord
from rollyard_pipeline.sandboxes.interface import SandboxKey, SandboxRequest
from rollyard_pipeline.sandboxes.starters.root_folders import disk_size


def record(folder: SandboxFolder, **changes: object) -> SandboxRecord:
    values = {
        "id": folder.new_id(),
        "provider": "process",
        "state": "warm",
        "worker": this_process(),
        "created": time.time(),
        "secret": folder.new_secret(),
    }
    return SandboxRecord(**{**values, **changes})


@pytest.fixture
def folder(run_dir: Path) -> SandboxFolder:
    made = SandboxFolder(run_dir)
    made.prepare()
    return made


def test_records_are_private_and_survive_a_round_trip(folder: SandboxFolder) -> None:
    first = record(folder, env={"A": "b"})
    folder.create(first)
    claimed = replace(
        first,
        state="claimed",
        owner="r-1",
        root=ProcessRef(11, 1),
        monitor=ProcessRef(12, 2),
        helpers=(ProcessRef(13, 3), ProcessRef(14, 4)),
        cgroups=("/sys/fs/cgroup/a", "/sys/fs/cgroup/b"),
        workdir="/elsewhere",
    )
    folder.save(claimed)
    assert folder.load(first.id) == claimed
    assert SandboxFolder(folder.run_dir).load(first.id) == claimed, "in another process, too"
    assert folder.ids() == [first.id]
    assert folder.folder(first.id).stat().st_mode & 0o777 == 0o700
    assert (folder.folder(first.id) / "sandbox.json").stat().st_mode & 0o777 == 0o600
    folder.remove(first.id)
    folder.remove(first.id)
    assert folder.load(first.id) is None
    with pytest.raises(FileNotFoundError):
        folder.save(claimed)


@pytest.mark.parametrize("secret", ["", "00", "x" * 64, 7, None])
def test_a_record_without_a_whole_secret_is_none(folder: SandboxFolder, secret: object) -> None:
    """Any peer could prove that it knows a secret which is empty."""
    made = record(folder)
    folder.create(made)
    path = folder.folder(made.id) / "sandbox.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"secret": secret}))
    assert SandboxFolder(folder.run_dir).load(made.id) is None


@pytest.mark.parametrize("name", ["..", "../../etc", "", "x" * 12, "0" * 13])
def test_strange_ids_name_no_folder(folder: SandboxFolder, name: str) -> None:
    assert folder.load(name) is None
    folder.remove(name)
    assert folder.path.is_dir()


async def test_sweep_removes_broken_dead_and_abandoned(run_dir: Path) -> None:
    provider = open_provider("process", run_dir=run_dir, node="n")
    await provider.start()
    folder = SandboxFolder(run_dir)
    broken, dead, foreign = folder.new_id(), record(folder, root=ProcessRef(2**22 - 1, 1)), record(
        folder, provider="other", root=ProcessRef(2**22 - 1, 1)
    )  # fmt: skip
    (folder.path / broken).mkdir()
    (folder.path / broken / "sandbox.json").write_text("{")
    folder.create(dead)
    folder.create(foreign)
    starting = record(folder, state="starting")
    folder.create(starting)
    for name, age in ((".new-old", 1000), (".new-young", 0)):
        (folder.path / name).mkdir()
        os.utime(folder.path / name, (time.time() - age,) * 2)
    with folder.sweeping() as mine:
        assert mine
        assert await provider.sweep() == [], "another process is sweeping"
    assert sorted(await provider.sweep()) == sorted([broken, dead.id])
    left = set(os.listdir(folder.path)) - {".sweep"}
    assert left == {foreign.id, starting.id, ".new-young"}
    await provider.aclose()


async def test_a_worker_knows_which_sandboxes_are_its_own_and_which_have_an_owner(run_dir: Path) -> None:
    provider = open_provider("process", run_dir=run_dir, node="n")
    folder = SandboxFolder(run_dir)
    folder.prepare()
    mine, alive = this_process(), this_process()
    another = ProcessRef(2**22 - 1, 1)
    made = {
        "claimed": record(folder, state="claimed", owner="r-1", worker=mine, root=alive),
        "another's": record(folder, state="claimed", owner="r-2", worker=another, root=alive),
        "dead": record(folder, state="claimed", owner="r-3", worker=mine, root=another),
        "of eval": record(folder, state="warm", owner="r-4", worker=mine, root=alive),
        "warm": record(folder, state="warm", worker=mine, root=alive),
        "starting": record(folder, state="starting", worker=mine),
    }
    for one in made.values():
        folder.create(one)

    def ids(*names: str) -> list[str]:
        return sorted(made[name].id for name in names)

    assert provider.claimed() == ids("claimed", "another's")
    assert provider.in_use() == ids("claimed", "another's", "of eval")
    assert provider.own() == ids("claimed")


@pytest.mark.parametrize(("death", "other"), [("oom", "crash"), ("crash", "oom")])
async def test_a_death_is_remembered_for_six_hours(folder: SandboxFolder, death: Death, other: Death) -> None:
    young, old, alive = folder.new_id(), folder.new_id(), folder.new_id()
    now = time.time()
    for name, age in ((young, 5.9), (old, 6.1)):
        folder.remember_death(name, death)
        os.utime(folder.path / f".{death}-{name}", (now - age * 3600,) * 2)
    assert [folder.died_of(name, death) for name in (young, old, alive, "..")] == [True, True, False, False]
    assert not folder.died_of(young, other)
    folder.remove_abandoned(now)
    assert [folder.died_of(name, death) for name in (young, old)] == [True, False]
    assert folder.ids() == []


def test_long_run_dir_is_refused_with_its_limit(tmp_path: Path) -> None:
    with pytest.raises(
        NodeUnusable, match=r"too long for Unix sockets: \d+ bytes, at most 74; choose a shorter"
    ):
        SandboxFolder(tmp_path / ("x" * 100)).prepare()


def test_run_dir_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path.parent / "f"
    file.touch()
    with pytest.raises(NodeUnusable, match="cannot be used"):
        SandboxFolder(file).prepare()


def test_full_disk_has_its_own_reason(folder: SandboxFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFull, match="no room left"):
        folder.create(record(folder))


def test_unknown_provider_is_named() -> None:
    with pytest.raises(ValueError, match=r"--sandbox nspawn.*choose one of bubblewrap, apptainer, "):
        open_provider("nspawn", run_dir="/tmp", node="n")


def test_identity_is_pid_and_start_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    ref = process_ref(child.pid)
    assert ref.alive()
    other = ProcessRef(ref.pid, ref.started - 1)
    assert not other.alive()
    assert kill_and_wait(other, 1), "a process that is gone"
    assert ref.alive(), "the one that has its pid now was not hit"
    assert kill_and_wait(ref, 10)
    assert not ref.alive()
    child.wait()
    assert process_ref(child.pid) is None


def test_kill_tree_reaches_sessions_of_their_own() -> None:
    code = "import ctypes, subprocess; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); "
    code += "p = subprocess.Popen(['bash', '-c', 'setsid sleep 99 & sleep 99 & echo; exec sleep 99'], "
    code += "stdout=-1); "
    code += "p.stdout.readline(); print(flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        below = descendants(child.pid)
        assert len(below) == 3
        root = process_ref(child.pid)
        assert kill_tree(root, 10)
        assert not any(ref.alive() for ref in below)


@pytest.mark.parametrize(
    ("text", "number"), [("1", 1), ("500m", 0.5), ("2Gi", 2**31), ("1.5k", 1500), ("3M", 3e6), ("1Ti", 2**40)]
)
def test_quantities(text: str, number: float) -> None:
    assert parse_quantity(text) == number


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1Xi", "1GiGi"])
def test_bad_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity; write for example"):
        parse_quantity(text)


def test_request_merges_job_and_task() -> None:
    job = SandboxSpec(image="/a", env={"A": "job", "B": "job"})
    request = SandboxRequest.of(job, TaskSandbox(env={"B": "task"}, files={"f": "x"}))
    assert request == SandboxRequest(
        image="/a", env={"A": "job", "B": "task"}, files={"f": "x"}, memory_bytes=2**30, disk_bytes=2**30
    )
    assert request.key == SandboxRequest.of(job).key
    assert SandboxRequest.of(job, TaskSandbox(image="/b")).key != request.key
    assert SandboxRequest.of(job, TaskSandbox(folders=["/logs", "/app", "/logs"])).folders == (
        "/app",
        "/logs",
    )


@pytest.mark.parametrize("named", ["python:3", "docker://python:3"])
@pytest.mark.parametrize("key", ["python:3", "docker://python:3"])
def test_images_that_tasks_name_are_mapped(named: str, key: str) -> None:
    job = SandboxSpec(image="other", images={key: "/images/python.sif", "other": "/wrong"})
    assert SandboxRequest.of(job, TaskSandbox(image=named)).image == "/images/python.sif"
    assert SandboxRequest.of(job, TaskSandbox(image="unknown")).image == "unknown"
    assert SandboxRequest.of(job, TaskSandbox()).image == "other"


def test_disks_leave_memory_for_processes() -> None:
    key = SandboxKey(None, 1, 300 << 20, 1 << 30, 10)
    assert disk_size(key) == 100 << 20
    assert disk_size(SandboxKey(None, 1, 300 << 20, 10 << 20, 10)) == 10 << 20
