"""What `rollyard doctor` reports about Slurm, shared storage and clocks, and about parts that are missing."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard import doctor
from rollyard.doctor import Finding, run
from rollyard_pipeline.sandboxes.doctor import Check

Answers = dict[str, tuple[int, str]]


def answering(answers: Answers) -> Callable[..., tuple[int, str]]:
    """Return a runner that knows what some commands print."""

    def runner(*command: str) -> tuple[int, str]:
        return answers.get(" ".join(command), (127, f"{command[0]}: not found"))

    return runner


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts programs of these names on an otherwise empty PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(*names: str) -> None:
        for name in names:
            (folder / name).write_text("#!/bin/sh\n")
            (folder / name).chmod(0o755)

    return make


def told(finding: Finding) -> str:
    return f"{finding.state} | {finding.advice}"


def test_slurm_s_commands_without_a_cluster(programs: Callable[..., None]) -> None:
    programs(*doctor.PROGRAMS)
    runner = answering({"sbatch --version": (1, "sbatch: fatal: Could not establish a configuration source")})
    found = doctor.check_slurm({}, runner)
    assert found.verdict == "optional"
    assert "SLURM_CONF" in found.advice


@pytest.mark.parametrize(
    ("installed", "answer", "env", "verdict", "words"),
    [
        (doctor.PROGRAMS, "slurm-wlm 22.05.8", {}, "ok", "22.05.8"),
        (doctor.PROGRAMS, "slurm 19.05.5", {}, "missing", "20.11 or newer"),
        (doctor.PROGRAMS, "what?", {}, "missing", "Slurm's own sbatch"),
        (("sbatch", "squeue"), "slurm 23.02.1", {}, "missing", "scontrol, scancel"),
        ((), "", {}, "optional", "not installed"),
        ((), "", {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "cn3"}, "ok", "job 7 on cn3"),
    ],
    ids=["new", "old", "other", "half of it", "no slurm", "within a job"],
)
def test_which_slurm_is_there(
    programs: Callable[..., None],
    installed: tuple[str, ...],
    answer: str,
    env: dict[str, str],
    verdict: str,
    words: str,
) -> None:
    programs(*installed)
    found = doctor.check_slurm(env, answering({"sbatch --version": (0, answer)} if answer else {}))
    assert found.verdict == verdict
    assert words in told(found)


def test_a_controller_that_does_not_answer() -> None:
    down = (1, "Slurmctld(primary) at login is DOWN")
    found = doctor.check_controller(answering({"scontrol ping": down}))
    assert found.verdict == "missing"
    assert "DOWN" in found.state


@pytest.mark.parametrize(
    ("check", "setting", "good"),
    [
        (doctor.check_tracking, "ProctrackType           = proctrack/linuxproc", False),
        (doctor.check_tracking, "ProctrackType           = proctrack/cgroup", True),
        (doctor.check_limits, "TaskPlugin              = task/affinity", False),
        (doctor.check_limits, "TaskPlugin              = task/cgroup,task/affinity", True),
    ],
)
def test_what_the_site_has_set(check: Callable[..., Finding], setting: str, good: bool) -> None:
    found = check(lambda *command: (0, setting))
    assert found.verdict == ("ok" if good else "optional")
    assert ("ask the administrator" in found.advice) != good


def mountinfo(folder: Path, *mounts: str) -> Path:
    lines = ["21 1 254:0 / / rw,relatime - ext4 /dev/vda rw", *mounts]
    path = folder / "mountinfo"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_the_mount_that_holds_a_folder(tmp_path: Path) -> None:
    listed = mountinfo(
        tmp_path,
        "30 21 0:40 / /home rw - nfs4 server:/home rw,vers=4.2",
        "31 30 0:41 / /home/a\\040b rw - lustre mgs:/fs rw,flock",
    )
    assert doctor.mount_of(Path("/home/x"), listed).kind == "nfs4"
    assert doctor.mount_of(Path("/homes"), listed).kind == "ext4"
    inner = doctor.mount_of(Path("/home/a b/c"), listed)
    assert (inner.point, inner.kind, "flock" in inner.options) == ("/home/a b", "lustre", True)


@pytest.mark.parametrize(
    ("kind", "options", "verdict", "words"),
    [
        ("lustre", {"rw"}, "missing", "mount option flock"),
        ("lustre", {"rw", "flock"}, "ok", "a link to one"),
        ("nfs", {"nolock"}, "optional", "NFSv4 with locks"),
        ("nfs4", {"rw"}, "ok", "SQLite is safer on a local disk"),
        ("xfs", {"rw"}, "ok", "srun -N2 ls"),
    ],
)
def test_kinds_of_storage(kind: str, options: set[str], verdict: str, words: str) -> None:
    mount = doctor.MountPoint("/home", kind, frozenset(options))
    found = doctor.check_kind(Path("/home/u"), True, mount)
    assert found.verdict == verdict
    assert words in told(found)


def test_locks_and_space_of_a_good_folder(tmp_path: Path) -> None:
    folder = doctor.nearest(tmp_path / "not" / "there")
    assert folder == tmp_path
    assert doctor.check_locks(folder).verdict == "ok"
    assert "GiB free" in doctor.check_space(folder).state
    assert list(tmp_path.iterdir()) == [], "nothing stays"


def test_a_file_system_that_refuses_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    found = doctor.check_locks(tmp_path)
    assert found.verdict == "missing"
    assert "flock: Function not implemented" in found.state


def test_a_file_system_whose_locks_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "lockf", lambda *words: None)
    found = doctor.check_locks(tmp_path)
    assert "fcntl: two processes held it at once" in found.state


def test_a_quota_that_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    found = doctor.check_space(tmp_path)
    assert found.verdict == "missing"
    assert "quota exceeded" in found.state.lower()
    assert "more quota" in found.advice


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*words: Any, **further: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", closed)
    for found in (doctor.check_locks(tmp_path), doctor.check_space(tmp_path)):
        assert found.verdict == "missing"
        assert "Permission denied" in found.state


@pytest.mark.parametrize(
    ("offset", "kept", "verdict", "words"),
    [
        (240.0, True, "missing", "240 s behind the server"),
        (-90.0, None, "missing", "90 s ahead of the server"),
        (0.4, True, "ok", "kept right"),
        (0.0, False, "optional", "NTP, chrony"),
        (None, None, "optional", "does not say"),
    ],
)
def test_clocks(tmp_path: Path, offset: float | None, kept: bool | None, verdict: str, words: str) -> None:
    found = doctor.check_clocks(tmp_path, lambda: kept, lambda folder: offset)
    assert found.verdict == verdict
    assert words in told(found)


def test_this_machine_s_clock_agrees_with_its_own_disk(tmp_path: Path) -> None:
    offset = doctor.storage_offset(tmp_path)
    assert offset is not None
    assert abs(offset) < doctor.FAR_SECONDS
    assert doctor.storage_offset(tmp_path / "none") is None
    assert doctor.is_synchronised() in (True, False)


def checks(**broken: str) -> Callable[..., Any]:
    async def all_of_them(*words: Any) -> list[Check]:
        names = ("apptainer", "user namespaces", "fuse", "bubblewrap")
        return [Check(name, name not in broken, broken.get(name, "works")) for name in names]

    return all_of_them


def test_a_cluster_needs_apptainer_and_not_bubblewrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_pipeline.sandboxes.doctor.apptainer_checks", checks())
    monkeypatch.setattr("rollyard_pipeline.sandboxes.doctor.sandbox_checks", checks(bubblewrap="not there"))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    found = [one for one in doctor.examine(tmp_path / "run") if one.name == "bubblewrap"]
    assert found[0].verdict == "optional"
    monkeypatch.setattr("rollyard_pipeline.sandboxes.doctor.apptainer_checks", checks(apptainer="not there"))
    by_name = {one.name: one for one in doctor.check_containers(on_slurm=True)}
    assert by_name["apptainer"].verdict == "missing"
    assert {one.name: one.verdict for one in doctor.check_containers(on_slurm=False)}[
        "apptainer"
    ] == "optional"


@pytest.mark.parametrize(
    ("body", "verdict", "words"),
    [
        ("echo 'NVIDIA H100, 81559 MiB, 550.54.15'", "ok", "550.54.15 (name, memory, driver)"),
        ("echo 'Driver/library version mismatch' >&2; exit 18", "optional", "ask the administrator"),
        (None, "optional", "the embedded engine needs none"),
    ],
)
def test_gpus_and_their_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None, verdict: str, words: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if body is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    found = doctor.check_gpu()
    assert found.verdict == verdict
    assert words in told(found)
    assert ("mismatch" in told(found)) == (body is not None and "mismatch" in body)


def test_a_program_that_hangs_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard.doctor.TIMEOUT_SECONDS", 0.2)
    assert run("sleep", "60")[0] == 124
    assert run("/no/such/program")[0] == 127
    assert run("sh", "-c", "echo a; echo b")[1] == "b"


def test_slurmrestd_is_told_of_only_where_one_is_named(tmp_path: Path) -> None:
    assert doctor.check_slurmrestd(None, ()) is None
    profile = tmp_path / "p.yaml"
    profile.write_text("partition: cpu")
    assert doctor.check_slurmrestd(profile, ()) is None
    profile.write_text(f"rest: {{url: 'unix:{tmp_path}/none'}}")
    found = doctor.check_slurmrestd(profile, ())
    assert found is not None
    assert (found.verdict, found.name) == ("missing", "slurmrestd")
    assert "rest.url: there is no socket" in found.state
    profile.write_text("rest: {}")
    found = doctor.check_slurmrestd(profile, ())
    assert found is not None
    assert (found.verdict, found.name) == ("missing", "slurm profile")
    assert "rest.url" in found.state


def test_a_socket_that_nobody_listens_on_is_no_slurmrestd(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("s") / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    found = doctor.check_slurmrestd(None, (path,))
    assert found is not None
    assert found.verdict == "optional"
    assert "cannot be reached" in found.state


def test_a_vllm_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "vllm"
    program.write_text("#!/usr/bin/env python3\n")
    program.chmod(0o755)
    installed = tmp_path / "lib" / "python3.12" / "site-packages" / "vllm-0.26.0.dist-info"
    installed.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(program.parent))
    found = doctor.check_vllm()
    assert (found.verdict, found.state) == ("optional", "0.26.0 is too old")
    assert "0.30.0" in found.advice
    installed.rename(installed.with_name("vllm-0.32.0.dist-info"))
    assert doctor.check_vllm().verdict == "ok"
