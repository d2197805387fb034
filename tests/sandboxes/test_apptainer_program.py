"""Apptainer and SingularityCE are found by what they answer, and the doctor reports on a node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.apptainer import starter as apptainer_module
from rollyard_pipeline.sandboxes.apptainer.program import find_program, fuse_problem, userns_problem
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.doctor import apptainer_checks
from rollyard_pipeline.sandboxes.errors import DiskFull, ImageNotUsable, NodeUnusable, SandboxStartFailed


def answering(folder: Path, name: str, version: str, buildcfg: str = "") -> Path:
    """Return a program that answers to --version and buildcfg."""
    path = folder / name
    path.write_text(
        f'#!/bin/sh\ncase "$1" in --version) echo "{version}";; buildcfg) printf "{buildcfg}";; esac\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("name", "answer", "kind", "version"),
    [
        ("apptainer", "apptainer version 1.4.5", "apptainer", "1.4.5"),
        ("apptainer", "apptainer version 1.1.0-1.el9", "apptainer", "1.1.0-1.el9"),
        # Apptainer brings a `singularity` along, so its name says nothing.
        ("singularity", "apptainer version 1.3.6", "apptainer", "1.3.6"),
        ("singularity", "singularity-ce version 4.1.5-jammy", "singularity-ce", "4.1.5-jammy"),
    ],
)
async def test_found_by_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, answer: str, kind: str, version: str
) -> None:
    path = answering(tmp_path, name, answer)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = await find_program()
    assert (found.path, found.kind, found.version) == (str(path), kind, version)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("singularity version 3.8.7", "is singularity version 3.8, which is too old"),
        ("apptainer version 1.0.3", "is apptainer version 1.0, which is too old"),
        ("singularity-ce version 3.9.2", "is singularity-ce version 3.9, which is too old"),
        ("2.6.1-dist", "answers '2.6.1-dist'"),
    ],
)
async def test_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, says: str
) -> None:
    answering(tmp_path, "singularity", answer)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("shutil.which", lambda name: None if name == "apptainer" else str(tmp_path / name))
    with pytest.raises(NodeUnusable) as caught:
        await find_program()
    assert caught.value.reason == "ApptainerMissing"
    assert "apptainer: not found" in str(caught.value)
    assert says in str(caught.value)
    assert "module load apptainer" in str(caught.value)


async def test_set_user_id_installations_take_no_configuration(tmp_path: Path) -> None:
    for name, number, takes in (("APPTAINER", 0, True), ("APPTAINER", 1, False), ("SINGULARITY", 1, False)):
        config = f"PREFIX=/usr\\n{name}_SUID_INSTALL={number}\\n"
        path = answering(tmp_path, "a", "apptainer version 1.4.5", config)
        assert (await find_program(str(path))).takes_config is takes
    # Without any answer, nothing is assumed.
    assert not (await find_program(str(answering(tmp_path, "a", "apptainer version 1.4.5")))).takes_config


async def test_oci_mode_has_no_instances(tmp_path: Path) -> None:
    for version, options in (("3.11.4", ()), ("4.1.5", ("--no-oci",))):
        path = answering(tmp_path, "s", f"singularity-ce version {version}")
        assert (await find_program(str(path))).options == options


def test_devices_that_do_not_let_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuse_problem(tmp_path / "none") == f"there is no {tmp_path / 'none'}"
    device = tmp_path / "fuse"
    device.touch(mode=0o600)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert fuse_problem(device) == f"{device} is closed to this user"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fuse_problem(device) == "squashfuse is not on the PATH"


async def test_no_program_is_told_before_anything_starts(run_dir: Path) -> None:
    provider = open_provider(
        "apptainer", run_dir=run_dir, node="n", apptainer=ApptainerOptions(program=str(run_dir / "none"))
    )
    with pytest.raises(NodeUnusable, match="not found"):
        await provider.start()


async def test_no_user_namespaces(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused() -> str:
        return "Operation not permitted"

    monkeypatch.setattr(apptainer_module, "userns_problem", refused)
    program = answering(tmp_path, "a", "apptainer version 1.4.5")
    provider = open_provider(
        "apptainer", run_dir=run_dir, node="n", apptainer=ApptainerOptions(program=str(program))
    )
    with pytest.raises(NodeUnusable, match=r"Operation not permitted.*What to do") as caught:
        await provider.start()
    assert caught.value.reason == "UserNamespacesForbidden"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("FATAL: could not open image /x: image format not recognized", ImageNotUsable),
        ("FATAL: exec /.singularity.d/startscript failed: no such file or directory", ImageNotUsable),
        ("FATAL: could not write instance file: no space left on device", DiskFull),
        ("FATAL: while writing: disk quota exceeded", DiskFull),
        ("ERROR: Failed to create user namespace: user namespace not supported", NodeUnusable),
        ("NotConfined: unshare(): No space left on device", NodeUnusable),
        ("FATAL: something else", SandboxStartFailed),
    ],
)
async def test_failed_starts_by_their_cause(
    kit: Any, run_dir: Path, tmp_path: Path, words: str, error: type[Exception]
) -> None:
    program = answering(tmp_path, "a", "apptainer version 1.4.5")
    program.write_text(program.read_text().replace("esac", f'*) echo "{words}" >&2; exit 255;; esac'))
    root = kit.make_root(tmp_path / "root")
    provider = open_provider(
        "apptainer", run_dir=run_dir, node="n",
        apptainer=ApptainerOptions(program=str(program), default_image=str(root)),
    )  # fmt: skip
    await provider.start()
    try:
        with pytest.raises(error) as caught:
            await kit.acquire(provider)
        assert words in str(caught.value)
        if error is ImageNotUsable:
            assert str(caught.value).startswith(f"sandbox.image '{root}'")
        assert kit.left_behind(run_dir)["folders"] == []
    finally:
        await provider.aclose()


async def test_doctor_names_what_is_missing(tmp_path: Path) -> None:
    names = {
        check.name: check
        for check in await apptainer_checks(str(tmp_path / "none"), fuse=tmp_path / "fuse", etc=tmp_path)
    }
    assert not names["apptainer"].ok
    assert "ask the administrator" in names["apptainer"].remedy
    assert "unpacked to folders" in names["fuse"].meaning
    assert "chmod 0666" in names["fuse"].remedy
    assert "usermod --add-subuids" in names["subordinate ids"].remedy


async def test_doctor_of_a_set_user_id_installation(tmp_path: Path) -> None:
    path = answering(tmp_path, "s", "singularity-ce version 4.1.5", "SINGULARITY_SUID_INSTALL=1\\n")
    (check,) = [check for check in await apptainer_checks(str(path)) if check.name == "apptainer"]
    assert check.ok
    assert "sessiondir max size" in check.meaning


@pytest.mark.apptainer
async def test_doctor_of_a_node_that_has_all(apptainer_works: None) -> None:
    assert await userns_problem() is None
    checks = {check.name: check for check in await apptainer_checks()}
    assert all(check.ok for check in checks.values())
    assert "the writable layer of an image is sized by the job" in checks["apptainer"].meaning
    assert "mounted through /dev/fuse" in checks["fuse"].meaning
    assert checks["subordinate ids"].remedy == ""
