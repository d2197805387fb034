"""The runtime for foreign images: the exec server in root folders without a Python or even a shell."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.claims import COPY_ARGV, EXEC_SERVER_ARGV
from rollyard_sandbox.copying import ENTRIES
from rollyard_sandbox.errors import LaunchError

pytestmark = pytest.mark.slow
PYTHON = EXEC_SERVER_ARGV[: EXEC_SERVER_ARGV.index("-I")]


async def test_an_empty_image(pods: Any, bundle: Path, folder: Path, tmp_path: Path) -> None:
    async with pods.running(bundle, tmp_path, folder) as client:
        assert (await client.info()).pid == 1
        await client.write_file("/tmp/a/b", b"bytes\0")
        assert (await client.read_file("/tmp/a/b")).data == b"bytes\0"
        assert "usr" not in [entry.name for entry in await client.list_dir("/")]
        with pytest.raises(LaunchError):
            await client.run(["bash", "-c", "true"])
        python = [*EXEC_SERVER_ARGV[: EXEC_SERVER_ARGV.index("-S") + 1], "-c"]
        result = await client.run([*python, "import ssl, sqlite3, lzma, ctypes; print(6 * 7)"])
        assert (result.exit_code, result.output) == (0, b"42\n")


async def test_bash_and_ipython_in_an_image_without_python(
    pods: Any, bundle: Path, folder: Path, tmp_path: Path
) -> None:
    async with pods.running(bundle, pods.only_bash(tmp_path), folder) as client:
        result = await client.bash("cd /work && declare x=1; echo $PWD; type python3 || echo none")
        assert result.exit_code == 0
        assert result.text().splitlines()[0] == "/work"
        assert result.text().endswith("none\n")
        assert (await client.bash("echo $x")).text() == "1\n"
        cell = await client.ipython("import sys, numbers\nsys.executable")
        assert cell.result == "'/.rollyard/venv/bin/python'"
        assert (await client.ipython("print(6 * 7); 1 / 0")).text().count("ZeroDivisionError") >= 1
        assert (await client.ipython("open('/tmp/x', 'w').write('abc')")).result == "3"
        # A program that IPython starts is the image's own, with the image's libraries.
        assert "bash" in (await client.ipython("!echo $BASH_VERSION is bash; true")).text()


@pytest.mark.parametrize(("options", "where"), [("", "image"), ("-I -S", "runtime")])
async def test_ipython_runs_in_the_images_python_if_it_can(
    pods: Any, bundle: Path, folder: Path, tmp_path: Path, options: str, where: str
) -> None:
    """Without site-packages the image's Python has no ipykernel."""
    root = pods.only_bash(tmp_path)
    python = root / "usr/bin/python3"
    python.write_text(f'#!/bin/sh\nexec {" ".join(PYTHON)} {options} -X image "$@"\n')
    python.chmod(0o755)
    async with pods.running(bundle, root, folder) as client:
        cell = await client.ipython("import sys; 'image' if 'image' in sys._xoptions else 'runtime'")
        assert cell.result == repr(where)


async def test_nothing_of_the_runtime_reaches_programs(
    pods: Any, bundle: Path, folder: Path, tmp_path: Path
) -> None:
    async with pods.running(bundle, pods.only_bash(tmp_path), folder) as client:
        maps = (await client.bash('while read -r line; do echo "$line"; done < /proc/self/maps; set')).text()
        assert "/.rollyard" not in maps
        assert "LD_LIBRARY_PATH" not in maps
        # They cannot read the server either, which has the same user and has seen the secret.
        for name in ("environ", "mem", "maps"):
            read = await client.bash(f"read -r -N 1 byte < /proc/1/{name} && echo got $byte")
            assert read.exit_code != 0, name
            assert "ermission denied" in read.text(), name
        stolen = await client.bash(
            "for fd in /proc/1/fd/*; do (: < $fd) 2> /dev/null && echo $fd; done; true"
        )
        assert stolen.text() == ""
        written = await client.bash("echo > /.rollyard/exec-server.py")
        assert "Read-only" in written.text()


def test_an_init_container_copies_it(pods: Any, bundle: Path, folder: Path) -> None:
    """Clusters without image volumes do it like this: the image's own root beside what an engine adds."""
    binds = [part for name in ENTRIES for part in ("--ro-bind", str(bundle / name), f"/{name}")]
    for _ in range(2):  # A pod's init container may run again.
        done = subprocess.run(
            [*pods.BWRAP, *binds, "--bind", str(folder), "/copy", "--remount-ro", "/", *COPY_ARGV, "/copy"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    assert differences(filecmp.dircmp(bundle, folder)) == []
    assert sorted(os.listdir(bundle)) == sorted(ENTRIES)
    missing = subprocess.run(
        [*pods.BWRAP, *binds, "--remount-ro", "/", *COPY_ARGV, "/nonexistent"], capture_output=True, text=True
    )
    assert missing.returncode == 2
    assert "TARGET" in missing.stderr


def test_every_file_may_be_read_by_any_user(bundle: Path) -> None:
    for path in bundle.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode & 0o777
            assert mode in ((0o755,) if path.is_dir() else (0o644, 0o755)), path


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = subprocess.run(
        [sys.executable, "-m", "rollyard_pipeline.sandboxes.bundle", str(tmp_path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == f"bundle: {tmp_path} is not empty\n"


def differences(compared: filecmp.dircmp[str]) -> list[str]:
    found = compared.left_only + compared.right_only + compared.diff_files + compared.funny_files
    return found + [name for below in compared.subdirs.values() for name in differences(below)]
