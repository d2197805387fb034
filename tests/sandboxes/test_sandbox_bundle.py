"""The runtime for foreign images: the exec server in root folders without a Python or even a shell."""

from __future__ import annotations

import asyncio
import filecmp
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rollyard_crds.claims import COPY_ARGV, EXEC_SERVER_ARGV
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.copying import ENTRIES
from rollyard_sandbox.errors import LaunchError

pytestmark = pytest.mark.real
SECRET = "a secret of one sandbox"
BWRAP = (
    "bwrap", "--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--clearenv",
    "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/work", "--uid", "1000", "--gid", "1000",
    "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/work",
)  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "runtime"
    done = subprocess.run(
        [sys.executable, "-m", "rollyard_pipeline.sandboxes.bundle", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ryb-", dir="/tmp") as name:  # a socket's path must be short
        yield Path(name)


@asynccontextmanager
async def running(runtime: Path, root: Path, folder: Path) -> AsyncIterator[ExecClient]:
    """The exec server under EXEC_SERVER_ARGV, as process 1 of a sandbox whose root folder is `root`."""
    binds = [part for entry in sorted(root.iterdir()) for part in ("--ro-bind", str(entry), f"/{entry.name}")]
    ready_read, ready_write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *BWRAP, *binds, "--ro-bind", str(runtime), "/.rollyard", "--bind", str(folder), "/sockets",
        "--remount-ro", "/", *EXEC_SERVER_ARGV, "--listen", "unix:/sockets/s", "--workdir", "/tmp",
        "--token-sha256", hashlib.sha256(SECRET.encode()).hexdigest(), "--ready-fd", str(ready_write),
        pass_fds=(ready_write,),
    )  # fmt: skip
    os.close(ready_write)
    try:
        with os.fdopen(ready_read) as ready:
            assert await asyncio.to_thread(ready.readline), "the server ended before it was ready"
        async with await ExecClient.connect(f"unix:{folder}/s", token=SECRET) as client:
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_an_empty_image(bundle: Path, folder: Path, tmp_path: Path) -> None:
    async with running(bundle, tmp_path, folder) as client:
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
    bundle: Path, folder: Path, tmp_path: Path
) -> None:
    async with running(bundle, only_bash(tmp_path), folder) as client:
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


async def test_nothing_of_the_runtime_reaches_programs(bundle: Path, folder: Path, tmp_path: Path) -> None:
    async with running(bundle, only_bash(tmp_path), folder) as client:
        maps = (await client.bash('while read -r line; do echo "$line"; done < /proc/self/maps; set')).text()
        assert "/.rollyard" not in maps
        assert "LD_LIBRARY_PATH" not in maps
        # Nor can they read the server, which is of the same user: it has seen the secret.
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


def test_an_init_container_copies_it(bundle: Path, folder: Path) -> None:
    """The way for clusters without image volumes: the image's own root beside what an engine adds."""
    binds = [part for name in ENTRIES for part in ("--ro-bind", str(bundle / name), f"/{name}")]
    for _ in range(2):  # a pod's init container may run again
        done = subprocess.run(
            [*BWRAP, *binds, "--bind", str(folder), "/copy", "--remount-ro", "/", *COPY_ARGV, "/copy"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    assert differences(filecmp.dircmp(bundle, folder)) == []
    assert sorted(os.listdir(bundle)) == sorted(ENTRIES)
    missing = subprocess.run(
        [*BWRAP, *binds, "--remount-ro", "/", *COPY_ARGV, "/nonexistent"], capture_output=True, text=True
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


def only_bash(root: Path) -> Path:
    """A root folder with bash, as sh too, and the libraries that it loads."""
    (root / "usr/bin").mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    program = Path(shutil.which("bash") or "/bin/bash").resolve()
    shutil.copy(program, root / "usr/bin/bash")
    (root / "usr/bin/sh").symlink_to("bash")
    for word in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.split():
        if word.startswith("/"):
            target = root / word.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, target)
    return root
