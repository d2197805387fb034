"""`rollyard images build` refuses by line before it builds, builds once, and leaves nothing half-built."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rollyard.main import main
from rollyard_testing.pace import patience

BUILDER = """#!/bin/bash
case $1 in
--version) echo 'apptainer version 1.4.5' ;;
buildcfg) echo 'APPTAINER_SUID_INSTALL=0' ;;
build) n=$#; echo x >> "$0.calls"; test -e "$0.slow" && { touch "$0.began"; sleep 60; }
  cp "${@:n:1}" "${@:n-1:1}" 2>/dev/null || echo "${@:n:1}" > "${@:n-1:1}" ;;
esac
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a program that builds by copying the definition file."""
    path = tmp_path / "builder"
    path.write_text(BUILDER)
    path.chmod(0o755)
    return path


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Return two task folders that need one image, and one that needs none."""
    top = tmp_path / "tasks"
    for name in ("first", "second", "named"):
        (top / name / "environment").mkdir(parents=True)
        (top / name / "environment/Dockerfile").write_text("FROM some:1\nRUN echo made\nEXPOSE 80\n")
        (top / name / "task.toml").write_text("")
    (top / "named/task.toml").write_text('[environment]\ndocker_image = "a:1"\n')
    return top


def calls(program: Path) -> int:
    path = Path(f"{program}.calls")
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_images_are_built_once(
    tasks: Path, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    command = ["images", "build", str(tasks), "--cache", str(cache), "--apptainer", str(program)]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("first/environment, second/environment: built in 0 s: ")
    assert "first/environment: Dockerfile line 3: EXPOSE has no effect" in shown.err
    assert calls(program) == 2, "of the base and of the one image"
    assert main(command) == 0
    assert "is there" in capsys.readouterr().out
    assert calls(program) == 2
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".json", ".sif", ".sif"]
    (tasks / "second/environment/Dockerfile").write_text("FROM some:1\nRUN echo other\n")
    assert main(command) == 0
    assert calls(program) == 3, "the base is there"


def test_one_image_goes_to_a_file(
    tasks: Path, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tasks / "first/environment", tmp_path / "out/one.sif"
    command = ["images", "build", str(folder), "--out", str(out), "--apptainer", str(program)]
    assert main(command) == 0
    assert "/bin/sh -c 'echo made'" in out.read_text()
    assert main(command) == 0
    assert "is there" in capsys.readouterr().out
    assert calls(program) == 2
    assert sorted(path.name for path in out.parent.iterdir()) == ["one.sif", "one.sif.json"]
    (folder / "Dockerfile").write_text("FROM some:1\nRUN echo other\n")
    assert main(command) == 0
    assert "echo other" in out.read_text()


def test_the_definition_file_is_shown(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["images", "build", str(tasks), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "# first/environment, second/environment\nBootstrap: docker\nFrom: some:1\n\n%post\n"
    )
    base = ["--base", "some:1=oci-archive:/no/such.tar"]
    assert main(["images", "build", str(tasks), "--dry-run", *base]) == 1
    assert "no such file on this node: /no/such.tar" in capsys.readouterr().err


def test_all_refusals_come_before_any_build(
    tasks: Path, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tasks / "named/task.toml").write_text("")
    (tasks / "named/environment/Dockerfile").write_text("FROM some:1\nUSER x\n")
    (tasks / "second/environment/Dockerfile").write_text("FROM some:1\n\nRUN <<X\nX\n")
    command = ["images", "build", str(tasks), "--cache", str(tmp_path / "cache"), "--apptainer", str(program)]
    assert main(command) == 1
    shown = capsys.readouterr().err
    assert "named/environment: Dockerfile line 2: USER" in shown
    assert "second/environment: Dockerfile line 3: RUN" in shown
    assert calls(program) == 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give one of --cache DIR, --out FILE.sif and --dry-run"),
        (["--dry-run", "--cache", "x"], "give one of"),
        (["--dry-run", "--base", "some:1"], "expected NAME=IMAGE"),
        (["--out", "x.sif", "MANY"], "needs 2 images; use --cache DIR"),
    ],
)
def test_wrong_usage(tasks: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if options[-1:] == ["MANY"]:
        options = options[:-1]
        (tasks / "second/environment/Dockerfile").write_text("FROM some:2\n")
    assert main(["images", "build", str(tasks), *options]) == 2
    assert words in capsys.readouterr().err


def test_nothing_to_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["images", "build", str(tmp_path), "--dry-run"]) == 1
    assert "no Dockerfile, and no task folder that needs one" in capsys.readouterr().err


def test_a_build_that_takes_too_long(
    tasks: Path, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(f"{program}.slow").touch()
    cache = ["--cache", str(tmp_path / "cache"), "--apptainer", str(program), "--timeout", "1"]
    assert main(["images", "build", str(tasks), *cache]) == 1
    assert "not built within 1 s; nothing of it is left" in capsys.readouterr().err
    assert list((tmp_path / "cache").iterdir()) == []


def test_ctrl_c_leaves_nothing(tasks: Path, program: Path, tmp_path: Path) -> None:
    Path(f"{program}.slow").touch()
    words = ["images", "build", str(tasks), "--cache", str(tmp_path / "cache"), "--apptainer", str(program)]
    command = [sys.executable, "-m", "rollyard", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + patience(30)
            while not Path(f"{program}.began").exists():
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(patience(20)) == 130
        finally:
            process.kill()
    assert list((tmp_path / "cache").iterdir()) == []
